// core/utf8.h: text cut to a number of bytes.
#pragma once

#include <cstddef>      // std::size_t
#include <string_view>  // std::string_view

namespace jaxcoll {

/// The beginning of `text`, at most so many bytes, that ends with a whole character of UTF-8:
/// Python refuses part of one.
inline std::string_view Beginning(std::string_view text, std::size_t most_bytes) {
  if (text.size() <= most_bytes) {
    return text;
  }
  const auto continues = [&text](std::size_t i) {
    return (static_cast<unsigned char>(text[i]) & 0xC0) == 0x80;
  };
  std::size_t end = most_bytes;
  while (end > 0 && continues(end)) {
    --end;
  }
  return text.substr(0, end);
}

}  // namespace jaxcoll

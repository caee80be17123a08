// core/shared_text.h: text in memory that processes share.
#pragma once

#include <array>        // std::array
#include <atomic>       // std::atomic
#include <cstddef>      // std::size_t
#include <cstdint>      // std::uint64_t
#include <string>       // std::string
#include <string_view>  // std::string_view

#include "core/utf8.h"

namespace jaxcoll {

/// Text that one process writes and others may read meanwhile: a reader gets some mixture of old
/// and new, and checks another word to know whether it may trust what it got. What is too long is
/// cut.
template <std::size_t kBytes>
class SharedText {
 public:
  void Set(std::string_view text) {
    text = Beginning(text, kBytes);
    for (std::size_t i = 0; i < words_.size(); ++i) {
      std::uint64_t word = 0;
      for (std::size_t j = 0; j < 8 && i * 8 + j < text.size(); ++j) {
        word |= static_cast<std::uint64_t>(static_cast<unsigned char>(text[i * 8 + j])) << (8 * j);
      }
      words_[i].store(word, std::memory_order_relaxed);
      if (i * 8 >= text.size()) {
        return;
      }
    }
  }

  [[nodiscard]] std::string Get() const {
    std::string text;
    for (const auto& shared : words_) {
      for (std::uint64_t word = shared.load(std::memory_order_relaxed), j = 0; j < 8; ++j) {
        const char c = static_cast<char>(word >> (8 * j));
        if (c == '\0') {
          return text;
        }
        text.push_back(c);
      }
    }
    return text;
  }

 private:
  std::array<std::atomic<std::uint64_t>, kBytes / 8> words_{};
};

}  // namespace jaxcoll

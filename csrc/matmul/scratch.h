// matmul/scratch.h: memory of a thread, kept for its next product.
#pragma once

#include <cstddef>  // std::byte, std::size_t
#include <vector>   // std::vector

namespace jaxcoll {

/// At least `bytes`, until this thread asks again.
inline std::byte* Scratch(std::size_t bytes) {
  static thread_local std::vector<std::byte> scratch;
  if (scratch.size() < bytes) {
    scratch.resize(bytes);
  }
  return scratch.data();
}

}  // namespace jaxcoll

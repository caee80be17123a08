// kernels/copy.h: copies that bypass the caches.
#pragma once

#include <cstddef>  // std::size_t
#include <cstring>  // std::memcpy

namespace jaxcoll {

/// Copies `bytes` between places that don't overlap, like std::memcpy but with stores that go past
/// the caches where the machine has them: a line that is written whole is then not read first, a
/// third of a copy's traffic, nor asked for where another core has it. Worth it for data that would
/// not be found in a cache later, and between cores that are far from each other.
using CopyFn = void (*)(void* to, const void* from, std::size_t bytes);

/// The implementation for this machine.
CopyFn GetStreamCopy();

/// Less is not worth the fence after each.
inline constexpr std::size_t kLeastStreamBytes = 4096;

/// Copies with `stream_copy`, unless that is null or there is little.
inline void Copy(void* to, const void* from, std::size_t bytes, CopyFn stream_copy) {
  if (stream_copy != nullptr && bytes >= kLeastStreamBytes) {
    stream_copy(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

/// From how many bytes on, read and written together, data leaves this machine's caches again
/// before anybody uses it: about the size of the last level.
std::size_t CacheBytes();

}  // namespace jaxcoll

// kernels/copy.h: copies that bypass the caches.
#pragma once

#include <cstddef>  // std::size_t

namespace jaxcoll {

/// Copies `bytes` between places that don't overlap, like std::memcpy but with stores that go past
/// the caches where the machine has them: a line that is written whole is then not read first, a
/// third of a copy's traffic. Worth it only for data that would not be found in a cache later.
using CopyFn = void (*)(void* to, const void* from, std::size_t bytes);

/// The implementation for this machine.
CopyFn GetStreamCopy();

/// From how many bytes on, read and written together, data leaves this machine's caches again
/// before anybody uses it: about the size of the last level.
std::size_t CacheBytes();

}  // namespace jaxcoll

#include "host/peer_memory.h"

#include <sys/types.h>  // pid_t
#include <sys/uio.h>    // iovec, process_vm_readv

#include <algorithm>  // std::min
#include <array>      // std::array
#include <cerrno>     // errno

namespace jaxcoll {
namespace {

// Of one system call, on both sides; Linux takes 1024.
constexpr std::size_t kMaxRows = 64;

// All of `count` rows, however many bytes the system copies at a time.
bool ReadRows(pid_t pid, iovec* to, iovec* from, std::size_t count) {
  std::size_t first = 0;
  while (first < count) {
    const ssize_t got =
        process_vm_readv(pid, to + first, count - first, from + first, count - first, 0);
    if (got <= 0) {
      if (got < 0 && errno == EINTR) {
        continue;
      }
      return false;
    }
    auto left = static_cast<std::size_t>(got);
    while (first < count && left >= from[first].iov_len) {
      left -= from[first].iov_len;
      ++first;
    }
    if (left > 0) {
      for (iovec* const part : {to + first, from + first}) {
        part->iov_base = static_cast<std::byte*>(part->iov_base) + left;
        part->iov_len -= left;
      }
    }
  }
  return true;
}

}  // namespace

bool ReadPeer(std::int64_t pid, std::byte* to, const std::byte* from, const PeerRows& layout) {
  std::array<iovec, kMaxRows> targets;
  std::array<iovec, kMaxRows> sources;
  for (std::size_t row = 0; row < layout.rows;) {
    const std::size_t count = std::min(kMaxRows, layout.rows - row);
    for (std::size_t i = 0; i < count; ++i, ++row) {
      targets[i] = {.iov_base = to + row * layout.to_step, .iov_len = layout.bytes};
      // The system does not write there.
      sources[i] = {.iov_base = const_cast<std::byte*>(from) + row * layout.from_step,
                    .iov_len = layout.bytes};
    }
    if (!ReadRows(static_cast<pid_t>(pid), targets.data(), sources.data(), count)) {
      return false;
    }
  }
  return true;
}

}  // namespace jaxcoll

#include "host/peer_memory.h"

#include <sys/types.h>  // pid_t
#include <sys/uio.h>    // iovec, process_vm_readv
#include <unistd.h>     // getpid

#include <algorithm>  // std::min
#include <array>      // std::array
#include <cerrno>     // errno
#include <cstring>    // std::memcpy
#include <limits>     // std::numeric_limits
#include <vector>     // std::vector

#include "core/clock.h"

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

// As a piece of copies through windows (host/copy_route.cc).
constexpr std::size_t kSampleBytes = std::size_t{128} * 1024;
// The least of so many counts: other programs have the core at times.
constexpr int kSamples = 16;

template <typename F>
std::int64_t LeastNs(const F& f) {
  std::int64_t least_ns = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < kSamples; ++i) {
    const std::int64_t begin_ns = NowNs();
    f();
    least_ns = std::min(least_ns, NowNs() - begin_ns);
  }
  return least_ns;
}

// In this process's own memory: what differs is how the bytes are reached, not how far they are.
double MeasureReading() {
  const std::vector<std::byte> source(kSampleBytes);
  std::vector<std::byte> target(kSampleBytes);
  // Through a pointer that the compiler can't see through: nobody looks at what is copied.
  void* (*volatile copy)(void*, const void*, std::size_t) = &std::memcpy;
  const std::int64_t copying_ns =
      LeastNs([&] { copy(target.data(), source.data(), kSampleBytes); });
  bool can_read = true;
  const PeerRows rows{.rows = 1, .bytes = kSampleBytes, .from_step = 0, .to_step = 0};
  const std::int64_t reading_ns = LeastNs(
      [&] { can_read = can_read && ReadPeer(getpid(), target.data(), source.data(), rows); });
  return can_read ? static_cast<double>(reading_ns) / static_cast<double>(copying_ns)
                  : std::numeric_limits<double>::infinity();
}

}  // namespace

double ReadingCost() {
  static const double cost = MeasureReading();
  return cost;
}

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

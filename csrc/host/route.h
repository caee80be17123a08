// host/route.h: how one collective's data goes through shared memory.
#pragma once

#include <algorithm>  // std::max, std::min
#include <cstddef>    // std::byte, std::size_t
#include <cstdint>    // std::int64_t

#include "core/align.h"
#include "core/pooled.h"
#include "host/copy_costs.h"
#include "host/membership.h"
#include "host/work.h"
#include "kernels/copy.h"

namespace jaxcoll {

/// Rounds that a window holds, one after the other and again from its begin. With two a process
/// could leave one while others read the last; but whoever writes again to what another core has
/// just read waits for that core's cache to let go of each line. Measured on 2 cores with an L2
/// cache of 1 MiB each: copies through windows of 1 MiB in four rounds take 0.4 to 0.9 of the time
/// of 256 KiB in two, and more rounds than four gain nothing.
inline constexpr std::size_t kRoundsInWindow = 4;

/// Where in a window a round of so many bytes begins.
inline std::size_t RoundBegin(std::size_t round, std::size_t round_bytes) {
  return round % kRoundsInWindow * round_bytes;
}

/// What each of `count` pieces gets that share a round, of `bytes` in all rounds: whole cache
/// lines.
inline std::size_t PieceBytes(std::size_t window_bytes, std::size_t count, std::size_t bytes) {
  return std::min(RoundedDown(window_bytes / kRoundsInWindow / count, kCacheLine),
                  RoundedUp(std::max<std::size_t>(1, bytes), kCacheLine));
}

/// The smallest window through which every op of the group fits: rounds of a cache line from each
/// of a process's ranks to each rank.
inline std::size_t MinWindowBytes(const Membership& members) {
  return kRoundsInWindow * kCacheLine * (members.num_ranks() + 1) * members.most_ranks();
}

/// How data goes into the own window, and out of the others': for Copy (kernels/copy.h).
struct WindowCopies {
  CopyFn leave = nullptr;
  CopyFn take = nullptr;
};

/// The processes of a group, in their order.
struct Processes {
  std::byte* const* windows;
  const std::int64_t* pids;  ///< for reading their memory
  WindowCopies copies{};
};

/// What a route may use.
struct RouteOptions {
  std::size_t window_bytes = 0;
  bool can_read_peers = false;  ///< processes may read each other's memory (peer_memory.h)
  CopyCosts copy_costs{};
};

/// A collective in rounds of bounded size, each in phases. In a phase a process reads what the
/// others left in their windows in the phase before, and leaves something in its own: the first
/// phase only writes, the last one only reads. A window holds kRoundsInWindow of the rounds. All
/// processes of a group go through the same phases and rounds; immutable.
///
/// Results are the same bits as those of the same Work in one process: reductions add in the order
/// of the ranks, wherever these are. Matmuls are an exception: a BLAS adds up in an order of its
/// own.
class Route : public Pooled {
 public:
  Route() = default;
  Route(const Route&) = delete;
  Route& operator=(const Route&) = delete;
  virtual ~Route() = default;

  [[nodiscard]] virtual std::size_t num_phases() const = 0;  ///< at least 2
  [[nodiscard]] virtual std::size_t num_rounds() const = 0;  ///< at least 1
  /// What a round takes of a window; 0: the route keeps to the window's begin.
  [[nodiscard]] virtual std::size_t round_bytes() const { return 0; }
  /// `local` has the buffers of this process's ranks. False: another process's memory can't be
  /// read.
  [[nodiscard]] virtual bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                                 const Processes& processes) const = 0;

  /// Whether a process reads in `phase` what another one has left in the phase before, or has done.
  /// Known to all: who does not read what a process leaves may not have come when it goes on.
  [[nodiscard]] virtual bool Reads(std::size_t /*phase*/, std::size_t /*reader*/,
                                   std::size_t /*process*/) const {
    return true;
  }

  /// What of a round needs no other process: done once the round's first phase is published, while
  /// the others may still be on their way.
  virtual void Meanwhile(std::size_t /*round*/, const Buffers& /*local*/) const {}
  /// Whether the second phase takes what each other process has left by itself and as it comes,
  /// with Take instead of Run, and leaves nothing for a third one.
  [[nodiscard]] virtual bool takes_one_by_one() const { return false; }
  /// As Run.
  [[nodiscard]] virtual bool Take(std::size_t /*round*/, std::size_t /*process*/,
                                  const Buffers& /*local*/, const Processes& /*processes*/) const {
    return true;
  }
};

}  // namespace jaxcoll

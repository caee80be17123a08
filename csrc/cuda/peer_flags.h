// cuda/peer_flags.h: how devices tell each other how far they are: words in each other's memory
// that grow, on a device or on the host (see cuda/peer_sum.h for what a `Team` is).
#pragma once

#include <cstdint>  // std::uint32_t

#ifdef __CUDACC__
#define JAXCOLL_ON_DEVICE __device__ __forceinline__
#else
#define JAXCOLL_ON_DEVICE inline
#endif

namespace jaxcoll::cuda {

/// Whether a flag says that much, or more, also where it has started anew after 2^32.
constexpr bool HasReached(std::uint32_t flag, std::uint32_t awaited) {
  return flag - awaited < std::uint32_t{1} << 31;
}

/// Waits until `is_reached` (a flag -> bool). Whether it is: else the group has failed.
template <typename Team, typename IsReached>
JAXCOLL_ON_DEVICE bool AwaitFlag(const Team& team, const std::uint32_t& flag,
                                 const std::uint32_t& has_failed, const IsReached& is_reached) {
  constexpr std::uint32_t kLooks = 256;
  std::uint32_t looks = 0;
  while (!is_reached(team.Load(flag))) {
    // Which is across the bus: seldom.
    if (++looks % kLooks == 0 && team.LoadFailure(has_failed) != 0) {
      return false;
    }
  }
  return true;
}

/// The parameter of the kernels that do nothing else, of one thread for each flag.
struct PeerSignal {
  static constexpr std::uint32_t kMostFlags = 2;

  std::uint32_t* flags[kMostFlags];
  std::uint32_t num_flags;
  std::uint32_t value;
  /// Whether a flag is awaited that nobody sets further before this rank goes on; it may lie idle
  /// for long, and start anew meanwhile.
  std::uint32_t is_exact;
  const std::uint32_t* has_failed;  ///< not 0: the group has failed, nobody is to be awaited
  const std::uint32_t* raised;      ///< as PeerCall's
};

/// What was on the stream before is seen by who sees the flags. Nothing is said once the group has
/// failed: what was awaited before may not have come.
template <typename Team>
JAXCOLL_ON_DEVICE void SayFlags(const PeerSignal& signal, Team& team) {
  team.Sync();
  if (team.LoadFailure(*signal.has_failed) != 0) {
    return;
  }
  for (std::uint32_t i = team.thread(); i < signal.num_flags; i += team.num_threads()) {
    team.Store(*signal.flags[i], signal.value);
  }
}

/// What comes next on the stream sees what the flags stand for; where it is awaited in vain, it is
/// not to run: the device fails.
template <typename Team>
JAXCOLL_ON_DEVICE void AwaitFlags(const PeerSignal& signal, Team& team) {
  for (std::uint32_t i = team.thread(); i < signal.num_flags; i += team.num_threads()) {
    const bool is_met =
        AwaitFlag(team, *signal.flags[i], *signal.has_failed, [&](std::uint32_t flag) {
          return signal.is_exact != 0 ? flag == signal.value : HasReached(flag, signal.value);
        });
    if (!is_met && signal.raised != nullptr && team.LoadFailure(*signal.raised) != 0) {
      team.Trap();
    }
  }
}

}  // namespace jaxcoll::cuda

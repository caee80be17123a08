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

/// Waits until a flag says that much. Whether it does: else the group has failed.
template <typename Team>
JAXCOLL_ON_DEVICE bool AwaitFlag(const Team& team, const std::uint32_t& flag, std::uint32_t awaited,
                                 const std::uint32_t& has_failed) {
  constexpr std::uint32_t kLooks = 256;
  std::uint32_t looks = 0;
  while (!HasReached(team.Load(flag), awaited)) {
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
  const std::uint32_t* has_failed;  ///< not 0: the group has failed, nobody is to be awaited
};

/// What was on the stream before is seen by who sees the flags.
template <typename Team>
JAXCOLL_ON_DEVICE void SayFlags(const PeerSignal& signal, const Team& team) {
  team.Sync();
  for (std::uint32_t i = team.thread(); i < signal.num_flags; i += team.num_threads()) {
    team.Store(*signal.flags[i], signal.value);
  }
}

/// What comes next on the stream sees what the flags stand for.
template <typename Team>
JAXCOLL_ON_DEVICE void AwaitFlags(const PeerSignal& signal, const Team& team) {
  for (std::uint32_t i = team.thread(); i < signal.num_flags; i += team.num_threads()) {
    AwaitFlag(team, *signal.flags[i], signal.value, *signal.has_failed);
  }
}

}  // namespace jaxcoll::cuda

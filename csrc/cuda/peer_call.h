// cuda/peer_call.h: a sum over peer memory, as the host asks for it and the kernels do it.
//
// Every rank of a group has a window in its device's memory, which all others have mapped: flags,
// and two slots that calls take in turn. A call copies its operand into its own slot, says so in
// the flags of all windows, waits until all have said so in its own, and reads the others' slots.
//
// Two slots are enough. A rank writes to one again two calls later: by then all have said in the
// call between that they were in it, and so past the first one, as a device does one call after the
// other.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>  // std::uint32_t, std::uint64_t

namespace jaxcoll::cuda {

inline constexpr std::uint32_t kMostPeers = 8;
/// Each waits for the same one of the other ranks, and for no other: the device may run them one
/// after the other. They take that many SMs at most.
inline constexpr std::uint32_t kMostPeerBlocks = 16;
inline constexpr std::uint32_t kPeerThreads = 512;
/// The largest operand. Right on one H100 (docs/gpu.md); for several GPUs a guess.
inline constexpr std::size_t kPeerSlotBytes = 256 << 10;
/// Up to here every rank sums all of it; beyond, a part of it that the others fetch then. A guess.
inline constexpr std::size_t kOneShotBytes = 32 << 10;

struct PeerWindow {
  /// By block and by the rank that says it. Only grows, but that it may start anew after 2^32.
  std::uint32_t flags[kMostPeerBlocks][kMostPeers];
  alignas(128) unsigned char slots[2][kPeerSlotBytes];
};

/// The parameter of a kernel.
struct PeerCall {
  const void* operand;
  void* result;
  std::uint64_t count;  ///< of elements, whose bytes fit a slot
  std::uint32_t rank;
  std::uint32_t num_ranks;
  std::uint32_t number;             ///< of the group's calls, the same on all ranks, from 1
  std::uint32_t is_aligned;         ///< operand and result by 16 bytes
  const std::uint32_t* has_failed;  ///< not 0: the group has failed, nobody is to be awaited
  /// Not 0: whoever has waited in vain makes the device fail (cuda/failing.h); null: nobody does.
  const std::uint32_t* raised;
  PeerWindow* windows[kMostPeers];  ///< of all ranks, as this one has mapped them
};

/// How sums are done: flags tell two moments of a call apart.
enum class PeerStage : std::uint32_t { kCopied = 0, kSummed = 1 };

/// What a flag says at a stage of a call, or more at a later one.
constexpr std::uint32_t PeerFlag(std::uint32_t number, PeerStage stage) {
  return 2 * number + static_cast<std::uint32_t>(stage);
}

/// Enough for the bytes at 16 for each thread, the same on all ranks.
constexpr std::uint32_t PeerBlocks(std::size_t bytes) {
  const std::size_t blocks = (bytes + 16 * kPeerThreads - 1) / (16 * kPeerThreads);
  return blocks < 1                 ? 1
         : blocks < kMostPeerBlocks ? static_cast<std::uint32_t>(blocks)
                                    : kMostPeerBlocks;
}

}  // namespace jaxcoll::cuda

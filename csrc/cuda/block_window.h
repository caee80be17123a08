// cuda/block_window.h: where blocks of a collective matmul come to: a window in a device's memory
// that the others have mapped, with flags and then slots.
//
// A rank copies a block into a slot of another rank's window, and says so in its flag there. No
// slot is filled twice in a call. When a call is over on a device, it says so to those who fill its
// slots, who wait for that before the next call.
#pragma once

#include <bit>      // std::bit_ceil
#include <cstddef>  // std::byte, std::size_t
#include <cstdint>  // std::uint32_t

#include "cuda/peer_call.h"

namespace jaxcoll::cuda {

/// A call fills each of these at most once: two parts of a block of each other rank.
inline constexpr std::size_t kMostArrivals = 2 * (kMostPeers - 1);
/// Of the slots; beyond, blocks go by NCCL: windows are never freed.
inline constexpr std::size_t kMostSlotBytes = std::size_t{1} << 30;

struct BlockWindow {
  std::uint32_t arrived[kMostArrivals];  ///< the number of the call
  std::uint32_t freed[kMostPeers];       ///< by rank: its latest call that is over
  std::uint32_t tried[kMostPeers];       ///< by rank, which has copied there; for nothing else
};

inline constexpr std::size_t kSlotsAt = 256;
static_assert(sizeof(BlockWindow) <= kSlotsAt);

/// Of the slots of a window that has so many bytes of them: a few sizes serve all calls of a group.
constexpr std::size_t RoundedSlotBytes(std::size_t bytes) {
  constexpr std::size_t kLeast = std::size_t{1} << 20;
  return bytes <= kLeast ? kLeast : std::bit_ceil(bytes);
}

}  // namespace jaxcoll::cuda

// cuda/peer_sum.h: the body of the kernels that sum over peer memory (cuda/peer_call.h).
//
// One block of one rank, on a device (cuda/peer_kernels.cu) or, in tests, as threads of the host.
// What differs is a `Team`, the threads of the block:
//
//   thread(), num_threads(), block(), num_blocks()
//   Sync()             all of its threads have come, and see what the others have written
//   SyncAll(bool)      the same; whether all have come with true
//   Store(flag, value) what its threads have written before the last Sync() is seen first
//   Load(flag)         what was written before the value is seen after it
//   LoadFailure(word)  as it is now, from the host's memory; what was written before is seen after
//   Trap()             makes the device fail
//
// Ranks are added in their order, rank 0 first, so that all get the same bits.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>  // std::uint32_t

#include "cuda/peer_call.h"
#include "cuda/peer_flags.h"
#include "cuda/peer_numbers.h"

namespace jaxcoll::cuda {

/// So many elements as are loaded at once.
template <typename T, std::size_t kWidth>
struct alignas(kWidth * sizeof(T)) PeerPack {
  T elements[kWidth];
};

/// Elements [first, end).
struct PeerRange {
  std::size_t first;
  std::size_t end;
};

/// Part `index` of `count` elements, split at multiples of `width` into `parts`.
JAXCOLL_ON_DEVICE PeerRange PeerPart(PeerRange whole, std::size_t width, std::size_t index,
                                     std::size_t parts) {
  const std::size_t count = whole.end - whole.first;
  const std::size_t packs = (count + width - 1) / width;
  const std::size_t part = (packs + parts - 1) / parts * width;
  const std::size_t first = part * index < count ? part * index : count;
  const std::size_t end = first + part < count ? first + part : count;
  return {whole.first + first, whole.first + end};
}

template <typename Element, typename Team>
class PeerSum {
 public:
  using T = typename Element::Stored;

  JAXCOLL_ON_DEVICE PeerSum(const PeerCall& call, Team& team) : call_(call), team_(team) {}

  /// Every rank sums all of it.
  JAXCOLL_ON_DEVICE void OneShot() const {
    const PeerRange mine = PeerPart({0, call_.count}, kWidth, team_.block(), team_.num_blocks());
    Copy(operand(), Slot(call_.rank), mine);
    if (!Meet(PeerStage::kCopied)) {
      return;
    }
    Sum(result(), mine);
  }

  /// Rank r sums part r, in its slot, and the others fetch that.
  JAXCOLL_ON_DEVICE void TwoShot() const {
    for (std::uint32_t owner = 0; owner < call_.num_ranks; ++owner) {
      Copy(operand(), Slot(call_.rank), PartOf(owner));
    }
    if (!Meet(PeerStage::kCopied)) {
      return;
    }
    Sum(Slot(call_.rank), PartOf(call_.rank));
    if (!Meet(PeerStage::kSummed)) {
      return;
    }
    for (std::uint32_t step = 0; step < call_.num_ranks; ++step) {
      const std::uint32_t owner = (call_.rank + step) % call_.num_ranks;  // not all the same first
      Copy(Slot(owner), result(), PartOf(owner));
    }
  }

 private:
  static constexpr std::size_t kWidth = 16 / sizeof(T);
  using Pack = PeerPack<T, kWidth>;

  JAXCOLL_ON_DEVICE const T* operand() const { return static_cast<const T*>(call_.operand); }
  JAXCOLL_ON_DEVICE T* result() const { return static_cast<T*>(call_.result); }
  JAXCOLL_ON_DEVICE T* Slot(std::uint32_t rank) const {
    return reinterpret_cast<T*>(call_.windows[rank]->slots[call_.number % 2]);
  }
  /// What this block does of a rank's part.
  JAXCOLL_ON_DEVICE PeerRange PartOf(std::uint32_t owner) const {
    return PeerPart(PeerPart({0, call_.count}, kWidth, owner, call_.num_ranks), kWidth,
                    team_.block(), team_.num_blocks());
  }

  /// Runs `whole` (first element) for packs and `single` (element) for what is left, or for all.
  template <typename Whole, typename Single>
  JAXCOLL_ON_DEVICE void ForEach(PeerRange range, const Whole& whole, const Single& single) const {
    const std::size_t count = range.end - range.first;
    const std::size_t packed = call_.is_aligned != 0 ? count / kWidth * kWidth : 0;
    for (std::size_t i = team_.thread() * kWidth; i < packed; i += team_.num_threads() * kWidth) {
      whole(range.first + i);
    }
    for (std::size_t i = packed + team_.thread(); i < count; i += team_.num_threads()) {
      single(range.first + i);
    }
  }

  JAXCOLL_ON_DEVICE void Copy(const T* from, T* to, PeerRange range) const {
    ForEach(
        range,
        [&](std::size_t i) {
          *reinterpret_cast<Pack*>(to + i) = *reinterpret_cast<const Pack*>(from + i);
        },
        [&](std::size_t i) { to[i] = from[i]; });
  }

  JAXCOLL_ON_DEVICE void Sum(T* to, PeerRange range) const {
    ForEach(
        range,
        [&](std::size_t i) {
          Pack pack = *reinterpret_cast<const Pack*>(Slot(0) + i);
          typename Element::Sum sums[kWidth];
          for (std::size_t e = 0; e < kWidth; ++e) {
            sums[e] = Element::Load(pack.elements[e]);
          }
          for (std::uint32_t rank = 1; rank < call_.num_ranks; ++rank) {
            pack = *reinterpret_cast<const Pack*>(Slot(rank) + i);
            for (std::size_t e = 0; e < kWidth; ++e) {
              sums[e] = Added(sums[e], pack.elements[e]);
            }
          }
          for (std::size_t e = 0; e < kWidth; ++e) {
            pack.elements[e] = Element::Round(sums[e]);
          }
          *reinterpret_cast<Pack*>(to + i) = pack;
        },
        [&](std::size_t i) {
          typename Element::Sum sum = Element::Load(Slot(0)[i]);
          for (std::uint32_t rank = 1; rank < call_.num_ranks; ++rank) {
            sum = Added(sum, Slot(rank)[i]);
          }
          to[i] = Element::Round(sum);
        });
  }

  static JAXCOLL_ON_DEVICE typename Element::Sum Added(typename Element::Sum sum, T value) {
    return static_cast<typename Element::Sum>(sum + Element::Load(value));
  }

  /// Waits until this block of all ranks is so far. Whether it is: else the group has failed, and
  /// the rest is not to be done; what the program computes with it is lost.
  JAXCOLL_ON_DEVICE bool Meet(PeerStage stage) const {
    const std::uint32_t flag = PeerFlag(call_.number, stage);
    team_.Sync();
    for (std::uint32_t i = team_.thread(); i < call_.num_ranks; i += team_.num_threads()) {
      team_.Store(call_.windows[i]->flags[team_.block()][call_.rank], flag);
    }
    bool is_met = true;
    for (std::uint32_t i = team_.thread(); i < call_.num_ranks; i += team_.num_threads()) {
      const std::uint32_t& said = call_.windows[call_.rank]->flags[team_.block()][i];
      is_met = is_met && AwaitFlag(team_, said, *call_.has_failed,
                                   [&](std::uint32_t now) { return HasReached(now, flag); });
    }
    is_met = team_.SyncAll(is_met);
    if (!is_met && call_.raised != nullptr && team_.LoadFailure(*call_.raised) != 0) {
      team_.Trap();
    }
    return is_met;
  }

  const PeerCall& call_;
  Team& team_;
};

}  // namespace jaxcoll::cuda

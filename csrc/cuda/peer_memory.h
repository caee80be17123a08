// cuda/peer_memory.h: a group's small sums over peer memory: whether its ranks do them so, and with
// what (cuda/peer_seat.h).
//
// All ranks do or none does: the processes of the group tell each other what they have, whether
// they have mapped what the others have, and whether the probe was right.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint32_t, std::uint64_t
#include <memory>   // std::unique_ptr
#include <string>   // std::string
#include <vector>   // std::vector

#include "core/status.h"
#include "cuda/libraries.h"
#include "cuda/peer_seat.h"
#include "cuda/peer_windows.h"
#include "cuda/rounds.h"

namespace jaxcoll::cuda {

/// Made once, by one thread, before a group's first call.
class PeerMemory {
 public:
  struct Plan {
    const void* image = nullptr;  ///< of the kernels; null: there are none
    std::uint64_t host = 0;       ///< see PeerOffer
    std::vector<LocalRank> local;
    const std::uint32_t* ended = nullptr;   ///< not 0: nobody is to be awaited any more
    const std::uint32_t* raised = nullptr;  ///< see PeerSeat::EndAt
    std::int64_t timeout_ns = -1;           ///< of the probe; < 0: none
  };

  /// Why a group of so many ranks, of which these local devices are some, can't do it as far as
  /// this process knows; or nothing.
  static std::string Problem(const Libraries& libraries, const void* image,
                             const std::vector<int>& ordinals, std::size_t num_ranks);

  /// Makes the windows, and tells the other processes where they are: a round that all processes
  /// of a group make, whatever they have. Changes the current device, as Connect does.
  Status Offer(const Libraries& libraries, const Plan& plan, Rounds& rounds);
  /// Maps the windows, and probes them (cuda/peer_probe.h). Fails where the probe does; what else
  /// goes wrong is the `problem` of all ranks then, which have no seats.
  Status Connect(const Libraries& libraries, const Plan& plan, Rounds& rounds);

  /// Why there are no seats, or nothing; the same on all ranks.
  [[nodiscard]] const std::string& problem() const { return problem_; }
  /// Whether Problem would have said so.
  [[nodiscard]] bool is_foreseen() const { return is_foreseen_; }

  /// After Offer: whether all ranks are.
  [[nodiscard]] bool is_on_one_host() const { return is_on_one_host_; }

  /// Of a local rank, by its index in the plan; null: none.
  [[nodiscard]] PeerSeat* seat(std::size_t index) {
    return is_usable_ ? seats_[index].get() : nullptr;
  }

 private:
  Status MakeSeats(const Libraries& libraries, const Plan& plan);

  PeerWindows windows_;
  std::vector<PeerOffer> offers_;                 // by rank
  std::vector<std::unique_ptr<PeerSeat>> seats_;  // as the plan's ranks
  std::string problem_;
  bool is_foreseen_ = false;
  bool is_on_one_host_ = false;
  bool is_usable_ = false;
};

}  // namespace jaxcoll::cuda

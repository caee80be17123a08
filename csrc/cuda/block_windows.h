// cuda/block_windows.h: the windows of a group for the blocks of collective matmuls: of one size,
// made before the first run of the first program that needs it.
//
// All ranks have them or none has; these send by NCCL.
#pragma once

#include <cstddef>  // std::size_t
#include <memory>   // std::unique_ptr
#include <string>   // std::string
#include <vector>   // std::vector

#include "core/status.h"
#include "cuda/block_seat.h"
#include "cuda/libraries.h"
#include "cuda/peer_seat.h"
#include "cuda/peer_windows.h"
#include "cuda/rounds.h"

namespace jaxcoll::cuda {

class BlockWindows {
 public:
  /// Makes and maps them, in two rounds of the group's processes. `signals` of the local ranks, in
  /// their order. What goes wrong on a rank is the `problem` of all. Changes the current device.
  Status Make(const Libraries& libraries, std::size_t slot_bytes,
              const std::vector<LocalRank>& local, const std::vector<PeerSignals>& signals,
              Rounds& rounds);

  /// Why there are none, or nothing; the same on all ranks.
  [[nodiscard]] const std::string& problem() const { return problem_; }
  /// Of a local rank, by its index; null: there are none.
  [[nodiscard]] BlockSeat* seat(std::size_t index) {
    return problem_.empty() ? seats_[index].get() : nullptr;
  }

 private:
  Status MakeSeats(const Libraries& libraries, const std::vector<LocalRank>& local,
                   const std::vector<PeerSignals>& signals);

  PeerWindows windows_;
  std::vector<PeerOffer> offers_;                  // by rank
  std::vector<std::unique_ptr<BlockSeat>> seats_;  // as the local ranks
  std::string problem_ = "not made";
};

}  // namespace jaxcoll::cuda

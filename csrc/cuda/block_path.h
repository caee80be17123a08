// cuda/block_path.h: how blocks get from neighbour to neighbour within a call of a collective
// matmul, on the side stream: over peer memory, or by NCCL.
#pragma once

#include <cstddef>   // std::size_t
#include <optional>  // std::optional
#include <span>      // std::span

#include "core/status.h"
#include "cuda/block_seat.h"
#include "cuda/clique.h"
#include "cuda/libraries.h"

namespace jaxcoll::cuda {

/// What a rank sends and gets at once; all ranks do alike.
struct Parcel {
  std::size_t to;
  std::size_t from;
  const void* sent;
  void* received;
  std::size_t bytes;
  /// Over peer memory: where it comes to in the slots, of which `received` is this rank's own, and
  /// which of the call's arrivals that is.
  std::size_t offset;
  std::size_t arrival;
  std::optional<std::size_t> relayed{};  ///< the arrival that `sent` came with
};

/// `to` goes on where `from` is now.
Status Follow(const Libraries& libraries, Stream to, Stream from, Event event);

class BlockPath {
 public:
  /// `blocks`: null: by NCCL.
  BlockPath(const Libraries& libraries, const Seat& seat, BlockSeat* blocks, Stream stream)
      : libraries_(libraries), seat_(seat), blocks_(blocks), stream_(stream) {}

  /// Before all else of the call. Takes an event.
  Status Begin(Event begun);
  /// What the stream has done by now can be sent. Takes an event.
  Status Follow(Event event) const {
    return cuda::Follow(libraries_, seat_.side_stream, stream_, event);
  }
  /// Puts these on the side stream; `done` is recorded there by NCCL's way, where all travel at
  /// once. Over peer memory they travel one after the other.
  Status Exchange(std::span<const Parcel> parcels, Event done) const;
  /// What comes next on the stream comes after an arrival, or, by NCCL, after the exchange that
  /// has recorded `done`.
  Status Await(std::size_t arrival, Event done) const;
  /// After all else of the call. Takes an event.
  Status End(Event ended);

 private:
  const Libraries& libraries_;
  const Seat& seat_;
  BlockSeat* const blocks_;
  const Stream stream_;
};

}  // namespace jaxcoll::cuda

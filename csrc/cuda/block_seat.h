// cuda/block_seat.h: the blocks of collective matmuls as one rank of a group sends them to its
// neighbours: copied into their memory, which takes no SM (cuda/block_window.h).
//
// Calls of a group have the same numbers on all ranks, as each device makes them in the same order.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::byte, std::size_t
#include <cstdint>  // std::uint32_t

#include "core/status.h"
#include "cuda/block_window.h"
#include "cuda/libraries.h"
#include "cuda/peer_seat.h"

namespace jaxcoll::cuda {

class BlockSeat {
 public:
  /// For the current device, which has mapped the windows of all ranks. Each kernel has run, and
  /// each neighbour's window was copied to, on `stream` when it returns: CUDA may load what is
  /// first used, and wait for the device then, which may wait for another one.
  Status Create(const Libraries& libraries, const PeerSignals& signals, std::size_t rank,
                std::size_t num_ranks, const std::array<std::byte*, kMostPeers>& windows,
                Stream stream);

  /// A call begins: what is on `stream` from here on may send and await.
  Status Begin(const Libraries& libraries, Stream stream);
  /// What is on a stream from here on may fill slots of the neighbours around the ring.
  Status AwaitRoom(const Libraries& libraries, Stream stream) const;
  /// Copies a block to the window of rank `to`, so many bytes after the start of its slots, and
  /// says so there.
  Status Send(const Libraries& libraries, Stream stream, const void* block, std::size_t bytes,
              std::size_t to, std::size_t offset, std::size_t arrival) const;
  /// What is on a stream from here on comes after that `arrival` of this call.
  Status AwaitArrival(const Libraries& libraries, Stream stream, std::size_t arrival) const;
  /// The call is over on a stream, and its slots are free.
  Status End(const Libraries& libraries, Stream stream);

  /// This rank's own slots.
  [[nodiscard]] std::byte* slots() const { return SlotsOf(rank_); }

 private:
  [[nodiscard]] BlockWindow& WindowOf(std::size_t rank) const {
    return *reinterpret_cast<BlockWindow*>(windows_.at(rank));
  }
  [[nodiscard]] std::byte* SlotsOf(std::size_t rank) const { return windows_.at(rank) + kSlotsAt; }
  [[nodiscard]] std::size_t after() const { return (rank_ + 1) % num_ranks_; }
  [[nodiscard]] std::size_t before() const { return (rank_ + num_ranks_ - 1) % num_ranks_; }
  static Status Copy(const Libraries& libraries, Stream stream, void* to, const void* from,
                     std::size_t bytes);
  struct Said {
    std::uint32_t value;
    bool is_exact = false;  ///< see PeerSignal
  };
  Status Signal(const Libraries& libraries, Stream stream, Function kernel, const Said& said,
                std::uint32_t& flag, std::uint32_t& other) const;

  PeerSignals signals_;
  std::size_t rank_ = 0;
  std::size_t num_ranks_ = 0;
  std::array<std::byte*, kMostPeers> windows_{};
  std::uint32_t number_ = 0;  // of the call
  Event done_ = nullptr;      // of the latest call, on
  Stream stream_ = nullptr;
};

}  // namespace jaxcoll::cuda

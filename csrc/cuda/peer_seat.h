// cuda/peer_seat.h: small sums over memory that devices read of each other (cuda/peer_call.h), as
// one rank of a group puts them on its device.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::size_t
#include <cstdint>  // std::uint32_t

#include "core/status.h"
#include "cuda/libraries.h"
#include "cuda/peer_call.h"

namespace jaxcoll::cuda {

/// A tree of more leaves is for NCCL, which takes them all at once. A guess.
inline constexpr std::size_t kMostPeerLeaves = 4;

class PeerSeat {
 public:
  /// Whether there is a kernel for numbers of this type, and a slot for so many.
  [[nodiscard]] static bool Fits(NcclType type, std::size_t count);

  /// For the current device, which has mapped the windows of all ranks.
  Status Create(const Libraries& libraries, const void* image, std::size_t rank,
                std::size_t num_ranks, const std::array<PeerWindow*, kMostPeers>& windows);

  /// Kernels of later calls wait for nobody any more once this word of the host's is not 0.
  void EndAt(const std::uint32_t* word) { call_.has_failed = word; }

  /// Puts a sum on a stream, in the order of the ranks. The result may be the operand.
  Status Sum(const Libraries& libraries, Stream stream, NcclType type, const void* operand,
             void* result, std::size_t count);

 private:
  static constexpr std::size_t kNumTypes = 10;  // of NCCL's

  struct Kernels {
    Function one_shot = nullptr;
    Function two_shot = nullptr;
  };

  Status LoadKernels(const Libraries& libraries, const void* image);

  PeerCall call_{};  // but for what a call has of its own
  std::array<Kernels, kNumTypes> kernels_{};
  Event done_ = nullptr;  // of the latest call, on
  Stream stream_ = nullptr;
};

}  // namespace jaxcoll::cuda

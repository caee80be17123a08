// cuda/peer_seat.h: small sums over memory that devices read of each other (cuda/peer_call.h), as
// one rank of a group puts them on its device.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::byte, std::size_t
#include <cstdint>  // std::uint32_t

#include "core/status.h"
#include "cuda/libraries.h"
#include "cuda/peer_call.h"

namespace jaxcoll::cuda {

/// A tree of more leaves is for NCCL, which takes them all at once. A guess.
inline constexpr std::size_t kMostPeerLeaves = 4;

/// Kernels of cuda/peer_flags.h for a device, and when they wait no more.
struct PeerSignals {
  Function say = nullptr;
  Function await = nullptr;
  const std::uint32_t* ended = nullptr;
  const std::uint32_t* raised = nullptr;  ///< as PeerCall's
};

/// Puts a kernel of cuda/peer_kernels.cu on a stream, with a copy of its parameter.
Status LaunchPeerKernel(const Libraries& libraries, Function kernel, std::uint32_t num_blocks,
                        std::uint32_t num_threads, Stream stream, void* parameter);

class PeerSeat {
 public:
  /// Whether there is a kernel for numbers of this type, and a slot for so many.
  [[nodiscard]] static bool Fits(NcclType type, std::size_t count);

  /// For the current device, which has mapped the windows of all ranks.
  Status Create(const Libraries& libraries, const void* image, std::size_t rank,
                std::size_t num_ranks, const std::array<std::byte*, kMostPeers>& windows);

  /// Kernels of later calls wait for nobody any more once this word of the host's is not 0. If they
  /// have waited, and `raised` is not 0, they make the device fail; null: never.
  void EndAt(const std::uint32_t* word, const std::uint32_t* raised = nullptr) {
    call_.has_failed = word;
    call_.raised = raised;
    signals_.ended = word;
    signals_.raised = raised;
  }
  [[nodiscard]] const PeerSignals& signals() const { return signals_; }

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
  PeerSignals signals_;
  Event done_ = nullptr;  // of the latest call, on
  Stream stream_ = nullptr;
};

}  // namespace jaxcoll::cuda

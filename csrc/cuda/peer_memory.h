// cuda/peer_memory.h: small sums of a group whose ranks are in one process, over memory that their
// devices read of each other (cuda/peer_call.h), in the order of the ranks.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint32_t
#include <memory>   // std::unique_ptr
#include <string>   // std::string
#include <vector>   // std::vector

#include "core/status.h"
#include "cuda/libraries.h"
#include "cuda/peer_call.h"

namespace jaxcoll::cuda {

/// A tree of more leaves is for NCCL, which takes them all at once. A guess.
inline constexpr std::size_t kMostPeerLeaves = 4;

/// Where the windows of a group's ranks are, as one of them sees them, and how far it is.
class PeerSeat {
 public:
  /// Whether there is a kernel for numbers of this type, and a slot for so many.
  [[nodiscard]] static bool Fits(NcclType type, std::size_t count);

  /// Puts a sum on a stream. The result may be the operand.
  Status Sum(const Libraries& libraries, Stream stream, NcclType type, const void* operand,
             void* result, std::size_t count);

 private:
  friend class PeerMemory;

  static constexpr std::size_t kNumTypes = 10;  // of NCCL's

  struct Kernels {
    Function one_shot = nullptr;
    Function two_shot = nullptr;
  };

  Status LoadKernels(const Libraries& libraries, const void* image);

  int ordinal_ = 0;
  PeerCall call_{};  // but for what a call has of its own
  std::array<Kernels, kNumTypes> kernels_{};
  Event done_ = nullptr;  // of the latest call, on
  Stream stream_ = nullptr;
};

/// Made once, by one thread, before a group's first call.
class PeerMemory {
 public:
  /// Why the devices, by rank, don't reach each other's memory as far as CUDA says; or nothing.
  static std::string Problem(const Libraries& libraries, const std::vector<int>& ordinals);

  struct Rank {
    int ordinal;
    Stream stream;  ///< for the probe
  };
  /// Makes the windows and maps them. Then all ranks sum a number of each, so that each has read
  /// what every other one wrote, and waited for it, with a kernel: within `timeout_ns`. `ended` is
  /// not 0 when nobody is to be awaited any more. Changes the current device.
  Status Create(const Libraries& libraries, const void* image, const std::vector<Rank>& ranks,
                const std::uint32_t* ended, std::int64_t timeout_ns);

  /// Null where Create has not succeeded.
  [[nodiscard]] PeerSeat* seat(std::size_t rank) {
    return is_usable_ ? seats_[rank].get() : nullptr;
  }

 private:
  Status MakeWindows(const Libraries& libraries, const std::vector<Rank>& ranks);
  Status MakeSeats(const Libraries& libraries, const void* image, const std::vector<Rank>& ranks);
  Status Probe(const Libraries& libraries, const std::vector<Rank>& ranks, std::int64_t timeout_ns);

  std::array<PeerWindow*, kMostPeers> windows_{};  // never freed: a kernel may be in one
  std::vector<std::unique_ptr<PeerSeat>> seats_;
  bool is_usable_ = false;
};

}  // namespace jaxcoll::cuda

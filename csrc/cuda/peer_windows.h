// cuda/peer_windows.h: the windows of a group's ranks (cuda/peer_call.h): made in the memory of
// this process's devices, and mapped by all devices of the group, also by those of other processes.
//
// None is ever freed or unmapped: a kernel, here or elsewhere, may be in it.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::size_t
#include <cstdint>  // std::uint64_t
#include <string>   // std::string
#include <vector>   // std::vector

#include "core/status.h"
#include "cuda/libraries.h"
#include "cuda/peer_call.h"

namespace jaxcoll::cuda {

/// A rank of this process.
struct LocalRank {
  std::size_t rank;
  int ordinal;    ///< CUDA's number of its device
  Stream stream;  ///< nothing is on it
};

/// A problem, or nothing, as processes tell it each other; ended by a zero.
using PeerText = std::array<char, 192>;
PeerText ToPeerText(const std::string& problem);

/// What a rank says of its window: all that other processes need to map it.
struct PeerOffer {
  std::uint64_t host = 0;  ///< the same for processes that can share memory
  std::array<char, 32> bus_id{};
  IpcHandle handle{};
  PeerText problem{};  ///< why it has none
};

class PeerWindows {
 public:
  /// Makes the window of a rank of this process, all zeros. `is_shared`: with other processes.
  /// Changes the current device.
  Status Make(const Libraries& libraries, const LocalRank& of, bool is_shared);
  /// Says how other processes map it.
  Status Describe(const Libraries& libraries, const LocalRank& of, PeerOffer& offer) const;
  /// Maps the windows of all ranks for the device of one of this process, the current one then.
  Status Map(const Libraries& libraries, const LocalRank& viewer,
             const std::vector<PeerOffer>& offers,
             std::array<PeerWindow*, kMostPeers>& windows) const;

 private:
  struct Own {
    PeerWindow* window = nullptr;  // null: another process's
    int ordinal = 0;
  };

  std::array<Own, kMostPeers> own_{};  // by rank
};

}  // namespace jaxcoll::cuda

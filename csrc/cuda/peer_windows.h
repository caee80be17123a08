// cuda/peer_windows.h: the windows of a group's ranks, memory for cuda/peer_call.h or
// cuda/block_window.h: made on this process's devices, and mapped by all devices of the group, also
// by those of other processes.
//
// None is ever freed or unmapped: a kernel, here or elsewhere, may be in it.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::byte, std::size_t
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

/// The first one's, by rank, or nothing.
template <typename Row>
std::string FirstProblem(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    if (row.problem.front() != '\0') {
      return row.problem.data();
    }
  }
  return "";
}

class PeerWindows {
 public:
  /// Makes the window of a rank of this process, all zeros, and says how other processes map it, or
  /// what the problem is. `is_shared`: with these. Changes the current device.
  void Offer(const Libraries& libraries, const LocalRank& of, std::size_t bytes, bool is_shared,
             PeerOffer& offer);
  /// Maps the windows of all ranks for the device of one of this process, the current one then.
  Status Map(const Libraries& libraries, const LocalRank& viewer,
             const std::vector<PeerOffer>& offers,
             std::array<std::byte*, kMostPeers>& windows) const;

 private:
  struct Own {
    std::byte* window = nullptr;  // null: another process's
    int ordinal = 0;
  };

  Status Make(const Libraries& libraries, const LocalRank& of, std::size_t bytes, bool is_shared);
  Status Describe(const Libraries& libraries, const LocalRank& of, PeerOffer& offer) const;

  std::array<Own, kMostPeers> own_{};  // by rank
};

}  // namespace jaxcoll::cuda

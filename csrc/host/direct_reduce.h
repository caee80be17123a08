// host/direct_reduce.h: large all_reduce and reduce_scatter across processes, whose operands are
// read from where they lie, as in host/direct_route.h.
#pragma once

#include <cstddef>  // std::byte, std::size_t
#include <vector>   // std::vector

#include "core/small_array.h"
#include "host/reduce_route.h"
#include "host/route.h"
#include "host/slabs.h"
#include "host/work.h"
#include "kernels/reduce.h"

namespace jaxcoll {

/// What processes leave in their windows for others to read: addresses. Behind them a window has
/// room, for its process alone, for what that has read: a place for each rank of the others.
class AddressBook {
 public:
  /// `num_addresses` of each rank.
  AddressBook(const Membership& members, std::size_t num_addresses, std::size_t window_bytes);

  void Write(std::byte* window, std::size_t position, std::size_t i, const void* address) const;
  [[nodiscard]] std::byte* Read(const std::byte* window, std::size_t position, std::size_t i) const;

  /// Of a place; 0 where a window has no room.
  [[nodiscard]] std::size_t place_bytes() const { return place_bytes_; }
  [[nodiscard]] std::byte* Place(std::byte* window, std::size_t i) const {
    return window + header_bytes_ + i * place_bytes_;
  }

 private:
  std::size_t num_addresses_;
  std::size_t header_bytes_;
  std::size_t place_bytes_;
};

/// A part of the tree for each process, which reads it of all others, reduces it, and lets them
/// read the result. Four phases, one round: leave addresses, reduce, read the other parts, wait for
/// those that read. Of a tree of S bytes on P processes of one rank each reads 2 S (P - 1) / P.
class DirectAllReduce final : public Route {
 public:
  DirectAllReduce(const std::vector<ReducedLeaf>& leaves, const Membership& members,
                  std::size_t window_bytes);

  /// Whether it fits, and comes sooner than ChunkedAllReduce. The same on all processes.
  static bool IsBetter(const std::vector<ReducedLeaf>& leaves, const Membership& members,
                       const RouteOptions& options);

  [[nodiscard]] std::size_t num_phases() const override { return 4; }
  [[nodiscard]] std::size_t num_rounds() const override { return 1; }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                         const Processes& processes) const override;

 private:
  void Leave(const Buffers& local, std::byte* window) const;
  [[nodiscard]] bool Reduce(const PackedPiece& piece, const Buffers& local,
                            const Processes& processes) const;
  [[nodiscard]] bool Fetch(const PackedPiece& piece, std::size_t owner, const Buffers& local,
                           const Processes& processes) const;

  SmallArray<ReducedLeaf, 2> leaves_;
  const Membership& members_;
  AddressBook book_;
  PackedTree tree_;  // a chunk for each process
};

/// As ReduceScatterRoute. Three phases, one round: leave addresses, reduce, wait for those that
/// read.
class DirectReduceScatter final : public Route {
 public:
  DirectReduceScatter(std::size_t element_bytes, ReduceFn reduce, std::size_t outer,
                      std::size_t inner, const Membership& members, std::size_t window_bytes);

  /// Whether it fits, and comes sooner than ReduceScatterRoute. The same on all processes.
  static bool IsBetter(std::size_t element_bytes, std::size_t outer, std::size_t inner,
                       const Membership& members, const RouteOptions& options);

  [[nodiscard]] std::size_t num_phases() const override { return 3; }
  [[nodiscard]] std::size_t num_rounds() const override { return 1; }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                         const Processes& processes) const override;

 private:
  [[nodiscard]] bool Reduce(const Slabs::Piece& piece, std::size_t target, const Buffers& local,
                            const Processes& processes) const;

  std::size_t element_bytes_;
  ReduceFn reduce_;
  std::size_t inner_;
  const Membership& members_;
  AddressBook book_;
  Slabs slabs_;  // of one rank's result, in elements
};

}  // namespace jaxcoll

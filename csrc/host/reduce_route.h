// host/reduce_route.h: all_reduce and reduce_scatter across processes.
#pragma once

#include <cstddef>  // std::byte, std::size_t
#include <memory>   // std::unique_ptr
#include <vector>   // std::vector

#include "core/small_array.h"
#include "core/types.h"
#include "host/route.h"
#include "host/slabs.h"
#include "host/work.h"
#include "kernels/reduce.h"

namespace jaxcoll {

/// A part of one leaf, and where it lies in the packed chunk that holds it.
struct PackedPiece {
  std::size_t leaf;
  std::size_t begin;  // bytes
  std::size_t bytes;
  std::size_t count;  // elements
  std::size_t at;     // bytes
};

/// What a route needs to know of a leaf.
struct ReducedLeaf {
  DType dtype;
  std::size_t count;
  ReduceFn reduce;  // not null
};

/// A tree in chunks of at most `chunk_bytes`, each packed so that every piece is aligned.
class PackedTree {
 public:
  PackedTree(const std::vector<ReducedLeaf>& leaves, std::size_t chunk_bytes);

  [[nodiscard]] std::size_t num_chunks() const { return ends_.size(); }
  [[nodiscard]] std::size_t begin(std::size_t chunk) const {
    return chunk == 0 ? 0 : ends_[chunk - 1];
  }
  [[nodiscard]] std::size_t end(std::size_t chunk) const { return ends_[chunk]; }
  [[nodiscard]] const PackedPiece& piece(std::size_t i) const { return pieces_[i]; }

  /// What a tree takes in one chunk.
  static std::size_t PackedBytes(const std::vector<ReducedLeaf>& leaves);

 private:
  SmallArray<PackedPiece, 2> pieces_;
  SmallArray<std::size_t, 2> ends_;
};

/// Every process leaves its ranks' trees and reduces all of them. One synchronisation: the way for
/// small trees. Each process writes its S and reads everybody's.
class OneShotAllReduce final : public Route {
 public:
  OneShotAllReduce(const std::vector<ReducedLeaf>& leaves, const Membership& members);

  [[nodiscard]] std::size_t num_phases() const override { return 2; }
  [[nodiscard]] std::size_t num_rounds() const override { return 1; }
  [[nodiscard]] std::size_t round_bytes() const override {
    return members_.most_ranks() * rank_bytes_;
  }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                         const Processes& processes) const override;

 private:
  SmallArray<ReducedLeaf, 2> leaves_;
  const Membership& members_;
  std::size_t rank_bytes_;
  PackedTree tree_;
};

/// A round is a chunk for each process: it reduces its own, and the others copy the result
/// (Rabenseifner's reduce-scatter and all-gather). Two synchronisations for each round; of a tree
/// of S bytes each process reads and writes about 2 S.
class ChunkedAllReduce final : public Route {
 public:
  ChunkedAllReduce(const std::vector<ReducedLeaf>& leaves, const Membership& members,
                   std::size_t window_bytes);

  [[nodiscard]] std::size_t num_phases() const override { return 3; }
  [[nodiscard]] std::size_t num_rounds() const override;
  [[nodiscard]] std::size_t round_bytes() const override {
    return (members_.num_processes() * members_.most_ranks() + 1) * chunk_bytes_;
  }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                         const Processes& processes) const override;

 private:
  [[nodiscard]] std::byte* Staged(std::byte* window, std::size_t round, std::size_t owner,
                                  std::size_t position) const;
  [[nodiscard]] std::byte* Reduced(std::byte* window, std::size_t round) const;

  SmallArray<ReducedLeaf, 2> leaves_;
  const Membership& members_;
  std::size_t chunk_bytes_;
  PackedTree tree_;
};

/// The better of the two for a tree of this size.
std::unique_ptr<const Route> MakeAllReduceRoute(const std::vector<ReducedLeaf>& leaves,
                                                const Membership& members,
                                                std::size_t window_bytes);

/// A round is one piece of every rank's slab, see ReduceScatterWork.
class ReduceScatterRoute final : public Route {
 public:
  ReduceScatterRoute(std::size_t element_bytes, ReduceFn reduce, std::size_t outer,
                     std::size_t inner, const Membership& members, std::size_t window_bytes);

  [[nodiscard]] std::size_t num_phases() const override { return 2; }
  [[nodiscard]] std::size_t num_rounds() const override;
  [[nodiscard]] std::size_t round_bytes() const override { return pieces_in_round_ * piece_bytes_; }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                         const Processes& processes) const override;

 private:
  /// Where the operand of `target`'s slab begins in row `row`, in elements.
  [[nodiscard]] std::size_t From(const Slabs::Piece& piece, std::size_t row,
                                 std::size_t target) const;
  [[nodiscard]] std::size_t At(std::size_t round, std::size_t target, std::size_t position) const;

  std::size_t element_bytes_;
  ReduceFn reduce_;
  std::size_t inner_;
  const Membership& members_;
  std::size_t pieces_in_round_;
  std::size_t piece_bytes_;
  Slabs slabs_;
};

}  // namespace jaxcoll

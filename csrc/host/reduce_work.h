// host/reduce_work.h: all_reduce and reduce_scatter.
#pragma once

#include <cstddef>  // std::size_t
#include <memory>   // std::unique_ptr
#include <vector>   // std::vector

#include "core/small_array.h"
#include "core/types.h"
#include "host/reduce_route.h"
#include "host/slabs.h"
#include "host/work.h"
#include "kernels/reduce.h"

namespace jaxcoll {

/// Reduces every leaf of a tree over all ranks; every rank gets the result. Results alias operands.
///
/// Each chunk reads its part of every rank's block once and writes every rank's result while the
/// block is in cache. Bytes moved: num_ranks * (read S + write S) for leaves of S bytes in all.
class AllReduceWork final : public Work {
 public:
  using Leaf = ReducedLeaf;

  explicit AllReduceWork(const std::vector<Leaf>& leaves);

  [[nodiscard]] std::size_t num_operands() const override { return leaves_.size(); }
  [[nodiscard]] std::size_t num_results() const override { return leaves_.size(); }
  [[nodiscard]] std::size_t operand_bytes(std::size_t i) const override;
  [[nodiscard]] std::size_t result_bytes(std::size_t i) const override { return operand_bytes(i); }
  [[nodiscard]] std::size_t num_chunks(std::size_t num_ranks) const override;
  [[nodiscard]] std::size_t bytes_moved(std::size_t num_ranks) const override;
  void Run(std::size_t chunk, const Buffers& buffers) const override;
  [[nodiscard]] std::unique_ptr<const Route> MakeRoute(const Membership& members,
                                                       const RouteOptions& options) const override;

 private:
  struct Piece {
    std::size_t leaf;
    std::size_t begin;  // elements
    std::size_t count;
  };

  SmallArray<Leaf, 2> leaves_;
  std::vector<Piece> pieces_;
  std::vector<std::size_t> chunk_ends_;  // chunk c holds pieces [chunk_ends_[c-1], chunk_ends_[c])
  std::size_t bytes_ = 0;                // of one rank's tree
};

/// Reduces (outer, num_ranks, inner) elements over all ranks; rank r gets slab r, (outer, inner).
/// Bytes moved: num_ranks * (read S + write S / num_ranks).
class ReduceScatterWork final : public Work {
 public:
  ReduceScatterWork(DType dtype, ReduceFn reduce, std::size_t outer, std::size_t num_ranks,
                    std::size_t inner);

  [[nodiscard]] std::size_t num_operands() const override { return 1; }
  [[nodiscard]] std::size_t num_results() const override { return 1; }
  [[nodiscard]] std::size_t operand_bytes(std::size_t i) const override;
  [[nodiscard]] std::size_t result_bytes(std::size_t i) const override;
  [[nodiscard]] std::size_t num_chunks(std::size_t num_ranks) const override;
  [[nodiscard]] std::size_t bytes_moved(std::size_t num_ranks) const override;
  void Run(std::size_t chunk, const Buffers& buffers) const override;
  [[nodiscard]] std::unique_ptr<const Route> MakeRoute(const Membership& members,
                                                       const RouteOptions& options) const override;

 private:
  ReduceFn reduce_;
  std::size_t element_bytes_;
  std::size_t outer_;
  std::size_t num_ranks_;
  std::size_t inner_;
  Slabs slabs_;  // of one rank's result, in elements
};

}  // namespace jaxcoll

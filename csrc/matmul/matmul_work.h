// matmul/matmul_work.h: all_gather_matmul and matmul_reduce_scatter.
#pragma once

#include <cstddef>  // std::byte, std::size_t
#include <memory>   // std::unique_ptr

#include "core/types.h"
#include "host/work.h"
#include "matmul/blas.h"

namespace jaxcoll {

/// What a collective matmul multiplies. Rank r has x_r and w_r, and gets y_r; s goes over all
/// ranks, in their order.
enum class MatmulKind {
  kGatherRows,     ///< y_r, block s of rows = x_s w_r
  kGatherInner,    ///< y_r = sum of x_s (w_r, block s of rows)
  kScatterRows,    ///< y_r = sum of (x_s, block r of rows) w_s
  kScatterColumns  ///< y_r = sum of x_s (w_s, block r of columns)
};

/// The measures of one block product, (rows, inner) times (inner, columns). With kGatherRows and
/// kScatterRows the rows of y and x are `batch` groups, each with a block for every rank: (batch,
/// ranks, rows / batch). Operands may lie transposed, x only where batch is 1.
struct MatmulLayout {
  MatmulKind kind;
  DType dtype;  ///< kF32 or kF64
  std::size_t num_ranks;
  std::size_t batch;
  std::size_t rows;
  std::size_t inner;
  std::size_t columns;
  bool x_is_transposed;
  bool w_is_transposed;

  [[nodiscard]] bool gathers() const {
    return kind == MatmulKind::kGatherRows || kind == MatmulKind::kGatherInner;
  }
  [[nodiscard]] std::size_t x_bytes() const;
  [[nodiscard]] std::size_t w_bytes() const;
  [[nodiscard]] std::size_t y_bytes() const;
  /// Multiplications of all ranks.
  [[nodiscard]] std::size_t products() const;
};

/// Rows [begin, begin + count) of a block, with columns or inner indices [first, first + width).
struct MatmulPart {
  std::size_t begin, count;
  std::size_t first, width;
};

/// Computes a part of the product that rank `target` gets of rank `source`'s block: those rows and
/// inner indices for gathering kinds, those rows and columns for scattering ones. `x` is the
/// source's operand; `w` the target's for gathering kinds, else the source's. `y` is the target's
/// result; with `packed_step` not 0 it is the part alone, with rows of so many elements.
void MultiplyPart(const MatmulLayout& layout, const MatmulPart& part, std::size_t source,
                  std::size_t target, const void* x, const void* w, void* y, bool adds,
                  std::size_t packed_step = 0);

/// As MultiplyPart of a gathering kind, where `x` is the part alone, packed as it lies.
void MultiplyPackedPart(const MatmulLayout& layout, const MatmulPart& part, std::size_t source,
                        const void* x, const void* w, void* y, bool adds);

/// Chunks are rows of block products, in an order in which ranks that come make more of them
/// possible: of kGatherRows all products between them; of sums, which are in rank order so that
/// equal operands give equal bits on all ranks, the terms up to the first rank that is missing.
class MatmulWork final : public Work {
 public:
  explicit MatmulWork(const MatmulLayout& layout);

  [[nodiscard]] std::size_t num_operands() const override { return 2; }
  [[nodiscard]] std::size_t num_results() const override { return 1; }
  [[nodiscard]] std::size_t operand_bytes(std::size_t i) const override {
    return i == 0 ? layout_.x_bytes() : layout_.w_bytes();
  }
  [[nodiscard]] std::size_t result_bytes(std::size_t) const override { return layout_.y_bytes(); }
  [[nodiscard]] std::size_t num_chunks(std::size_t num_ranks) const override;
  [[nodiscard]] std::size_t bytes_moved(std::size_t num_ranks) const override;
  void Run(std::size_t chunk, const Buffers& buffers) const override;
  [[nodiscard]] bool starts_early() const override { return true; }
  [[nodiscard]] std::size_t num_ready(const std::size_t* arrivals, std::size_t count,
                                      std::size_t num_ranks) const override;
  [[nodiscard]] std::size_t num_counters(std::size_t num_ranks) const override;
  [[nodiscard]] std::unique_ptr<const Route> MakeRoute(const Membership& members,
                                                       const RouteOptions& options) const override;

 private:
  struct Blocks {
    std::size_t source, target;
  };

  /// The blocks of product `number`.
  [[nodiscard]] Blocks BlocksOf(std::size_t number, const std::size_t* arrivals) const;

  MatmulLayout layout_;
  std::size_t panel_rows_;
  std::size_t num_panels_;
};

}  // namespace jaxcoll

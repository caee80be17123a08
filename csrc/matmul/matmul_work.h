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

/// What all ways have in common. Sums are in rank order, so that equal operands give equal bits on
/// all ranks.
class MatmulWork : public Work {
 public:
  explicit MatmulWork(const MatmulLayout& layout) : layout_(layout) {}

  [[nodiscard]] std::size_t num_operands() const final { return 2; }
  [[nodiscard]] std::size_t num_results() const final { return 1; }
  [[nodiscard]] std::size_t operand_bytes(std::size_t i) const final {
    return i == 0 ? layout_.x_bytes() : layout_.w_bytes();
  }
  [[nodiscard]] std::size_t result_bytes(std::size_t) const final { return layout_.y_bytes(); }
  [[nodiscard]] std::size_t bytes_moved(std::size_t num_ranks) const final;
  [[nodiscard]] std::unique_ptr<const Route> MakeRoute(const Membership& members,
                                                       const RouteOptions& options) const final;

 protected:
  [[nodiscard]] const MatmulLayout& layout() const { return layout_; }

 private:
  MatmulLayout layout_;
};

/// The way that is faster in one process.
std::unique_ptr<const MatmulWork> MakeMatmulWork(const MatmulLayout& layout);

}  // namespace jaxcoll

// matmul/joined_matmul.h: a collective matmul in one process where blocks have few rows.
#pragma once

#include <cstddef>  // std::byte, std::size_t

#include "host/work.h"
#include "matmul/matmul_work.h"

namespace jaxcoll {

/// The rows of all ranks are multiplied together, once all ranks have come: the BLAS arranges w
/// for each product anew, which takes longer than a product of few rows. For kGatherRows rows of x
/// are gathered in scratch memory first; for kScatterRows, which has them together, rows of y are
/// summed there. Chunks are rows and columns.
class JoinedMatmul final : public MatmulWork {
 public:
  explicit JoinedMatmul(const MatmulLayout& layout);

  /// Whether it is faster than block by block.
  static bool IsFaster(const MatmulLayout& layout);

  [[nodiscard]] std::size_t num_chunks(std::size_t num_ranks) const override;
  void Run(std::size_t chunk, const Buffers& buffers) const override;

 private:
  /// Some of all ranks' rows, and some columns.
  struct Panel {
    std::size_t begin, count;
    std::size_t first, width;
  };
  /// Rows of one rank that are among all ranks' rows.
  struct RowRun {
    std::size_t rank;
    std::size_t row, count;
    std::size_t at;  ///< among the panel's rows
  };

  /// Calls visit(run) for each run of a panel's rows.
  template <typename Visit>
  void EachRun(const Panel& panel, Visit visit) const;
  void Gather(const Panel& panel, std::size_t target, const Buffers& buffers) const;
  void Scatter(const Panel& panel, const Buffers& buffers) const;
  /// A matrix whose elements before (i, j) are left out.
  [[nodiscard]] Matrix From(const void* data, std::size_t step, bool is_transposed, std::size_t i,
                            std::size_t j) const;
  [[nodiscard]] Matrix WFrom(const void* w, std::size_t column) const;

  const std::size_t size_;  // of an element
  const std::size_t num_rows_;
  const std::size_t panel_rows_, panel_columns_;
  const std::size_t num_row_panels_, num_column_panels_;
};

}  // namespace jaxcoll

// host/copy_work.h: all_gather, all_to_all, ppermute and broadcast.
#pragma once

#include <cstddef>  // std::byte, std::size_t
#include <cstring>  // std::memcpy
#include <memory>   // std::unique_ptr
#include <vector>   // std::vector

#include "host/slabs.h"
#include "host/work.h"
#include "kernels/copy.h"

namespace jaxcoll {

/// One block from every rank to every rank, with strides on both sides: for all (source, target),
/// i in [0, rows) and j in [0, columns), `bytes` go
///
///   from  source's operand + target * from_block + i * from_row + j * from_column
///   to    target's result  + source * to_block   + i * to_row   + j * to_column
///
/// all_gather has from_block = 0; all_to_all of any split and concat dimension has two loops. All
/// figures are bytes. Bytes moved: num_ranks**2 * rows * columns * bytes, read and written.
struct ExchangeLayout {
  std::size_t rows, columns, bytes;
  std::size_t from_block, from_row, from_column;
  std::size_t to_block, to_row, to_column;
};

/// Steps of one side of a block, in bytes.
struct BlockSide {
  std::size_t row, column;
};

/// Copies a piece of a block, whose rows of `columns` columns the piece counts as one.
/// `stream_copy` may be null.
void CopyRows(const Slabs::Piece& piece, std::size_t columns, const std::byte* from,
              const BlockSide& from_side, std::byte* to, const BlockSide& to_side,
              CopyFn stream_copy);

/// The same, quickly where the piece is one run from the block's begin on, as where the block is.
inline void CopyBlock(const Slabs::Piece& piece, std::size_t columns, const std::byte* from,
                      const BlockSide& from_side, std::byte* to, const BlockSide& to_side,
                      CopyFn stream_copy) {
  if (piece.row == 0 && piece.num_rows == 1 && stream_copy == nullptr) {
    std::memcpy(to, from, piece.length);
  } else {
    CopyRows(piece, columns, from, from_side, to, to_side, stream_copy);
  }
}

class ExchangeWork final : public Work {
 public:
  ExchangeWork(const ExchangeLayout& layout, std::size_t operand_bytes, std::size_t result_bytes);

  [[nodiscard]] std::size_t num_operands() const override { return 1; }
  [[nodiscard]] std::size_t num_results() const override { return 1; }
  [[nodiscard]] std::size_t operand_bytes(std::size_t) const override { return operand_bytes_; }
  [[nodiscard]] std::size_t result_bytes(std::size_t) const override { return result_bytes_; }
  [[nodiscard]] std::size_t num_chunks(std::size_t num_ranks) const override;
  [[nodiscard]] std::size_t bytes_moved(std::size_t num_ranks) const override;
  void Run(std::size_t chunk, const Buffers& buffers) const override;
  [[nodiscard]] std::unique_ptr<const Route> MakeRoute(const Membership& members,
                                                       const RouteOptions& options) const override;

 private:
  ExchangeLayout layout_;
  std::size_t operand_bytes_;
  std::size_t result_bytes_;
  Slabs slabs_;  // of one (source, target) pair: rows * columns rows of `bytes`
};

/// Whole buffers from some ranks to others: target r gets the operand of rank `source_of[r]`, or
/// zeros where that is kNone. In place where a target's result is its source's operand. A rank
/// whose result is null gets nothing.
class PermuteWork final : public Work {
 public:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  PermuteWork(std::vector<std::size_t> source_of, std::size_t bytes);

  [[nodiscard]] std::size_t num_operands() const override { return 1; }
  [[nodiscard]] std::size_t num_results() const override { return 1; }
  [[nodiscard]] std::size_t operand_bytes(std::size_t) const override { return bytes_; }
  [[nodiscard]] std::size_t result_bytes(std::size_t) const override { return bytes_; }
  [[nodiscard]] std::size_t num_chunks(std::size_t num_ranks) const override;
  [[nodiscard]] std::size_t bytes_moved(std::size_t num_ranks) const override;
  void Run(std::size_t chunk, const Buffers& buffers) const override;
  [[nodiscard]] std::unique_ptr<const Route> MakeRoute(const Membership& members,
                                                       const RouteOptions& options) const override;

 private:
  std::vector<std::size_t> source_of_;
  std::size_t bytes_;
  Slabs slabs_;
};

}  // namespace jaxcoll

// host/slabs.h: cutting a (rows, row_length) range into pieces of about equal size.
#pragma once

#include <algorithm>  // std::max, std::min
#include <cstddef>    // std::size_t

namespace jaxcoll {

/// Rows of equal length, cut into pieces: several whole rows where rows are short, a part of one
/// row where rows are long. No piece is longer than about `target` units.
class Slabs {
 public:
  struct Piece {
    std::size_t row;       // first row
    std::size_t num_rows;  // 1 where `begin` or `length` cut the row
    std::size_t begin;     // first unit within each row
    std::size_t length;    // units of each row
  };

  Slabs(std::size_t rows, std::size_t row_length, std::size_t target)
      : rows_(rows),
        row_length_(row_length),
        rows_per_piece_(row_length == 0 ? 1 : std::max<std::size_t>(1, target / row_length)),
        pieces_per_row_(rows_per_piece_ > 1 ? 1 : (row_length + target - 1) / target),
        num_pieces_(rows_per_piece_ > 1 ? (rows + rows_per_piece_ - 1) / rows_per_piece_
                                        : rows * pieces_per_row_),
        part_(pieces_per_row_ == 0 ? 0 : (row_length + pieces_per_row_ - 1) / pieces_per_row_) {}

  /// 0 where there is nothing to do.
  [[nodiscard]] std::size_t num_pieces() const { return num_pieces_; }

  [[nodiscard]] Piece piece(std::size_t i) const {
    if (rows_per_piece_ > 1) {
      const std::size_t row = i * rows_per_piece_;
      return {row, std::min(rows_per_piece_, rows_ - row), 0, row_length_};
    }
    if (pieces_per_row_ == 1) {  // of small calls, where divisions count
      return {i, 1, 0, row_length_};
    }
    const std::size_t begin = (i % pieces_per_row_) * part_;
    return {i / pieces_per_row_, 1, begin,
            std::min(part_, row_length_ - std::min(begin, row_length_))};
  }

 private:
  std::size_t rows_;
  std::size_t row_length_;
  std::size_t rows_per_piece_;
  std::size_t pieces_per_row_;
  std::size_t num_pieces_;
  std::size_t part_;
};

}  // namespace jaxcoll

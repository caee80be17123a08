// host/copy_route.h: all_gather, all_to_all, ppermute and broadcast across processes.
#pragma once

#include <cstddef>  // std::byte, std::size_t
#include <vector>   // std::vector

#include "core/small_array.h"
#include "host/copy_work.h"
#include "host/route.h"
#include "host/slabs.h"
#include "host/work.h"

namespace jaxcoll {

/// A round is one piece of every block, see ExchangeLayout. A block that is the same for all
/// targets is left once.
class ExchangeRoute final : public Route {
 public:
  ExchangeRoute(const ExchangeLayout& layout, const Membership& members, std::size_t window_bytes);

  [[nodiscard]] std::size_t num_phases() const override { return 2; }
  [[nodiscard]] std::size_t num_rounds() const override;
  [[nodiscard]] std::size_t round_bytes() const override { return pieces_in_round_ * piece_bytes_; }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                         const Processes& processes) const override;
  void Meanwhile(std::size_t round, const Buffers& local) const override;
  [[nodiscard]] bool takes_one_by_one() const override { return true; }
  [[nodiscard]] bool Take(std::size_t round, std::size_t process, const Buffers& local,
                          const Processes& processes) const override;

 private:
  [[nodiscard]] std::size_t At(std::size_t round, std::size_t target, std::size_t position) const;

  // Packed pieces begin with their first row; blocks with the block's.
  [[nodiscard]] BlockSide Packed(const Slabs::Piece& piece) const;
  [[nodiscard]] static std::size_t Skipped(const Slabs::Piece& piece) {
    return piece.row * piece.length;
  }

  ExchangeLayout layout_;
  const Membership& members_;
  bool one_for_all_;
  std::size_t pieces_in_round_;
  std::size_t piece_bytes_;
  Slabs slabs_;  // of one block
};

/// A round is one piece of every operand that a rank of another process wants. Nobody waits for
/// those that it gets nothing from.
class PermuteRoute final : public Route {
 public:
  PermuteRoute(const std::vector<std::size_t>& source_of, std::size_t bytes,
               const Membership& members, std::size_t window_bytes);

  [[nodiscard]] std::size_t num_phases() const override { return 2; }
  [[nodiscard]] std::size_t num_rounds() const override;
  [[nodiscard]] std::size_t round_bytes() const override {
    return members_.most_ranks() * piece_bytes_;
  }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                         const Processes& processes) const override;
  [[nodiscard]] bool Reads(std::size_t phase, std::size_t reader,
                           std::size_t process) const override;

 private:
  [[nodiscard]] std::size_t At(std::size_t round, std::size_t position) const;

  SmallArray<std::size_t, 4> source_of_;
  const Membership& members_;
  SmallArray<bool, 8> is_wanted_;  // by rank: by another process
  std::size_t piece_bytes_;
  Slabs slabs_;
};

}  // namespace jaxcoll

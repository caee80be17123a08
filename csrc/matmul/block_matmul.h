// matmul/block_matmul.h: a collective matmul in one process, block by block.
#pragma once

#include <cstddef>  // std::size_t

#include "host/work.h"
#include "matmul/matmul_work.h"

namespace jaxcoll {

/// Chunks are rows of block products, in an order in which ranks that come make more of them
/// possible: of kGatherRows all products between them; of sums the terms up to the first rank that
/// is missing.
class BlockMatmul final : public MatmulWork {
 public:
  explicit BlockMatmul(const MatmulLayout& layout);

  [[nodiscard]] std::size_t num_chunks(std::size_t num_ranks) const override;
  void Run(std::size_t chunk, const Buffers& buffers) const override;
  [[nodiscard]] bool starts_early() const override { return true; }
  [[nodiscard]] std::size_t num_ready(const std::size_t* arrivals, std::size_t count,
                                      std::size_t num_ranks) const override;
  [[nodiscard]] std::size_t num_counters(std::size_t num_ranks) const override;

 private:
  struct Blocks {
    std::size_t source, target;
  };

  /// The blocks of product `number`.
  [[nodiscard]] Blocks BlocksOf(std::size_t number, const std::size_t* arrivals) const;

  std::size_t panel_rows_;
  std::size_t num_panels_;
};

}  // namespace jaxcoll

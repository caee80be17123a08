// matmul/direct_matmul.h: kGatherRows across processes, of large blocks, read from where they lie.
#pragma once

#include <cstddef>  // std::byte, std::size_t

#include "host/route.h"
#include "matmul/matmul_work.h"

namespace jaxcoll {

/// Three phases, one round: leave the addresses of x, read and multiply, wait until all have read
/// (host/direct_route.h). A process multiplies its own blocks meanwhile, and those of others as
/// they come, some rows at a time, which it copies once; its own in the same parts, since a BLAS
/// may add up in another order where it has fewer rows.
class DirectMatmul final : public Route {
 public:
  DirectMatmul(const MatmulLayout& layout, const Membership& members);

  /// Whether blocks are so large that they are read where the system allows that. What copies cost
  /// does not count, which each job measures anew: through windows products have other bits, since
  /// sums are split there.
  static bool Suits(const MatmulLayout& layout);

  [[nodiscard]] std::size_t num_phases() const override { return 3; }
  [[nodiscard]] std::size_t num_rounds() const override { return 1; }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                         const Processes& processes) const override;
  void Meanwhile(std::size_t round, const Buffers& local) const override;
  [[nodiscard]] bool takes_one_by_one() const override { return true; }
  [[nodiscard]] bool Take(std::size_t round, std::size_t process, const Buffers& local,
                          const Processes& processes) const override;

 private:
  [[nodiscard]] MatmulPart Part(std::size_t i) const;

  const MatmulLayout layout_;
  const Membership& members_;
  const std::size_t part_rows_;
  const std::size_t num_parts_;
};

}  // namespace jaxcoll

// matmul/matmul_route.h: collective matmuls across processes.
#pragma once

#include <cstddef>  // std::byte, std::size_t

#include "host/route.h"
#include "matmul/matmul_work.h"

namespace jaxcoll {

/// In parts that fit the windows. Gathering kinds: a process leaves a part of its ranks' x, the
/// others multiply it where it lies. Scattering kinds: a process multiplies what others get and
/// leaves the products, the others add them up. Each sum is in rank order, with kGatherInner in
/// each part. With kGatherRows there are none: a process's own blocks are multiplied at once, the
/// others' as they come. So is the own product of scattering kinds where there are two ranks, whose
/// terms may be added in any order: the BLAS takes less time for a whole one. What is gathered is
/// multiplied in the same parts everywhere, so that equal operands give equal bits on all ranks.
class MatmulRoute final : public Route {
 public:
  MatmulRoute(const MatmulLayout& layout, const Membership& members, std::size_t window_bytes);

  [[nodiscard]] std::size_t num_phases() const override { return 2; }
  [[nodiscard]] std::size_t num_rounds() const override { return num_row_parts_ * num_parts_; }
  [[nodiscard]] std::size_t round_bytes() const override { return slots_in_round_ * slot_bytes_; }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                         const Processes& processes) const override;
  void Meanwhile(std::size_t round, const Buffers& local) const override;
  [[nodiscard]] bool takes_one_by_one() const override {
    return layout_.kind == MatmulKind::kGatherRows;  // the others add up
  }
  [[nodiscard]] bool Take(std::size_t round, std::size_t process, const Buffers& local,
                          const Processes& processes) const override;

 private:
  /// Where a process's window holds what its rank `source` leaves for rank `target`, of another
  /// process, or for all.
  [[nodiscard]] std::size_t At(std::size_t round, std::size_t source, std::size_t target) const;
  [[nodiscard]] MatmulPart Part(std::size_t round) const;
  /// Leaves a part of x, packed as it lies.
  void LeaveX(const MatmulPart& part, const std::byte* x, std::byte* to, CopyFn stream_copy) const;
  void Leave(std::size_t round, const MatmulPart& part, const Buffers& local,
             const Processes& processes) const;
  /// Multiplies a part of x of a process's ranks, whose window it is.
  void Gather(std::size_t round, std::size_t process, const Buffers& local,
              const std::byte* window) const;
  void GatherSums(std::size_t round, const Buffers& local, const Processes& processes) const;
  void MultiplyX(std::size_t round, std::size_t source, std::size_t target, const Buffers& local,
                 const std::byte* window, bool adds) const;
  /// Whether sums begin with this process's own product, all at once.
  [[nodiscard]] bool OwnIsFirst() const { return !layout_.gathers() && members_.num_ranks() == 2; }
  void AddUp(std::size_t round, const MatmulPart& part, const Buffers& local,
             const Processes& processes) const;

  const MatmulLayout layout_;
  const Membership& members_;
  std::size_t slots_in_round_;
  std::size_t slot_bytes_;
  std::size_t part_rows_, part_width_;
  std::size_t num_row_parts_, num_parts_;  // along rows; along inner indices or columns
};

}  // namespace jaxcoll

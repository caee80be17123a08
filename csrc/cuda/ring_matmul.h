// cuda/ring_matmul.h: the collective matmuls: blocks travel on a stream of their own, from step to
// step, beside the products on XLA's.
//
// They are copied into the neighbours' memory where the group has that (cuda/block_seat.h), else
// sent by NCCL. Results beyond y are memory that XLA plans for: blocks on their way, as far as they
// are not in peer memory, and cuBLASLt's workspace. No slot is used twice in a call, so that a
// transfer never waits for a product but the one that made what it sends.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::size_t
#include <memory>   // std::unique_ptr
#include <vector>   // std::vector

#include "core/types.h"
#include "cuda/block_path.h"
#include "cuda/operation.h"
#include "cuda/product.h"
#include "cuda/ring.h"

namespace jaxcoll::cuda {

enum class RingKind : std::uint8_t {
  kGatherRows,      ///< (batch, rows, inner) of each rank; y is (batch, p * rows, columns)
  kScatterRows,     ///< x is (batch, p * rows, inner); y is (batch, rows, columns)
  kScatterColumns,  ///< w is (inner, p * columns); y is (batch * rows, columns)
  kGatherInner,     ///< (batch * rows, inner) of each rank; w is (p * inner, columns)
};

/// Sizes of one rank's block. x is transposed only where batch is 1.
struct RingShape {
  RingKind kind = RingKind::kGatherRows;
  std::size_t num_ranks = 0;
  std::size_t batch = 1;
  std::size_t rows = 0;
  std::size_t inner = 0;
  std::size_t columns = 0;
  bool x_is_transposed = false;
  bool w_is_transposed = false;
  DType operand = DType::kF32;
  DType result = DType::kF32;
  bool allows_tf32 = false;
  std::size_t workspace_bytes = 0;
};

/// Operands x and w; results y, the slots and the workspace.
class RingMatmul : public Operation {
 public:
  [[nodiscard]] std::size_t num_operands() const override { return 2; }
  [[nodiscard]] std::size_t num_results() const override { return 3; }
  [[nodiscard]] std::size_t operand_bytes(std::size_t i) const override {
    return i == 0 ? x_bytes_ : w_bytes_;
  }
  [[nodiscard]] std::size_t peer_slot_bytes() const override {
    return slot_bytes_ * (shape_.num_ranks - 1);
  }
  [[nodiscard]] std::size_t result_bytes(std::size_t i) const override {
    return i == 0   ? y_bytes_
           : i == 1 ? slot_bytes_ * (shape_.num_ranks - 1)
                    : shape_.workspace_bytes;
  }

 protected:
  explicit RingMatmul(const RingShape& shape);

  /// What one device needs beyond its buffers; made before it runs.
  struct Tools {
    std::array<Product, 2> products;  ///< of each chain
    std::vector<Event> events;
    BlockSeat* blocks = nullptr;  ///< null: blocks go by NCCL
  };

  std::unique_ptr<Tools>& ToolsAt(const Seat& seat) {
    return tools_[static_cast<std::size_t>(seat.ordinal)];
  }
  [[nodiscard]] const Tools& ToolsOf(const Seat& seat) const {
    return *tools_[static_cast<std::size_t>(seat.ordinal)];
  }
  static Status MakeEvents(const Libraries& libraries, Tools& tools, std::size_t count);

  const RingShape shape_;
  std::size_t x_bytes_ = 0;
  std::size_t w_bytes_ = 0;
  std::size_t y_bytes_ = 0;
  std::size_t slot_bytes_ = 0;
  std::array<std::unique_ptr<Tools>, kMaxOrdinals> tools_;  // each used by its device's thread
};

/// Rows are multiplied as they come. Products of parts of `inner` are added in the order of the
/// ranks, so that equal operands give equal bits on all of them.
class RingGatherMatmul final : public RingMatmul {
 public:
  explicit RingGatherMatmul(const RingShape& shape);
  Status Prepare(const Libraries& libraries, const Seat& seat, BlockSeat* blocks) override;
  Status Enqueue(const Libraries& libraries, const Seat& seat, Stream stream,
                 std::span<const void* const> operands,
                 std::span<void* const> results) const override;

 private:
  [[nodiscard]] std::size_t WOffset(std::size_t owner) const;
  [[nodiscard]] bool gathers_inner() const { return shape_.kind == RingKind::kGatherInner; }
  /// Where blocks are in a call.
  struct Places {
    /// That of an owner: x, or in its slot.
    [[nodiscard]] const void* Block(const RingGatherMatmul& of, const Seat& seat,
                                    std::size_t owner) const;

    const void* x;
    void* slots;
  };
  [[nodiscard]] std::size_t SlotOf(const Seat& seat, std::size_t owner) const;
  Status Gather(const Seat& seat, const BlockPath& path, const Places& places,
                const std::vector<GatherStep>& steps) const;
};

/// Each block is summed in two parts, one each way around the ring: while one is on its way, the
/// other is multiplied. Partial sums have the result's type.
class RingScatterMatmul final : public RingMatmul {
 public:
  explicit RingScatterMatmul(const RingShape& shape);
  Status Prepare(const Libraries& libraries, const Seat& seat, BlockSeat* blocks) override;
  Status Enqueue(const Libraries& libraries, const Seat& seat, Stream stream,
                 std::span<const void* const> operands,
                 std::span<void* const> results) const override;

 private:
  /// Which part of a block: some of a batch, or some rows where there is no batch.
  struct Chain {
    std::size_t first = 0;
    std::size_t count = 0;  ///< 0: there is none
  };

  [[nodiscard]] std::size_t XOffset(const Chain& chain, std::size_t owner) const;
  [[nodiscard]] std::size_t WOffset(std::size_t owner) const;
  [[nodiscard]] std::size_t Elements(const Chain& chain) const;
  /// Which one brings what chain `i` adds to in a step, from 1.
  [[nodiscard]] std::size_t ArrivalOf(std::size_t i, std::size_t step) const {
    return i * (flat_.num_ranks - 1) + step - 1;
  }

  RingShape flat_;  // with rows of several batches as one, where that is the same
  std::array<Chain, 2> chains_{};
};

std::unique_ptr<Operation> MakeRingMatmul(const RingShape& shape);

}  // namespace jaxcoll::cuda

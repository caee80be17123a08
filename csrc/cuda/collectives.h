// cuda/collectives.h: the collectives, each a group of NCCL's calls on one stream.
//
// Operands and results are contiguous, with the ranks' blocks outermost: the program transposes
// where another dimension is meant (jaxcoll/_nccl_calls.py).
#pragma once

#include <cstddef>  // std::size_t
#include <utility>  // std::move
#include <vector>   // std::vector

#include "cuda/operation.h"
#include "cuda/reductions.h"

namespace jaxcoll::cuda {

/// In a group of NCCL's: bytes to or from another rank.
Status Send(const Libraries& libraries, const Seat& seat, Stream stream, const void* data,
            std::size_t bytes, std::size_t to);
Status Receive(const Libraries& libraries, const Seat& seat, Stream stream, void* data,
               std::size_t bytes, std::size_t from);

/// All leaves of a tree, in one group; results may alias operands. `is_small_sum`: over peer
/// memory, in the order of the ranks, where the group has that; all leaves fit (PeerSeat::Fits).
class AllReduce final : public Operation {
 public:
  struct Leaf {
    Reduction reduction;
    std::size_t count;  ///< of our elements
    std::size_t bytes;
  };

  explicit AllReduce(std::vector<Leaf> leaves, bool is_small_sum = false)
      : leaves_(std::move(leaves)), is_small_sum_(is_small_sum) {}

  [[nodiscard]] std::size_t num_operands() const override { return leaves_.size(); }
  [[nodiscard]] std::size_t num_results() const override { return leaves_.size(); }
  [[nodiscard]] std::size_t operand_bytes(std::size_t i) const override { return leaves_[i].bytes; }
  [[nodiscard]] std::size_t result_bytes(std::size_t i) const override { return leaves_[i].bytes; }
  [[nodiscard]] bool traps(const Seat& seat) const override { return IsOverPeers(seat); }
  Status Enqueue(const Libraries& libraries, const Seat& seat, Stream stream,
                 std::span<const void* const> operands,
                 std::span<void* const> results) const override;

 private:
  [[nodiscard]] bool IsOverPeers(const Seat& seat) const {
    return is_small_sum_ && seat.peers != nullptr;
  }
  Status SumOverPeers(const Libraries& libraries, const Seat& seat, Stream stream,
                      std::span<const void* const> operands, std::span<void* const> results) const;

  const std::vector<Leaf> leaves_;
  const bool is_small_sum_;
};

/// What the calls with one operand and one result share.
class OneToOne : public Operation {
 public:
  OneToOne(std::size_t operand_bytes, std::size_t result_bytes)
      : operand_bytes_(operand_bytes), result_bytes_(result_bytes) {}

  [[nodiscard]] std::size_t num_operands() const override { return 1; }
  [[nodiscard]] std::size_t num_results() const override { return 1; }
  [[nodiscard]] std::size_t operand_bytes(std::size_t /*i*/) const override {
    return operand_bytes_;
  }
  [[nodiscard]] std::size_t result_bytes(std::size_t /*i*/) const override { return result_bytes_; }
  Status Enqueue(const Libraries& libraries, const Seat& seat, Stream stream,
                 std::span<const void* const> operands, std::span<void* const> results) const final;

 protected:
  /// What needs no other rank.
  virtual Status PutLocal(const Libraries& /*libraries*/, const Seat& /*seat*/, Stream /*stream*/,
                          const void* /*operand*/, void* /*result*/) const {
    return {};
  }
  /// In a group of NCCL's.
  virtual Status Put(const Libraries& libraries, const Seat& seat, Stream stream,
                     const void* operand, void* result) const = 0;

 private:
  const std::size_t operand_bytes_;
  const std::size_t result_bytes_;
};

/// The operand of every rank, one after the other.
class AllGather final : public OneToOne {
 public:
  AllGather(std::size_t bytes, std::size_t num_ranks)
      : OneToOne(bytes, bytes * num_ranks), bytes_(bytes) {}

 private:
  Status Put(const Libraries& libraries, const Seat& seat, Stream stream, const void* operand,
             void* result) const override;

  const std::size_t bytes_;
};

/// Each rank's block of the reduced operand; `count` and `bytes` are a block's.
class ReduceScatter final : public OneToOne {
 public:
  ReduceScatter(Reduction reduction, std::size_t count, std::size_t bytes, std::size_t num_ranks)
      : OneToOne(bytes * num_ranks, bytes), reduction_(reduction), count_(count) {}

 private:
  Status Put(const Libraries& libraries, const Seat& seat, Stream stream, const void* operand,
             void* result) const override;

  const Reduction reduction_;
  const std::size_t count_;
};

/// Block r to rank r, and rank r's to block r; `bytes` are a block's.
class AllToAll final : public OneToOne {
 public:
  AllToAll(std::size_t bytes, std::size_t num_ranks)
      : OneToOne(bytes * num_ranks, bytes * num_ranks), bytes_(bytes) {}

 private:
  Status PutLocal(const Libraries& libraries, const Seat& seat, Stream stream, const void* operand,
                  void* result) const override;
  Status Put(const Libraries& libraries, const Seat& seat, Stream stream, const void* operand,
             void* result) const override;

  const std::size_t bytes_;
};

/// Rank r gets the operand of sources[r], or zeros for -1.
class Permute final : public OneToOne {
 public:
  Permute(std::vector<int> sources, std::size_t bytes)
      : OneToOne(bytes, bytes), sources_(std::move(sources)), bytes_(bytes) {}

 private:
  Status PutLocal(const Libraries& libraries, const Seat& seat, Stream stream, const void* operand,
                  void* result) const override;
  Status Put(const Libraries& libraries, const Seat& seat, Stream stream, const void* operand,
             void* result) const override;

  const std::vector<int> sources_;
  const std::size_t bytes_;
};

/// The operand of rank `root`; the result may alias the operand.
class Broadcast final : public OneToOne {
 public:
  Broadcast(int root, std::size_t bytes) : OneToOne(bytes, bytes), root_(root), bytes_(bytes) {}

 private:
  Status Put(const Libraries& libraries, const Seat& seat, Stream stream, const void* operand,
             void* result) const override;

  const int root_;
  const std::size_t bytes_;
};

}  // namespace jaxcoll::cuda

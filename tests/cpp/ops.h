// tests/cpp/ops.h: ops of every kind, the buffers of one call, and what its results must be: the
// same bits as those of the same Work where all ranks are in one process.
#pragma once

#include <algorithm>   // std::copy, std::min, std::mismatch
#include <atomic>      // std::atomic
#include <cstddef>     // std::size_t
#include <cstdint>     // std::uint8_t, std::uint64_t
#include <cstring>     // std::memcpy
#include <functional>  // std::function
#include <memory>      // std::make_unique, std::unique_ptr
#include <numeric>     // std::iota
#include <random>      // std::mt19937_64
#include <span>        // std::span
#include <string>      // std::string, std::to_string
#include <utility>     // std::move
#include <vector>      // std::vector

#include "core/types.h"
#include "host/copy_work.h"
#include "host/reduce_work.h"
#include "host/work.h"
#include "kernels/reduce.h"

namespace jaxcoll::testing {

using Random = std::mt19937_64;

inline std::size_t Below(Random& random, std::size_t n) { return random() % n; }

/// A collective over a number of ranks, which is fixed.
struct Op {
  std::string name;
  std::function<std::unique_ptr<const Work>()> make;
  std::vector<DType> dtypes;  ///< of the operands; empty: only copied
  bool in_place = false;
};

struct LeafSize {
  DType dtype;
  std::size_t count;
  ReduceOp op = ReduceOp::kSum;
};

inline Op AllReduceOp(const std::vector<LeafSize>& sizes) {
  Op op{.name = "all_reduce of", .make = {}, .dtypes = {}, .in_place = true};
  std::vector<AllReduceWork::Leaf> leaves;
  for (const LeafSize& size : sizes) {
    if (leaves.size() < 8) {
      op.name.append(" ").append(Name(size.dtype));
      op.name.append("[").append(std::to_string(size.count)).append("]");
    }
    op.dtypes.push_back(size.dtype);
    leaves.push_back({size.dtype, size.count, GetReduce(size.dtype, size.op)});
  }
  op.make = [leaves] { return std::make_unique<AllReduceWork>(leaves); };
  return op;
}

inline Op ReduceScatterOp(DType dtype, std::size_t outer, std::size_t num_ranks,
                          std::size_t inner) {
  return {.name = "reduce_scatter of " + std::string(Name(dtype)) + "[" + std::to_string(outer) +
                  "," + std::to_string(num_ranks) + "," + std::to_string(inner) + "]",
          .make =
              [=] {
                return std::make_unique<ReduceScatterWork>(dtype, GetReduce(dtype, ReduceOp::kSum),
                                                           outer, num_ranks, inner);
              },
          .dtypes = {dtype}};
}

inline Op ExchangeOp(std::string name, const ExchangeLayout& layout, std::size_t operand_bytes,
                     std::size_t result_bytes) {
  return {
      .name = std::move(name),
      .make = [=] { return std::make_unique<ExchangeWork>(layout, operand_bytes, result_bytes); },
      .dtypes = {}};
}

inline Op AllGatherOp(std::size_t outer, std::size_t num_ranks, std::size_t inner) {
  return ExchangeOp(
      "all_gather of [" + std::to_string(outer) + "," + std::to_string(inner) + "] bytes",
      {.rows = 1,
       .columns = outer,
       .bytes = inner,
       .from_block = 0,
       .from_row = 0,
       .from_column = inner,
       .to_block = inner,
       .to_row = 0,
       .to_column = num_ranks * inner},
      outer * inner, outer * num_ranks * inner);
}

/// Of (rows, part * num_ranks, between, joined, after) bytes, split in the second dimension, joined
/// in the fourth; with `joins_first`, of (rows, joined, between, part * num_ranks, after).
inline Op AllToAllOp(std::size_t num_ranks, std::size_t rows, std::size_t part, std::size_t between,
                     std::size_t joined, std::size_t after, bool joins_first) {
  const std::size_t bytes = rows * part * num_ranks * between * joined * after;
  const std::string name = "all_to_all of " + std::to_string(bytes) + " bytes";
  const std::size_t run = (joins_first ? part : joined) * after;
  const std::size_t columns = (joins_first ? joined : part) * between;
  ExchangeLayout layout{.rows = rows,
                        .columns = columns,
                        .bytes = run,
                        .from_block = columns * run,
                        .from_row = num_ranks * columns * run,
                        .from_column = run,
                        .to_block = run,
                        .to_row = columns * num_ranks * run,
                        .to_column = num_ranks * run};
  if (joins_first) {
    std::swap(layout.from_block, layout.to_block);
    std::swap(layout.from_row, layout.to_row);
    std::swap(layout.from_column, layout.to_column);
  }
  return ExchangeOp(name + (joins_first ? ", joined first" : ", split first"), layout, bytes,
                    bytes);
}

inline Op PermuteOp(const std::vector<std::size_t>& source_of, std::size_t bytes,
                    bool in_place = false) {
  return {
      .name = "ppermute of " + std::to_string(bytes) + " bytes" + (in_place ? ", in place" : ""),
      .make = [=] { return std::make_unique<PermuteWork>(source_of, bytes); },
      .dtypes = {},
      .in_place = in_place};
}

/// In place, as the op is called.
inline Op BroadcastOp(std::size_t num_ranks, std::size_t root, std::size_t bytes) {
  return PermuteOp(std::vector<std::size_t>(num_ranks, root), bytes, /*in_place=*/true);
}

/// The buffers of all ranks for one call, with watched bytes on both sides of each.
class CallData {
 public:
  CallData(const Op& op, std::size_t num_ranks, std::uint64_t seed)
      : name_(op.name), num_ranks_(num_ranks), in_place_(op.in_place), work_(op.make()) {
    Random random(seed);
    for (std::size_t i = 0; i < work_->num_operands(); ++i) {
      for (std::size_t r = 0; r < num_ranks; ++r) {
        operands_.push_back(Guarded(work_->operand_bytes(i)));
        Fill(random, op.dtypes.empty() ? DType::kU8 : op.dtypes[i], operands_.back());
      }
    }
    for (std::size_t i = 0; i < work_->num_results() && !in_place_; ++i) {
      for (std::size_t r = 0; r < num_ranks; ++r) {
        results_.push_back(Guarded(work_->result_bytes(i)));
      }
    }
    operands_before_ = operands_;
    expected_ = Results();
    std::vector<const void*> from;
    std::vector<void*> to;
    for (std::size_t k = 0; k < operands_.size(); ++k) {
      from.push_back((in_place_ ? expected_ : operands_)[k].data() + kGuard);
    }
    for (Bytes& result : expected_) {
      to.push_back(result.data() + kGuard);
    }
    std::vector<std::size_t> arrivals(num_ranks);
    std::iota(arrivals.begin(), arrivals.end(), std::size_t{0});
    std::vector<std::atomic<int>> counters(work_->num_counters(num_ranks));
    for (std::size_t chunk = 0; chunk < work_->num_chunks(num_ranks); ++chunk) {
      work_->Run(chunk, {from.data(), to.data(), num_ranks, arrivals.data(), counters.data()});
    }
    operand_pointers_.resize(num_ranks);
    result_pointers_.resize(num_ranks);
    for (std::size_t k = 0; k < operands_.size(); ++k) {
      operand_pointers_[k % num_ranks].push_back(operands_[k].data() + kGuard);
    }
    for (std::size_t k = 0; k < Results().size(); ++k) {
      result_pointers_[k % num_ranks].push_back(Results()[k].data() + kGuard);
    }
  }
  CallData(const CallData&) = delete;
  CallData& operator=(const CallData&) = delete;

  std::span<const void* const> operands(std::size_t rank) const { return operand_pointers_[rank]; }
  std::span<void* const> results(std::size_t rank) const { return result_pointers_[rank]; }

  /// What is wrong with rank `rank`'s buffers after the call, or nothing.
  std::string Problem(std::size_t rank) const {
    for (std::size_t k = rank; k < expected_.size(); k += num_ranks_) {
      const Bytes& result = in_place_ ? operands_[k] : results_[k];
      if (result != expected_[k]) {  // whole: each look at a byte costs the sanitizers a call
        const auto at = std::mismatch(result.begin(), result.end(), expected_[k].begin()).first;
        return name_ + ": result " + std::to_string(k / num_ranks_) + " of rank " +
               std::to_string(rank) + " differs at byte " +
               std::to_string(at - result.begin() - static_cast<std::ptrdiff_t>(kGuard)) + " of " +
               std::to_string(result.size() - 2 * kGuard);
      }
    }
    for (std::size_t k = rank; k < operands_.size() && !in_place_; k += num_ranks_) {
      if (operands_[k] != operands_before_[k]) {
        return name_ + ": an operand of rank " + std::to_string(rank) + " was changed";
      }
    }
    return "";
  }

  /// No call has written to a buffer of rank `rank`.
  bool untouched(std::size_t rank) const {
    bool all = true;
    for (std::size_t k = rank; k < operands_.size(); k += num_ranks_) {
      all = all && operands_[k] == operands_before_[k];
    }
    for (std::size_t k = rank; k < results_.size(); k += num_ranks_) {
      all = all && results_[k] == Bytes(results_[k].size(), kPoison);
    }
    return all;
  }

 private:
  using Bytes = std::vector<unsigned char>;
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kPoison = 0xA5;

  static Bytes Guarded(std::size_t size) { return Bytes(size + 2 * kGuard, kPoison); }

  std::vector<Bytes>& Results() { return in_place_ ? operands_ : results_; }

  // Any bits, but of floating point values only such that nothing overflows or is denormal, which
  // threads may flush to zero or not.
  static void Fill(Random& random, DType dtype, Bytes& buffer) {
    std::uint64_t keep = ~std::uint64_t{0};
    std::uint64_t set = 0;
    switch (dtype) {
      case DType::kF16:  // exponents 16 + 0..3, of a bias of 15
        keep = 0x8FFF'8FFF'8FFF'8FFF;
        set = 0x4000'4000'4000'4000;
        break;
      case DType::kBF16:
        keep = 0x83FF'83FF'83FF'83FF;
        set = 0x3C00'3C00'3C00'3C00;
        break;
      case DType::kF32:
      case DType::kC64:
        keep = 0x83FF'FFFF'83FF'FFFF;
        set = 0x3C00'0000'3C00'0000;
        break;
      case DType::kF64:
      case DType::kC128:
        keep = 0x807F'FFFF'FFFF'FFFF;
        set = 0x3F80'0000'0000'0000;
        break;
      default:
        break;
    }
    // splitmix64, which has all its state in a register: the sanitizers look at every access.
    std::uint64_t state = random();
    std::vector<std::uint64_t> words((buffer.size() - 2 * kGuard + 7) / 8);
    for (std::uint64_t& word : words) {
      std::uint64_t z = state += 0x9e37'79b9'7f4a'7c15;
      z = (z ^ (z >> 30)) * 0xbf58'476d'1ce4'e5b9;
      z = (z ^ (z >> 27)) * 0x94d0'49bb'1331'11eb;
      word = ((z ^ (z >> 31)) & keep) | set;
    }
    if (!words.empty()) {
      std::memcpy(buffer.data() + kGuard, words.data(), buffer.size() - 2 * kGuard);
    }
  }

  std::string name_;
  std::size_t num_ranks_;
  bool in_place_;
  std::unique_ptr<const Work> work_;
  std::vector<Bytes> operands_, results_;  // leaf-major, as in Buffers
  std::vector<Bytes> operands_before_, expected_;
  std::vector<std::vector<const void*>> operand_pointers_;  // by rank
  std::vector<std::vector<void*>> result_pointers_;
};

/// Any op over `num_ranks`, with about `max_bytes` in a buffer at most.
inline Op DrawOp(Random& random, std::size_t num_ranks, std::size_t max_bytes) {
  // Small sizes are as likely as large ones.
  const std::size_t bytes = Below(random, 1 + max_bytes / (1 + Below(random, 64)));
  switch (Below(random, 6)) {
    case 0: {
      constexpr DType kDTypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64,
                                   DType::kI8,  DType::kI32,  DType::kC64, DType::kC128};
      std::vector<LeafSize> leaves(1 + Below(random, 5));
      for (LeafSize& leaf : leaves) {
        leaf.dtype = kDTypes[Below(random, std::size(kDTypes))];
        leaf.count = bytes / leaves.size() / SizeOf(leaf.dtype);
      }
      return AllReduceOp(leaves);
    }
    case 1: {
      const DType dtype = Below(random, 2) == 0 ? DType::kI16 : DType::kF32;
      const std::size_t outer = 1 + Below(random, 5);
      return ReduceScatterOp(dtype, outer, num_ranks, bytes / outer / num_ranks / SizeOf(dtype));
    }
    case 2: {
      const std::size_t outer = 1 + Below(random, 9);
      return AllGatherOp(outer, num_ranks, bytes / outer);
    }
    case 3:
      return AllToAllOp(num_ranks, 1 + Below(random, 3), 1 + Below(random, 3), 1 + Below(random, 3),
                        1 + Below(random, 3), bytes / num_ranks / 16, Below(random, 2) == 0);
    case 4: {
      std::vector<std::size_t> source_of(num_ranks);
      for (std::size_t& source : source_of) {
        source = Below(random, 4) == 0 ? PermuteWork::kNone : Below(random, num_ranks);
      }
      return PermuteOp(source_of, bytes);
    }
    default:
      return BroadcastOp(num_ranks, Below(random, num_ranks), bytes);
  }
}

}  // namespace jaxcoll::testing

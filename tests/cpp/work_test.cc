// tests/cpp/work_test.cc: what each Work does with the buffers, against naive oracles; results are
// poisoned first, and chunks run in an order drawn by chance.
#include <algorithm>         // std::copy, std::count, std::min, std::shuffle
#include <array>             // std::array
#include <cstddef>           // std::size_t
#include <cstdint>           // std::uint8_t, std::uint64_t
#include <cstring>           // std::memcpy
#include <initializer_list>  // std::initializer_list
#include <numeric>           // std::iota
#include <random>            // std::mt19937_64
#include <string>            // std::string, std::to_string
#include <vector>            // std::vector

#include "core/types.h"
#include "host/copy_work.h"
#include "host/reduce_work.h"
#include "host/slabs.h"
#include "host/work.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"
#include "testing.h"

namespace jaxcoll::testing::work_test {
namespace {

using Byte = unsigned char;  // whose ranges compare quickly
using Bytes = std::vector<Byte>;

using Sizes = std::initializer_list<std::size_t>;

constexpr std::size_t kNumRanks[] = {1, 2, 3, 4, 8};
constexpr Byte kPoison = 0xA5;
constexpr std::size_t kGuard = 64;  // watched bytes on both sides of every buffer

std::mt19937_64& Random() {
  static std::mt19937_64 random(20240817);
  return random;
}

void FillByChance(Byte* data, std::size_t size) {
  for (std::size_t i = 0; i < size; i += sizeof(std::uint64_t)) {
    const std::uint64_t word = Random()();
    std::memcpy(data + i, &word, std::min(sizeof(word), size - i));
  }
}

/// All ranks' operands and results of one call, with guards around each.
class Ranks {
 public:
  Ranks(const Work& work, std::size_t num_ranks, bool in_place)
      : work_(work), num_ranks_(num_ranks), in_place_(in_place) {
    for (std::size_t i = 0; i < work.num_operands(); ++i) {
      for (std::size_t r = 0; r < num_ranks; ++r) {
        operands_.push_back(Guarded(work.operand_bytes(i)));
        FillByChance(operands_.back().data() + kGuard, work.operand_bytes(i));
      }
    }
    for (std::size_t i = 0; i < work.num_results(); ++i) {
      for (std::size_t r = 0; r < num_ranks; ++r) {
        results_.push_back(Guarded(work.result_bytes(i)));
      }
    }
    before_ = operands_;
  }

  /// Operand i of rank r as it was before the call.
  const Byte* Operand(std::size_t i, std::size_t r) const {
    return before_[i * num_ranks_ + r].data() + kGuard;
  }

  /// Runs all chunks and compares every result with `expected(i, r)`, and all else with what it
  /// was.
  template <typename Expected>
  void RunAndCheck(Context& context, const std::string& what, Expected expected) {
    std::vector<const void*> operand_pointers;
    std::vector<void*> result_pointers;
    for (Bytes& operand : operands_) {
      operand_pointers.push_back(operand.data() + kGuard);
    }
    for (Bytes& result : in_place_ ? operands_ : results_) {
      result_pointers.push_back(result.data() + kGuard);
    }
    std::vector<std::size_t> chunks(work_.num_chunks(num_ranks_));
    std::iota(chunks.begin(), chunks.end(), std::size_t{0});
    std::shuffle(chunks.begin(), chunks.end(), Random());
    for (const std::size_t chunk : chunks) {
      work_.Run(chunk, {operand_pointers.data(), result_pointers.data(), num_ranks_});
    }
    for (std::size_t i = 0; i < work_.num_results(); ++i) {
      for (std::size_t r = 0; r < num_ranks_; ++r) {
        const auto where = [&] {
          return what + (in_place_ ? ", in place" : "") + ", " + std::to_string(num_ranks_) +
                 " ranks: result " + std::to_string(i) + " of rank " + std::to_string(r);
        };
        const Bytes wanted = expected(i, r);
        Bytes whole = Guarded(work_.result_bytes(i));
        context.Expect(wanted.size() == work_.result_bytes(i), where);
        std::copy(wanted.begin(), wanted.end(), whole.begin() + kGuard);
        context.Expect((in_place_ ? operands_ : results_)[i * num_ranks_ + r] == whole, where);
      }
    }
    if (!in_place_) {
      context.Expect(operands_ == before_, what + ": an operand was changed");
    }
  }

 private:
  static Bytes Guarded(std::size_t size) { return Bytes(size + 2 * kGuard, kPoison); }

  const Work& work_;
  std::size_t num_ranks_;
  bool in_place_;
  std::vector<Bytes> operands_;
  std::vector<Bytes> results_;
  std::vector<Bytes> before_;
};

template <typename T>
Bytes Sum(const std::vector<const Byte*>& operands, std::size_t count) {
  std::vector<T> sum(count);
  std::vector<T> operand(count);
  for (const Byte* data : operands) {
    std::copy(data, data + count * sizeof(T), reinterpret_cast<Byte*>(operand.data()));
    for (std::size_t j = 0; j < count; ++j) {
      sum[j] = static_cast<T>(sum[j] + operand[j]);
    }
  }
  const auto* const bytes = reinterpret_cast<const Byte*>(sum.data());
  return Bytes(bytes, bytes + count * sizeof(T));
}

Bytes Sum(DType dtype, const std::vector<const Byte*>& operands, std::size_t count) {
  switch (SizeOf(dtype)) {
    case 1:
      return Sum<std::uint8_t>(operands, count);
    case 2:
      return Sum<std::uint16_t>(operands, count);
    case 4:
      return Sum<std::uint32_t>(operands, count);
    default:
      return Sum<std::uint64_t>(operands, count);
  }
}

// ---- Slabs ------------------------------------------------------------------------------------

void PiecesCoverEveryUnitOnce(Context& context) {
  for (const std::size_t rows : Sizes{0, 1, 2, 3, 7, 64}) {
    for (const std::size_t row_length : Sizes{0, 1, 2, 3, 5, 7, 8, 9, 16, 17, 100, 127}) {
      for (const std::size_t target : Sizes{1, 2, 3, 8, 16, 64, 1000}) {
        const Slabs slabs(rows, row_length, target);
        std::vector<int> seen(rows * row_length, 0);
        bool sizes = true;
        for (std::size_t i = 0; i < slabs.num_pieces(); ++i) {
          const Slabs::Piece piece = slabs.piece(i);
          sizes = sizes && piece.num_rows * piece.length <= target && piece.length > 0 &&
                  piece.num_rows > 0;
          for (std::size_t row = piece.row; row < piece.row + piece.num_rows; ++row) {
            for (std::size_t j = piece.begin; j < piece.begin + piece.length; ++j) {
              ++seen.at(row * row_length + j);
            }
          }
        }
        const auto what = [&] {
          return std::to_string(rows) + " rows of " + std::to_string(row_length) + ", target " +
                 std::to_string(target);
        };
        context.Expect(
            std::count(seen.begin(), seen.end(), 1) == static_cast<std::ptrdiff_t>(seen.size()),
            what);
        context.Expect(sizes, [&] { return what() + ": a piece is empty or too long"; });
      }
    }
  }
}

// ---- Reductions -------------------------------------------------------------------------------

struct LeafSize {
  DType dtype;
  std::size_t count;
};

void CheckAllReduce(Context& context, const std::string& what, const std::vector<LeafSize>& sizes) {
  std::vector<AllReduceWork::Leaf> leaves;
  for (const LeafSize& size : sizes) {
    leaves.push_back({size.dtype, size.count, GetReduce(size.dtype, ReduceOp::kSum)});
  }
  const AllReduceWork work(leaves);
  for (const std::size_t p : kNumRanks) {
    for (const bool in_place : {true, false}) {
      Ranks ranks(work, p, in_place);
      ranks.RunAndCheck(context, what, [&](std::size_t i, std::size_t) {
        std::vector<const Byte*> operands;
        for (std::size_t r = 0; r < p; ++r) {
          operands.push_back(ranks.Operand(i, r));
        }
        return Sum(sizes[i].dtype, operands, sizes[i].count);
      });
    }
  }
}

void AllReduceOfTrees(Context& context) {
  constexpr std::size_t kChunk = 64 * 1024;  // host/reduce_work.cc
  CheckAllReduce(context, "no leaves", {});
  CheckAllReduce(context, "empty leaves", {{DType::kI32, 0}, {DType::kI8, 0}});
  CheckAllReduce(context, "a scalar", {{DType::kI64, 1}});
  for (const std::size_t bytes : {kChunk - 8, kChunk, kChunk + 8, 2 * kChunk + 8}) {
    CheckAllReduce(context, std::to_string(bytes) + " bytes", {{DType::kI64, bytes / 8}});
  }
  CheckAllReduce(context, "one byte more than a chunk", {{DType::kI8, kChunk + 1}});
  CheckAllReduce(context, "odd leaves",
                 {{DType::kI32, 1},
                  {DType::kI8, 7},
                  {DType::kI64, 0},
                  {DType::kI64, 3},
                  {DType::kI16, 40001},
                  {DType::kI32, 0},
                  {DType::kI32, 16384},
                  {DType::kI64, 20011},
                  {DType::kI8, 1}});
  CheckAllReduce(context, "a chunk that leaves no room for one more element",
                 {{DType::kI8, kChunk - 3}, {DType::kI64, 2}, {DType::kI8, kChunk - 1}});
  CheckAllReduce(context, "many small leaves", std::vector<LeafSize>(300, {DType::kI16, 131}));
}

void ReduceScatterOfSlabs(Context& context) {
  const std::array<std::array<std::size_t, 2>, 9> sizes{
      {{1, 1}, {1, 0}, {0, 5}, {1, 1000}, {7, 3}, {5000, 5}, {3, 8191}, {2, 8192}, {1, 20001}}};
  for (const DType dtype : {DType::kI8, DType::kI64}) {
    for (const auto& [outer, inner] : sizes) {
      for (const std::size_t p : kNumRanks) {
        const ReduceScatterWork work(dtype, GetReduce(dtype, ReduceOp::kSum), outer, p, inner);
        Ranks ranks(work, p, /*in_place=*/false);
        const std::size_t size = SizeOf(dtype);
        const std::size_t num_rows = outer;
        const std::size_t row_length = inner;
        ranks.RunAndCheck(
            context, "reduce_scatter " + std::to_string(outer) + ", p, " + std::to_string(inner),
            [&](std::size_t, std::size_t target) {
              Bytes result;
              for (std::size_t row = 0; row < num_rows; ++row) {
                std::vector<const Byte*> operands;
                for (std::size_t r = 0; r < p; ++r) {
                  operands.push_back(ranks.Operand(0, r) + (row * p + target) * row_length * size);
                }
                const Bytes part = Sum(dtype, operands, row_length);
                result.insert(result.end(), part.begin(), part.end());
              }
              return result;
            });
      }
    }
  }
}

// ---- Copies -----------------------------------------------------------------------------------

/// As host/copy_work.h writes it down, one run of bytes at a time.
void CheckExchange(Context& context, const std::string& what, const ExchangeLayout& layout,
                   std::size_t p, std::size_t operand_bytes, std::size_t result_bytes) {
  const ExchangeWork work(layout, operand_bytes, result_bytes);
  Ranks ranks(work, p, /*in_place=*/false);
  ranks.RunAndCheck(context, what, [&](std::size_t, std::size_t target) {
    Bytes result(result_bytes, kPoison);
    for (std::size_t source = 0; source < p; ++source) {
      for (std::size_t i = 0; i < layout.rows; ++i) {
        for (std::size_t j = 0; j < layout.columns; ++j) {
          const Byte* const from = ranks.Operand(0, source) + target * layout.from_block +
                                   i * layout.from_row + j * layout.from_column;
          const std::size_t to =
              source * layout.to_block + i * layout.to_row + j * layout.to_column;
          std::copy(from, from + layout.bytes, result.begin() + static_cast<std::ptrdiff_t>(to));
        }
      }
    }
    return result;
  });
}

void AllGathers(Context& context) {
  for (const std::size_t p : kNumRanks) {
    const std::array<std::array<std::size_t, 2>, 12> sizes{{{1, 1},
                                                            {1, 0},
                                                            {0, 4},
                                                            {5, 2},
                                                            {300, 4},
                                                            {300, 8},
                                                            {300, 16},
                                                            {300, 24},
                                                            {9000, 4},
                                                            {1, 131071},
                                                            {1, 131073},
                                                            {2, 140000}}};
    for (const auto& [outer, inner] : sizes) {
      CheckExchange(context, "all_gather " + std::to_string(outer) + ", " + std::to_string(inner),
                    {.rows = 1,
                     .columns = outer,
                     .bytes = inner,
                     .from_block = 0,
                     .from_row = 0,
                     .from_column = inner,
                     .to_block = inner,
                     .to_row = 0,
                     .to_column = p * inner},
                    p, outer * inner, outer * p * inner);
    }
  }
}

/// The layouts of jaxcoll/_lowering.py, all_to_all_layout, for (rows, split = part * p, between,
/// joined, after) in both orders of split and concat dimension.
void AllToAlls(Context& context) {
  struct Shape {
    std::size_t rows, part, between, joined, after;
  };
  const std::array<Shape, 7> shapes{{{1, 1, 1, 1, 1},
                                     {2, 3, 1, 5, 4},
                                     {3, 1, 2, 1, 7},
                                     {1, 2, 3, 4, 0},
                                     {0, 1, 1, 1, 1},
                                     {2, 64, 3, 5, 16},
                                     {1, 1, 1, 1, 140001}}};
  for (const std::size_t p : kNumRanks) {
    for (const auto& [rows, part, between, joined, after] : shapes) {
      const std::size_t bytes = rows * part * p * between * joined * after;
      {  // split before concat
        const std::size_t run = joined * after;
        const std::size_t columns = part * between;
        CheckExchange(context, "all_to_all, split first",
                      {.rows = rows,
                       .columns = columns,
                       .bytes = run,
                       .from_block = columns * run,
                       .from_row = p * columns * run,
                       .from_column = run,
                       .to_block = run,
                       .to_row = columns * p * run,
                       .to_column = p * run},
                      p, bytes, bytes);
      }
      {  // concat before split
        const std::size_t run = part * after;
        const std::size_t columns = joined * between;
        CheckExchange(context, "all_to_all, concat first",
                      {.rows = rows,
                       .columns = columns,
                       .bytes = run,
                       .from_block = run,
                       .from_row = columns * p * run,
                       .from_column = p * run,
                       .to_block = columns * run,
                       .to_row = p * columns * run,
                       .to_column = run},
                      p, bytes, bytes);
      }
    }
  }
}

void Permutes(Context& context) {
  for (const std::size_t p : kNumRanks) {
    for (const std::size_t bytes : Sizes{0, 1, 5, 131071, 131072, 131073}) {
      std::vector<std::size_t> ring(p);
      std::vector<std::size_t> holes(p, PermuteWork::kNone);
      for (std::size_t r = 0; r < p; ++r) {
        ring[r] = (r + 1) % p;
        if (r % 2 == 1) {
          holes[r] = p - 1 - r;
        }
      }
      for (const auto& source_of : {ring, holes, std::vector<std::size_t>(p, PermuteWork::kNone)}) {
        const PermuteWork work(source_of, bytes);
        Ranks ranks(work, p, /*in_place=*/false);
        ranks.RunAndCheck(context, "ppermute of " + std::to_string(bytes) + " bytes",
                          [&](std::size_t, std::size_t target) {
                            const std::size_t source = source_of[target];
                            if (source == PermuteWork::kNone) {
                              return Bytes(work.result_bytes(0), Byte{0});
                            }
                            const Byte* const from = ranks.Operand(0, source);
                            return Bytes(from, from + work.result_bytes(0));
                          });
      }
    }
  }
}

void Broadcasts(Context& context) {
  for (const std::size_t p : kNumRanks) {
    for (const std::size_t bytes : Sizes{0, 1, 7, 131072, 200001}) {
      for (const std::size_t root : {std::size_t{0}, p / 2, p - 1}) {
        const PermuteWork work(std::vector<std::size_t>(p, root), bytes);
        for (const bool in_place : {true, false}) {
          Ranks ranks(work, p, in_place);
          ranks.RunAndCheck(context, "broadcast of " + std::to_string(bytes) + " bytes",
                            [&](std::size_t, std::size_t) {
                              const Byte* const from = ranks.Operand(0, root);
                              return Bytes(from, from + work.result_bytes(0));
                            });
        }
      }
    }
  }
}

/// From the size of the cache on, copies take another way.
void CopiesLargerThanTheCaches(Context& context) {
  const std::size_t bytes = CacheBytes() / 4 + 13;
  CheckExchange(context, "all_gather of " + std::to_string(bytes) + " bytes",
                {.rows = 1,
                 .columns = 1,
                 .bytes = bytes,
                 .from_block = 0,
                 .from_row = 0,
                 .from_column = 0,
                 .to_block = bytes,
                 .to_row = 0,
                 .to_column = 0},
                2, bytes, 2 * bytes);
  const PermuteWork work({1, 0}, bytes);
  Ranks ranks(work, 2, /*in_place=*/false);
  ranks.RunAndCheck(context, "ppermute of " + std::to_string(bytes) + " bytes",
                    [&](std::size_t, std::size_t target) {
                      const Byte* const from = ranks.Operand(0, 1 - target);
                      return Bytes(from, from + bytes);
                    });
}

const Suite suite("work", {{"PiecesCoverEveryUnitOnce", PiecesCoverEveryUnitOnce},
                           {"AllReduceOfTrees", AllReduceOfTrees},
                           {"ReduceScatterOfSlabs", ReduceScatterOfSlabs},
                           {"AllGathers", AllGathers},
                           {"AllToAlls", AllToAlls},
                           {"Permutes", Permutes},
                           {"Broadcasts", Broadcasts},
                           {"CopiesLargerThanTheCaches", CopiesLargerThanTheCaches}});

}  // namespace
}  // namespace jaxcoll::testing::work_test

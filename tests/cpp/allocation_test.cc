// tests/cpp/allocation_test.cc: in steady state a call allocates nothing, on no thread.
#include <atomic>   // std::atomic
#include <barrier>  // std::barrier
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t
#include <cstdlib>  // std::malloc, std::free, std::aligned_alloc
#include <memory>   // std::make_unique
#include <new>      // std::bad_alloc, std::align_val_t
#include <string>   // std::string, std::to_string
#include <vector>   // std::vector

#include "core/types.h"
#include "host/copy_work.h"
#include "host/reduce_work.h"
#include "kernels/reduce.h"
#include "matmul/blas.h"
#include "matmul/matmul_work.h"
#include "ranks.h"
#include "testing.h"

namespace {
std::atomic<std::size_t> num_allocations{0};

void* Allocate(std::size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  void* const memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}
}  // namespace

// The other forms of new and delete call these.
void* operator new(std::size_t size) { return Allocate(size); }
void* operator new[](std::size_t size) { return Allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace jaxcoll::testing::allocation_test {
namespace {

constexpr std::size_t kRanks = 4;
constexpr std::size_t kCallsPerWindow = 50;
constexpr std::size_t kWindows = 6;

/// Counts the allocations of the whole process in windows of kCallsPerWindow calls. The watchdog
/// may make some of its own now and then, so the best window counts.
void CheckWork(Context& context, const std::string& what, std::unique_ptr<const Work> work) {
  std::vector<std::vector<std::vector<std::byte>>> operands(kRanks);
  std::vector<std::vector<std::vector<std::byte>>> results(kRanks);
  std::vector<std::vector<const void*>> operand_pointers(kRanks);
  std::vector<std::vector<void*>> result_pointers(kRanks);
  for (std::size_t r = 0; r < kRanks; ++r) {
    for (std::size_t i = 0; i < work->num_operands(); ++i) {
      operands[r].emplace_back(work->operand_bytes(i) + 1);
      operand_pointers[r].push_back(operands[r].back().data());
    }
    for (std::size_t i = 0; i < work->num_results(); ++i) {
      results[r].emplace_back(work->result_bytes(i) + 1);
      result_pointers[r].push_back(results[r].back().data());
    }
  }
  const Site site = MakeSite(1, OneGroup(kRanks), std::move(work));
  const std::int64_t run = FreshRuns();
  std::barrier all(kRanks);
  std::vector<std::size_t> allocated(kWindows);
  RunRanks(context, kRanks, [&](std::size_t rank) -> Program {
    for (std::size_t window = 0; window < kWindows; ++window) {
      all.arrive_and_wait();
      const std::size_t before = num_allocations.load();
      all.arrive_and_wait();
      for (std::size_t i = 0; i < kCallsPerWindow; ++i) {
        const CallResult result =
            co_await Call(*site, rank, run, operand_pointers[rank], result_pointers[rank]);
        Check(result.ok, "the call succeeds");
      }
      all.arrive_and_wait();
      if (rank == 0) {
        allocated[window] = num_allocations.load() - before;
      }
      all.arrive_and_wait();
    }
  });
  std::string counts;
  std::size_t least = allocated[0];
  for (const std::size_t count : allocated) {
    counts += std::to_string(count) + " ";
    least = std::min(least, count);
  }
  context.Expect(least == 0, what + ": allocations per window of " +
                                 std::to_string(kCallsPerWindow) + " calls: " + counts);
}

void CallsAllocateNothing(Context& context) {
  const ReduceFn sum = GetReduce(DType::kF32, ReduceOp::kSum);
  for (const std::size_t count : {std::size_t{16}, std::size_t{20'000}}) {  // without and with help
    const std::string size = " of " + std::to_string(count);
    CheckWork(context, "all_reduce" + size,
              std::make_unique<AllReduceWork>(std::vector<AllReduceWork::Leaf>{
                  {DType::kF32, count, sum}, {DType::kF32, 3, sum}, {DType::kF32, 0, sum}}));
    CheckWork(context, "reduce_scatter" + size,
              std::make_unique<ReduceScatterWork>(DType::kF32, sum, 1, kRanks, count));
    CheckWork(context, "all_gather" + size,
              std::make_unique<ExchangeWork>(ExchangeLayout{.rows = 1,
                                                            .columns = 1,
                                                            .bytes = 4 * count,
                                                            .from_block = 0,
                                                            .from_row = 0,
                                                            .from_column = 4 * count,
                                                            .to_block = 4 * count,
                                                            .to_row = 0,
                                                            .to_column = 4 * count * kRanks},
                                             4 * count, 4 * count * kRanks));
    CheckWork(context, "ppermute" + size,
              std::make_unique<PermuteWork>(std::vector<std::size_t>{1, 2, 3, PermuteWork::kNone},
                                            4 * count));
  }
}

void MatmulsAllocateNothing(Context& context) {
  SetBlas({.sgemm = [](const char*, const char*, const int*, const int*, const int*, const float*,
                       const float*, const int*, const float*, const int*, const float*, float*,
                       const int*) {},
           .dgemm = nullptr});
  for (const MatmulKind kind : {MatmulKind::kGatherRows, MatmulKind::kGatherInner,
                                MatmulKind::kScatterRows, MatmulKind::kScatterColumns}) {
    for (const std::size_t rows : {std::size_t{4}, std::size_t{600}}) {  // joined, and by blocks
      CheckWork(context, "matmul of " + std::to_string(rows) + " rows",
                MakeMatmulWork(MatmulLayout{.kind = kind,
                                            .dtype = DType::kF32,
                                            .num_ranks = kRanks,
                                            .batch = 1,
                                            .rows = rows,
                                            .inner = 512,
                                            .columns = 512,
                                            .x_is_transposed = false,
                                            .w_is_transposed = false}));
    }
  }
}

void TheCounterCounts(Context& context) {
  const std::size_t before = num_allocations.load();
  const auto made = std::make_unique<std::vector<int>>(100);
  context.Expect(num_allocations.load() == before + 2 && !made->empty(),
                 "operator new of this file is in use");
}

const Suite suite("allocation", {{"TheCounterCounts", TheCounterCounts},
                                 {"CallsAllocateNothing", CallsAllocateNothing},
                                 {"MatmulsAllocateNothing", MatmulsAllocateNothing}});

}  // namespace
}  // namespace jaxcoll::testing::allocation_test

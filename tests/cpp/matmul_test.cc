// tests/cpp/matmul_test.cc: the collective matmuls on a naive BLAS, in one process and across
// several, against naive sums.
#include <unistd.h>  // getpid

#include <algorithm>   // std::fill, std::max, std::next_permutation
#include <atomic>      // std::atomic
#include <cstddef>     // std::size_t
#include <cstdint>     // std::int64_t
#include <functional>  // std::function
#include <memory>      // std::make_unique, std::unique_ptr
#include <string>      // std::string, std::to_string
#include <thread>      // std::this_thread
#include <vector>      // std::vector

#include "core/clock.h"
#include "core/types.h"
#include "host/route.h"
#include "host/work.h"
#include "matmul/blas.h"
#include "matmul/block_matmul.h"
#include "matmul/direct_matmul.h"
#include "matmul/joined_matmul.h"
#include "matmul/matmul_work.h"
#include "ops.h"
#include "processes.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::matmul_test {
namespace {

template <typename T>
void Gemm(const char* transa, const char* transb, const int* m, const int* n, const int* k,
          const T* alpha, const T* a, const int* lda, const T* b, const int* ldb, const T* beta,
          T* c, const int* ldc) {
  for (int j = 0; j < *n; ++j) {
    for (int i = 0; i < *m; ++i) {
      T sum = 0;
      for (int l = 0; l < *k; ++l) {
        sum += (*transa == 'T' ? a[l + i * *lda] : a[i + l * *lda]) *
               (*transb == 'T' ? b[j + l * *ldb] : b[l + j * *ldb]);
      }
      T& to = c[i + j * *ldc];
      to = *alpha * sum + (*beta == T{0} ? T{0} : *beta * to);
    }
  }
}

int threads = 7;
std::size_t most_threads_within = 0;

void SetThreads(int count) { threads = count; }
int Threads() { return threads; }

void NoticingGemm(const char* transa, const char* transb, const int* m, const int* n, const int* k,
                  const float* alpha, const float* a, const int* lda, const float* b,
                  const int* ldb, const float* beta, float* c, const int* ldc) {
  most_threads_within = std::max(most_threads_within, static_cast<std::size_t>(threads));
  Gemm<float>(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/// All ranks' operands and results, T being the layout's type, poisoned results.
template <typename T>
class Ranks {
 public:
  explicit Ranks(const MatmulLayout& layout) : layout_(layout), p_(layout.num_ranks) {
    int next = 0;
    for (std::size_t i = 0; i < 2; ++i) {
      for (std::size_t r = 0; r < p_; ++r) {
        operands_.emplace_back((i == 0 ? layout.x_bytes() : layout.w_bytes()) / sizeof(T));
        for (T& value : operands_.back()) {
          next = (next * 5 + 3) % 17;
          value = static_cast<T>(next - 8);
        }
      }
    }
    for (std::size_t r = 0; r < p_; ++r) {
      results_.emplace_back(layout.y_bytes() / sizeof(T), static_cast<T>(1e9));
    }
  }

  /// The buffers of `ranks`, leaf-major.
  struct Local {
    std::vector<const void*> operands;
    std::vector<void*> results;
    [[nodiscard]] Buffers buffers() const {
      return {operands.data(), const_cast<void* const*>(results.data()), results.size()};
    }
  };
  Local Of(const std::vector<std::size_t>& ranks) {
    Local local;
    for (std::size_t i = 0; i < 2; ++i) {
      for (const std::size_t r : ranks) {
        local.operands.push_back(operands_[i * p_ + r].data());
      }
    }
    for (const std::size_t r : ranks) {
      local.results.push_back(results_[r].data());
    }
    return local;
  }

  void Check(Context& context, const std::string& what) const {
    for (std::size_t t = 0; t < p_; ++t) {
      for (std::size_t i = 0; i < layout_.y_bytes() / sizeof(T); ++i) {
        const T want = Want(t, i / layout_.columns, i % layout_.columns);
        if (!context.Expect(results_[t][i] == want, [&] {
              return what + ": element " + std::to_string(i) + " of rank " + std::to_string(t) +
                     " is " + std::to_string(results_[t][i]) + ", not " + std::to_string(want);
            })) {
          return;
        }
      }
    }
  }

 private:
  T X(std::size_t r, std::size_t row, std::size_t j) const {
    const std::size_t rows = layout_.rows * (layout_.kind == MatmulKind::kScatterRows ? p_ : 1);
    return operands_[r][layout_.x_is_transposed ? j * rows + row : row * layout_.inner + j];
  }
  T W(std::size_t r, std::size_t i, std::size_t column) const {
    const std::size_t inner = layout_.inner * (layout_.kind == MatmulKind::kGatherInner ? p_ : 1);
    const std::size_t columns =
        layout_.columns * (layout_.kind == MatmulKind::kScatterColumns ? p_ : 1);
    return operands_[p_ + r][layout_.w_is_transposed ? column * inner + i : i * columns + column];
  }
  T Want(std::size_t t, std::size_t row, std::size_t column) const {
    const std::size_t per_batch = layout_.rows / layout_.batch;
    T sum = 0;
    for (std::size_t s = 0; s < p_; ++s) {
      for (std::size_t l = 0; l < layout_.inner; ++l) {
        switch (layout_.kind) {
          case MatmulKind::kGatherRows: {
            const std::size_t block = row / per_batch;
            const std::size_t in_block = block / p_ * per_batch + row % per_batch;
            sum += block % p_ == s ? X(s, in_block, l) * W(t, l, column) : T{0};
            break;
          }
          case MatmulKind::kGatherInner:
            sum += X(s, row, l) * W(t, s * layout_.inner + l, column);
            break;
          case MatmulKind::kScatterRows: {
            const std::size_t batch = row / per_batch;
            sum += X(s, (batch * p_ + t) * per_batch + row % per_batch, l) * W(s, l, column);
            break;
          }
          case MatmulKind::kScatterColumns:
            sum += X(s, row, l) * W(s, l, t * layout_.columns + column);
            break;
        }
      }
    }
    return sum;
  }

  const MatmulLayout layout_;
  const std::size_t p_;
  std::vector<std::vector<T>> operands_;
  std::vector<std::vector<T>> results_;
};

std::string Text(const MatmulLayout& layout) {
  return "kind " + std::to_string(static_cast<int>(layout.kind)) + ", " +
         std::string(Name(layout.dtype)) + ", " + std::to_string(layout.num_ranks) + " ranks, " +
         std::to_string(layout.batch) + " x " + std::to_string(layout.rows) + " x " +
         std::to_string(layout.inner) + " x " + std::to_string(layout.columns) +
         (layout.x_is_transposed ? ", x transposed" : "") +
         (layout.w_is_transposed ? ", w transposed" : "");
}

std::vector<MatmulLayout> Layouts() {
  std::vector<MatmulLayout> layouts;
  for (const MatmulKind kind : {MatmulKind::kGatherRows, MatmulKind::kGatherInner,
                                MatmulKind::kScatterRows, MatmulKind::kScatterColumns}) {
    for (const std::size_t p : {1, 2, 3, 4}) {
      for (const std::size_t batch : {1, 3}) {
        for (const bool transposed : {false, true}) {
          const bool by_rows = kind == MatmulKind::kGatherRows || kind == MatmulKind::kScatterRows;
          layouts.push_back({.kind = kind,
                             .dtype = p % 2 == 0 ? DType::kF32 : DType::kF64,
                             .num_ranks = p,
                             .batch = by_rows ? batch : 1,
                             .rows = batch * 7,
                             .inner = 5 + p,
                             .columns = 9,
                             .x_is_transposed = transposed && (batch == 1 || !by_rows),
                             .w_is_transposed = transposed != (p == 3)});
        }
      }
    }
  }
  return layouts;
}

/// Calls run(ranks, layout) with ranks of the layout's type.
template <typename Run>
void WithRanks(const MatmulLayout& layout, Run run) {
  if (layout.dtype == DType::kF32) {
    run(Ranks<float>(layout));
  } else {
    run(Ranks<double>(layout));
  }
}

std::vector<std::size_t> Range(std::size_t count) {
  std::vector<std::size_t> range;
  for (std::size_t i = 0; i < count; ++i) {
    range.push_back(i);
  }
  return range;
}

std::atomic<int> num_products{0};

void CountingGemm(const char* transa, const char* transb, const int* m, const int* n, const int* k,
                  const float* alpha, const float* a, const int* lda, const float* b,
                  const int* ldb, const float* beta, float* c, const int* ldc) {
  Gemm<float>(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  num_products.fetch_add(1);
}

MatmulLayout Small(MatmulKind kind) {
  return {.kind = kind,
          .dtype = DType::kF32,
          .num_ranks = 3,
          .batch = 1,
          .rows = 6,
          .inner = 5,
          .columns = 4,
          .x_is_transposed = false,
          .w_is_transposed = false};
}

/// The first `count` orders in which ranks may come, and the last one.
std::vector<std::vector<std::size_t>> Arrivals(std::size_t num_ranks, int count) {
  std::vector<std::size_t> order = Range(num_ranks);
  std::vector<std::vector<std::size_t>> orders;
  for (int i = 0; i < count; ++i) {
    orders.push_back(order);
    std::next_permutation(order.begin(), order.end());
  }
  orders.emplace_back(orders[0].rbegin(), orders[0].rend());
  return orders;
}

/// Each chunk as soon as it is ready: of ranks that have not come there are no buffers.
void InOneProcess(Context& context) {
  std::vector<MatmulLayout> layouts = Layouts();
  for (MatmulLayout tall : std::vector<MatmulLayout>(layouts)) {  // several panels
    if (tall.batch == 1) {
      tall.rows = 600;
      layouts.push_back(tall);
    }
  }
  for (const MatmulLayout& layout : layouts) {
    const std::size_t p = layout.num_ranks;
    for (const std::vector<std::size_t>& arrivals : Arrivals(p, layout.rows > 100 ? 1 : 6)) {
      WithRanks(layout, [&](auto ranks) {
        const BlockMatmul work(layout);
        const auto all = ranks.Of(Range(p));
        auto local = all;
        std::fill(local.operands.begin(), local.operands.end(), nullptr);
        std::fill(local.results.begin(), local.results.end(), nullptr);
        std::vector<std::atomic<int>> counters(work.num_counters(p));
        Buffers buffers = local.buffers();
        buffers.arrivals = arrivals.data();
        buffers.counters = counters.data();
        std::size_t chunk = 0;
        for (std::size_t count = 1; count <= p; ++count) {
          const std::size_t rank = arrivals[count - 1];
          local.operands[rank] = all.operands[rank];
          local.operands[p + rank] = all.operands[p + rank];
          local.results[rank] = all.results[rank];
          for (; chunk < work.num_ready(arrivals.data(), count, p); ++chunk) {
            work.Run(chunk, buffers);
          }
        }
        context.Expect(chunk == work.num_chunks(p), Text(layout) + ": all chunks are ready");
        ranks.Check(context, Text(layout));
      });
    }
  }
}

/// In any order, with several panels of rows and of columns and without.
void InOneProcessWithRowsJoined(Context& context) {
  std::vector<MatmulLayout> layouts;
  for (const MatmulLayout& layout : Layouts()) {
    if (layout.kind == MatmulKind::kGatherRows || layout.kind == MatmulKind::kScatterRows) {
      layouts.push_back(layout);
      layouts.push_back(layout);
      layouts.back().rows = layout.batch * 110;
      layouts.push_back(layout);
      layouts.back().columns = 700;
    }
  }
  for (const MatmulLayout& layout : layouts) {
    WithRanks(layout, [&](auto ranks) {
      const JoinedMatmul work(layout);
      const auto local = ranks.Of(Range(layout.num_ranks));
      for (std::size_t chunk = work.num_chunks(layout.num_ranks); chunk-- > 0;) {
        work.Run(chunk, local.buffers());
      }
      ranks.Check(context, Text(layout));
    });
  }
}

// Where the operands and results of all ranks lie; used while no other thread multiplies.
const Ranks<float>::Local* all_buffers = nullptr;
const MatmulLayout* all_layout = nullptr;
std::atomic<int> num_elsewhere{0};

bool LiesIn(const void* at, const void* buffer, std::size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(buffer);
  return at >= begin && at < begin + bytes;
}

void LookingGemm(const char* transa, const char* transb, const int* m, const int* n, const int* k,
                 const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                 const float* beta, float* c, const int* ldc) {
  Gemm<float>(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  const std::size_t p = all_layout->num_ranks;
  bool x_lies = false;
  bool w_lies = false;
  bool y_lies = false;
  for (std::size_t r = 0; r < p; ++r) {
    for (const float* const of : {a, b}) {
      x_lies = x_lies || LiesIn(of, all_buffers->operands[r], all_layout->x_bytes());
      w_lies = w_lies || LiesIn(of, all_buffers->operands[p + r], all_layout->w_bytes());
    }
    y_lies = y_lies || LiesIn(c, all_buffers->results[r], all_layout->y_bytes());
  }
  num_elsewhere += x_lies && w_lies && y_lies ? 0 : 1;
}

/// In one process nothing is staged: products are of the operands themselves, into the results.
void BlocksAreMultipliedWhereTheyLie(Context& context) {
  SetBlas({.sgemm = &LookingGemm, .dgemm = &Gemm<double>});
  for (const MatmulKind kind : {MatmulKind::kGatherRows, MatmulKind::kGatherInner,
                                MatmulKind::kScatterRows, MatmulKind::kScatterColumns}) {
    const MatmulLayout layout = Small(kind);
    const auto work = MakeMatmulWork(layout);
    Ranks<float> ranks(layout);
    const auto all = ranks.Of(Range(layout.num_ranks));
    const Site site = MakeSite(1, OneGroup(layout.num_ranks), MakeMatmulWork(layout));
    all_buffers = &all;
    all_layout = &layout;
    num_elsewhere = 0;
    const std::int64_t run = FreshRuns();
    RunRanks(context, layout.num_ranks, [&](std::size_t rank) -> Program {
      const void* const operands[] = {all.operands[rank], all.operands[layout.num_ranks + rank]};
      void* const results[] = {all.results[rank]};
      const CallResult result = co_await Call(*site, rank, run, operands, results);
      Check(result.ok, "the call succeeds");
    });
    ranks.Check(context, Text(layout));
    context.Expect(num_elsewhere == 0, Text(layout) + ": something was copied");
  }
  SetBlas({.sgemm = &Gemm<float>, .dgemm = &Gemm<double>});
}

/// As many products as there are ranks, or panels, with rows of all ranks in each.
void FewRowsAreMultipliedTogether(Context& context) {
  SetBlas({.sgemm = &CountingGemm, .dgemm = &Gemm<double>});
  for (const MatmulKind kind : {MatmulKind::kGatherRows, MatmulKind::kScatterRows}) {
    for (const std::size_t batch : {1, 4}) {
      MatmulLayout layout = Small(kind);
      layout.batch = batch;
      layout.rows = batch * 16;
      layout.inner = 512;
      layout.columns = 128;
      const auto work = MakeMatmulWork(layout);
      if (work->starts_early()) {
        context.Expect(false, Text(layout) + ": block by block");
        continue;
      }
      Ranks<float> ranks(layout);
      const auto local = ranks.Of(Range(layout.num_ranks));
      num_products = 0;
      for (std::size_t chunk = 0; chunk < work->num_chunks(layout.num_ranks); ++chunk) {
        work->Run(chunk, local.buffers());
      }
      context.Expect(num_products == 3, Text(layout) + ": " + std::to_string(num_products));
      ranks.Check(context, Text(layout));
      layout.inner = 511;  // products that need nothing arranged
      context.Expect(MakeMatmulWork(layout)->starts_early(), "block by block");
    }
  }
  SetBlas({.sgemm = &Gemm<float>, .dgemm = &Gemm<double>});
}

using MakeRouteOf = std::function<std::unique_ptr<const Route>(const Membership&)>;

/// Round after round and phase after phase, as no process may be ahead of.
void CheckAcross(Context& context, const MatmulLayout& layout, std::size_t num_processes,
                 std::size_t window, const MakeRouteOf& make_route) {
  WithRanks(layout, [&](auto ranks) {
    std::vector<std::size_t> seats;
    for (std::size_t r = 0; r < layout.num_ranks; ++r) {
      seats.push_back(r * num_processes / layout.num_ranks);
    }
    std::vector<std::unique_ptr<Membership>> members;
    std::vector<std::vector<std::byte>> windows;
    std::vector<std::byte*> pointers;
    for (std::size_t i = 0; i < num_processes; ++i) {
      members.push_back(std::make_unique<Membership>(seats, i));
      windows.emplace_back(window + 64, std::byte{0xA5});
    }
    for (std::vector<std::byte>& each : windows) {
      pointers.push_back(each.data());
    }
    std::vector<std::unique_ptr<const Route>> routes;
    for (const auto& member : members) {
      routes.push_back(make_route(*member));
    }
    const std::vector<std::int64_t> pids(num_processes, getpid());
    for (std::size_t round = 0; round < routes[0]->num_rounds(); ++round) {
      for (std::size_t phase = 0; phase < routes[0]->num_phases(); ++phase) {
        for (std::size_t i = 0; i < num_processes; ++i) {
          std::vector<std::size_t> mine;
          for (const std::size_t rank : members[i]->my_ranks()) {
            mine.push_back(rank);
          }
          const auto local = ranks.Of(mine);
          const Route& route = *routes[i];
          const Processes processes{pointers.data(), pids.data()};
          const bool takes = phase == 1 && route.takes_one_by_one();
          if (!takes) {
            context.Expect(route.Run(phase, round, local.buffers(), processes), "it runs");
          }
          if (phase == 0) {
            route.Meanwhile(round, local.buffers());
          }
          for (std::size_t other = num_processes; takes && other-- > 0;) {
            if (other != i) {
              context.Expect(route.Take(round, other, local.buffers(), processes), "it is read");
            }
          }
        }
      }
    }
    const std::string what = Text(layout) + ", " + std::to_string(num_processes) +
                             " processes, windows of " + std::to_string(window);
    ranks.Check(context, what);
    for (const std::vector<std::byte>& each : windows) {
      for (std::size_t i = window; i < each.size(); ++i) {
        context.Expect(each[i] == std::byte{0xA5}, what + ": it wrote past its window");
      }
    }
  });
}

/// Two processes, and one for each rank.
std::vector<std::size_t> NumProcesses(std::size_t num_ranks) {
  return num_ranks < 2    ? std::vector<std::size_t>{}
         : num_ranks == 2 ? std::vector<std::size_t>{2}
                          : std::vector<std::size_t>{2, num_ranks};
}

void AcrossProcesses(Context& context) {
  for (const MatmulLayout& layout : Layouts()) {
    for (const std::size_t num_processes : NumProcesses(layout.num_ranks)) {
      for (const std::size_t window : {std::size_t{2048}, std::size_t{4096}, std::size_t{65536}}) {
        CheckAcross(context, layout, num_processes, window, [&](const Membership& members) {
          return BlockMatmul(layout).MakeRoute(members, {.window_bytes = window});
        });
      }
    }
  }
}

void AcrossProcessesReadWhereTheyLie(Context& context) {
  for (const MatmulLayout& layout : Layouts()) {
    if (layout.kind != MatmulKind::kGatherRows || layout.x_is_transposed) {
      continue;
    }
    for (const std::size_t rows : {std::size_t{7}, std::size_t{600}}) {  // several parts
      MatmulLayout tall = layout;
      tall.rows = layout.batch * rows;
      for (const std::size_t num_processes : NumProcesses(layout.num_ranks)) {
        CheckAcross(context, tall, num_processes, 2048, [&](const Membership& members) {
          return std::make_unique<DirectMatmul>(tall, members);
        });
      }
    }
  }
}

/// Else products would have other bits in the next job, which measures anew.
void LargeBlocksAreReadWhateverThatCosts(Context& context) {
  MatmulLayout layout = Small(MatmulKind::kGatherRows);
  layout.rows = 600;
  layout.inner = 512;
  const Membership members({0, 1, 1}, 0);
  const auto num_phases = [&](bool can_read, const CopyCosts& costs) {
    return BlockMatmul(layout)
        .MakeRoute(members,
                   {.window_bytes = 65536, .can_read_peers = can_read, .copy_costs = costs})
        ->num_phases();
  };
  const CopyCosts reading_is_dear{.leaving = 1, .taking = 1, .reading = 3};
  context.Expect(num_phases(true, kReadingIsFree) == 3, "what is large is read");
  context.Expect(num_phases(false, kReadingIsFree) == 2, "what can't be read comes in windows");
  context.Expect(num_phases(true, reading_is_dear) == 3, "what is dear is read, too");
  layout.inner = 128;
  layout.rows = 128;
  context.Expect(num_phases(true, kReadingIsFree) == 2, "so do small blocks");
}

Op OpOf(const MatmulLayout& layout) {
  return {.name = "matmul",
          .make = [layout] { return MakeMatmulWork(layout); },
          .dtypes = {DType::kF32, DType::kF32}};
}

/// The last rank comes only when all other blocks are multiplied, which would never be otherwise.
void BlocksAreMultipliedAsTheyCome(Context& context) {
  const MatmulLayout layout = Small(MatmulKind::kGatherRows);
  const Op op = OpOf(layout);
  Host host(3);
  const SharedSite site(host, 1, OneGroup(3), {0, 1, 2}, op.make);
  const CallData data(op, 3, 1);
  SetBlas({.sgemm = &CountingGemm, .dgemm = &Gemm<double>});
  num_products = 0;
  RunRanks(context, 3, [&](std::size_t rank) -> Program {
    while (rank == 2 && num_products < 4) {
      std::this_thread::yield();
    }
    const CallResult result = co_await site.Begin(rank, 1, data);
    Check(result.ok, "the call succeeds");
    Check(data.Problem(rank).empty(), data.Problem(rank));
  });
  context.Expect(num_products == 9, "each block is multiplied once by each rank");
  SetBlas({.sgemm = &Gemm<float>, .dgemm = &Gemm<double>});
}

/// The same of large blocks, which are read from where they lie: a rank whose call has ended may
/// overwrite its own.
void LargeBlocksAreMultipliedAsTheyCome(Context& context) {
  const std::size_t p = 3;
  MatmulLayout layout = Small(MatmulKind::kGatherRows);
  layout.rows = 600;  // two parts
  layout.inner = 512;
  layout.columns = 2;
  Host host(p, {.num_lanes = 3, .window_bytes = 4096, .can_read_peers = true});
  const SharedSite site(host, 1, OneGroup(p), {0, 1, 2}, [&] { return MakeMatmulWork(layout); });
  Ranks<float> ranks(layout);
  const auto all = ranks.Of(Range(p));
  std::vector<std::vector<float>> xs;
  for (std::size_t r = 0; r < p; ++r) {
    const auto* const x = static_cast<const float*>(all.operands[r]);
    xs.emplace_back(x, x + layout.rows * layout.inner);
  }
  SetBlas({.sgemm = &CountingGemm, .dgemm = &Gemm<double>});
  num_products = 0;
  RunRanks(context, p, [&](std::size_t rank) -> Program {
    while (rank == 2 && num_products < 2 * (2 + 2)) {
      std::this_thread::yield();
    }
    const void* const operands[] = {xs[rank].data(), all.operands[p + rank]};
    void* const results[] = {all.results[rank]};
    const CallResult result = co_await site.Begin(rank, 1, operands, results);
    Check(result.ok, "the call succeeds");
    std::fill(xs[rank].begin(), xs[rank].end(), 1e6F);
  });
  context.Expect(num_products == 3 * (3 * 2), "each part is multiplied once by each rank");
  ranks.Check(context, Text(layout));
  SetBlas({.sgemm = &Gemm<float>, .dgemm = &Gemm<double>});
}

/// As many products between other ranks as can be are made before one of them comes; of sums, those
/// up to its own term.
void ProductsAreMadeBeforeALateRankComes(Context& context) {
  const std::size_t p = 3;
  SetBlas({.sgemm = &CountingGemm, .dgemm = &Gemm<double>});
  for (const MatmulKind kind : {MatmulKind::kGatherRows, MatmulKind::kGatherInner,
                                MatmulKind::kScatterRows, MatmulKind::kScatterColumns}) {
    const MatmulLayout layout = Small(kind);
    const Site site = MakeSite(1, OneGroup(p), MakeMatmulWork(layout));
    for (std::size_t late = 0; late < p; ++late) {
      const int want = static_cast<int>(kind == MatmulKind::kGatherRows ? 4 : 2 * late);
      const std::int64_t run = FreshRuns();
      Ranks<float> ranks(layout);
      const auto all = ranks.Of(Range(p));
      num_products = 0;
      std::atomic<int> before{-1};
      RunRanks(context, p, [&](std::size_t rank) -> Program {
        if (rank == late) {
          const std::int64_t until_ns = NowNs() + 20'000'000'000;
          while (num_products < want && NowNs() < until_ns) {
            std::this_thread::yield();
          }
          before = num_products.load();
        }
        const void* const operands[] = {all.operands[rank], all.operands[p + rank]};
        void* const results[] = {all.results[rank]};
        const CallResult result = co_await Call(*site, rank, run, operands, results);
        Check(result.ok, "the call succeeds");
      });
      const std::string what = Text(layout) + ", rank " + std::to_string(late) + " late: ";
      context.Expect(before == want, what + std::to_string(before) + " products before it");
      context.Expect(num_products == p * p, what + "each product is made once");
      ranks.Check(context, what);
    }
  }
  SetBlas({.sgemm = &Gemm<float>, .dgemm = &Gemm<double>});
}

std::atomic<const float*> slow_result{nullptr};

void SlowGemm(const char* transa, const char* transb, const int* m, const int* n, const int* k,
              const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
              const float* beta, float* c, const int* ldc) {
  if (c == slow_result && *beta == 0) {
    SleepMs(50);
  }
  Gemm<float>(transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/// Also where another thread would be faster with the second term than one is with the first.
void TermsAreAddedInOrder(Context& context) {
  const std::size_t p = 3;
  SetBlas({.sgemm = &SlowGemm, .dgemm = &Gemm<double>});
  const MatmulLayout layout = Small(MatmulKind::kScatterRows);
  const Site site = MakeSite(1, OneGroup(p), MakeMatmulWork(layout));
  Ranks<float> ranks(layout);
  const auto all = ranks.Of(Range(p));
  slow_result = static_cast<const float*>(all.results[0]);
  const std::int64_t run = FreshRuns();
  RunRanks(context, p, [&](std::size_t rank) -> Program {
    const void* const operands[] = {all.operands[rank], all.operands[p + rank]};
    void* const results[] = {all.results[rank]};
    const CallResult result = co_await Call(*site, rank, run, operands, results);
    Check(result.ok, "the call succeeds");
  });
  ranks.Check(context, Text(layout));
  SetBlas({.sgemm = &Gemm<float>, .dgemm = &Gemm<double>});
}

void ABlasTakesOneThread(Context& context) {
  SetBlas({.sgemm = &NoticingGemm,
           .dgemm = &Gemm<double>,
           .set_num_threads = &SetThreads,
           .num_threads = &Threads});
  const MatmulLayout layout = Layouts()[6];
  context.Expect(layout.dtype == DType::kF32, "the layout is one of float32");
  Ranks<float> ranks(layout);
  const auto local = ranks.Of(Range(layout.num_ranks));
  const BlockMatmul work(layout);
  const std::vector<std::size_t> arrivals = Range(layout.num_ranks);
  std::vector<std::atomic<int>> counters(work.num_counters(layout.num_ranks));
  Buffers buffers = local.buffers();
  buffers.arrivals = arrivals.data();
  buffers.counters = counters.data();
  work.Run(0, buffers);
  context.Expect(most_threads_within == 1, "one thread within");
  context.Expect(threads == 7, "as many as before after it");
  SetBlas({.sgemm = &Gemm<float>, .dgemm = &Gemm<double>});
}

const Suite suite("matmul",
                  {{"InOneProcess", InOneProcess},
                   {"InOneProcessWithRowsJoined", InOneProcessWithRowsJoined},
                   {"FewRowsAreMultipliedTogether", FewRowsAreMultipliedTogether},
                   {"BlocksAreMultipliedWhereTheyLie", BlocksAreMultipliedWhereTheyLie},
                   {"LargeBlocksAreReadWhateverThatCosts", LargeBlocksAreReadWhateverThatCosts},
                   {"AcrossProcesses", AcrossProcesses},
                   {"AcrossProcessesReadWhereTheyLie", AcrossProcessesReadWhereTheyLie},
                   {"BlocksAreMultipliedAsTheyCome", BlocksAreMultipliedAsTheyCome},
                   {"LargeBlocksAreMultipliedAsTheyCome", LargeBlocksAreMultipliedAsTheyCome},
                   {"ProductsAreMadeBeforeALateRankComes", ProductsAreMadeBeforeALateRankComes},
                   {"TermsAreAddedInOrder", TermsAreAddedInOrder},
                   {"ABlasTakesOneThread", ABlasTakesOneThread}},
                  {.before = [] { SetBlas({.sgemm = &Gemm<float>, .dgemm = &Gemm<double>}); }});

}  // namespace
}  // namespace jaxcoll::testing::matmul_test

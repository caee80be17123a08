// How data goes into windows and out of them: which way calls take, and that all move the same.
#include "host/copy_trials.h"

#include <chrono>   // std::chrono::microseconds
#include <cstddef>  // std::byte, std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <memory>   // std::unique_ptr
#include <numeric>  // std::iota
#include <string>   // std::string
#include <thread>   // std::this_thread
#include <vector>   // std::vector

#include "host/copy_work.h"
#include "host/membership.h"
#include "host/route.h"
#include "kernels/copy.h"
#include "ops.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::copy_trials_test {
namespace {

enum Way : char { kPlain = 'p', kLeaving = 'l', kBoth = 'b' };

Way WayOf(const WindowCopies& copies) {
  return copies.leave == nullptr ? kPlain : copies.take == nullptr ? kLeaving : kBoth;
}

/// The ways of calls [begin, end), which take what `microseconds(way)` says, a letter each.
template <typename F>
std::string WaysOf(CopyTrials& trials, std::uint64_t begin, std::uint64_t end,
                   const F& microseconds) {
  std::string ways;
  for (std::uint64_t call = begin; call < end; ++call) {
    trials.Begin(call);
    const Way way = WayOf(trials.copies());
    ways += way;
    for (int part = 0; part < 2; ++part) {
      static_cast<void>(trials.Run([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(microseconds(way) / 2));
        return true;
      }));
    }
    trials.End();
  }
  return ways;
}

std::string Times(std::size_t count, Way way) { return std::string(count, way); }

int FarCores(Way way) { return way == kPlain ? 2000 : way == kLeaving ? 800 : 100; }
int NearCores(Way way) { return way == kPlain ? 100 : 800; }
int NoTime(Way /*way*/) { return 0; }

constexpr std::size_t kSmall = 0;

void CallsKeepToTheQuickestWay(Context& context) {
  const std::string tried = Times(14, kPlain) + Times(6, kLeaving);
  {
    CopyTrials trials(kSmall);
    context.Expect(WaysOf(trials, 0, 26, FarCores) == tried + Times(6, kLeaving), "far");
    // The other ways are tried again, and what is quickest may be something else by then.
    context.Expect(WaysOf(trials, 252, 270, NearCores) == Times(4, kLeaving) + Times(6, kPlain) +
                                                              Times(6, kLeaving) + Times(2, kPlain),
                   "near by now");
  }
  CopyTrials trials(kSmall);
  context.Expect(WaysOf(trials, 0, 26, NearCores) == tried + Times(6, kPlain), "near");
}

void LargeCallsAreTakenPastTheCachesToo(Context& context) {
  const std::string tried = Times(14, kPlain) + Times(6, kLeaving);
  {
    CopyTrials trials(CacheBytes());
    context.Expect(WaysOf(trials, 0, 30, FarCores) == tried + Times(10, kBoth), "far");
  }
  {
    CopyTrials trials(CacheBytes() - 1);
    context.Expect(WaysOf(trials, 0, 30, FarCores) == tried + Times(10, kLeaving), "smaller");
  }
  CopyTrials trials(CacheBytes());
  context.Expect(WaysOf(trials, 0, 30, NearCores) == tried + Times(10, kPlain), "near");
}

/// Of long runs few calls.
void TrialsBecomeRare(Context& context) {
  CopyTrials trials(kSmall);
  std::vector<std::uint64_t> begins;
  for (std::uint64_t call = 0; call < 20'000; ++call) {
    trials.Begin(call);
    if (WayOf(trials.copies()) == kLeaving && (begins.empty() || call - begins.back() >= 6)) {
      begins.push_back(call);
    }
  }
  const std::vector<std::uint64_t> expected{14, 262, 518, 1030, 2054, 4102, 8198, 12294, 16390};
  context.Expect(begins == expected, "at powers of two, then every 4096 calls");
}

/// A process whose clock says something else tries and times the same calls.
void AllTryTheSameCalls(Context& context) {
  CopyTrials trials(kSmall);
  CopyTrials late(kSmall);
  static_cast<void>(WaysOf(trials, 0, 252, NoTime));
  context.Expect(WaysOf(late, 256, 268, NoTime) == WaysOf(trials, 256, 268, NoTime),
                 "from then on");
}

// All rounds of a route between processes of one rank each, in one thread. False: a step failed.
bool RunRoute(const Work& work, std::size_t num_processes, const WindowCopies& copies,
              const CallData& data) {
  constexpr std::size_t kWindowBytes = 65536;
  std::vector<std::size_t> seats(num_processes);
  std::iota(seats.begin(), seats.end(), std::size_t{0});
  std::vector<std::vector<std::byte>> memory(num_processes, std::vector<std::byte>(kWindowBytes));
  std::vector<std::byte*> windows;
  for (std::vector<std::byte>& window : memory) {
    windows.push_back(window.data());
  }
  const std::vector<std::int64_t> pids(num_processes);
  const Processes processes{windows.data(), pids.data(), copies};
  std::vector<std::unique_ptr<const Membership>> members;
  std::vector<std::unique_ptr<const Route>> routes;
  for (std::size_t p = 0; p < num_processes; ++p) {
    members.push_back(std::make_unique<Membership>(seats, p));
    routes.push_back(work.MakeRoute(*members[p], {.window_bytes = kWindowBytes}));
  }
  bool ok = true;
  for (std::size_t round = 0; round < routes[0]->num_rounds(); ++round) {
    for (std::size_t phase = 0; phase < routes[0]->num_phases(); ++phase) {
      for (std::size_t p = 0; p < num_processes; ++p) {
        const Buffers local{data.operands(p).data(), data.results(p).data(), 1};
        const bool takes = phase == 1 && routes[p]->takes_one_by_one();
        ok = (takes || routes[p]->Run(phase, round, local, processes)) && ok;
        for (std::size_t other = 0; takes && other < num_processes; ++other) {
          ok = (other == p || routes[p]->Take(round, other, local, processes)) && ok;
        }
        if (phase == 0) {
          routes[p]->Meanwhile(round, local);
        }
      }
    }
  }
  return ok;
}

void AllWaysMoveTheSame(Context& context) {
  for (const std::size_t p : Sizes{2, 3}) {
    std::vector<std::size_t> ring(p);
    std::vector<std::size_t> holes(p, PermuteWork::kNone);
    for (std::size_t r = 0; r < p; ++r) {
      ring[r] = (r + 1) % p;
    }
    holes[0] = 1;
    std::vector<Op> ops{AllReduceOp({{DType::kF32, 20'001}, {DType::kF16, 3000}})};
    for (const std::size_t bytes : Sizes{100, 4095, 4096, 4097, 10'000, 200'003}) {
      const std::vector<Op> of_size{AllGatherOp(1, p, bytes),
                                    AllGatherOp(3, p, bytes),
                                    AllToAllOp(p, 1, 1, 1, 1, bytes, true),
                                    AllToAllOp(p, 2, 3, 1, 5, bytes / 10, false),
                                    PermuteOp(ring, bytes),
                                    PermuteOp(holes, bytes),
                                    BroadcastOp(p, p - 1, bytes),
                                    AllReduceOp({{DType::kF32, bytes / 4}}),
                                    ReduceScatterOp(DType::kF32, 1, p, bytes / 4),
                                    ReduceScatterOp(DType::kI8, 3, p, bytes)};
      ops.insert(ops.end(), of_size.begin(), of_size.end());
    }
    for (const Op& op : ops) {
      for (const CopyFn leave : {CopyFn{nullptr}, GetStreamCopy()}) {
        for (const CopyFn take : {CopyFn{nullptr}, GetStreamCopy()}) {
          const CallData data(op, p, 7);
          const bool ok = RunRoute(*op.make(), p, {.leave = leave, .take = take}, data);
          context.Expect(ok, "all steps run");
          for (std::size_t r = 0; r < p; ++r) {
            const std::string problem = data.Problem(r);
            context.Expect(problem.empty(), [&] {
              return problem + (leave == nullptr ? "" : ", left past the caches") +
                     (take == nullptr ? "" : ", taken past them");
            });
          }
        }
      }
    }
  }
}

const Suite suite("copy_trials",
                  {{"AllTryTheSameCalls", AllTryTheSameCalls},
                   {"AllWaysMoveTheSame", AllWaysMoveTheSame},
                   {"CallsKeepToTheQuickestWay", CallsKeepToTheQuickestWay},
                   {"LargeCallsAreTakenPastTheCachesToo", LargeCallsAreTakenPastTheCachesToo},
                   {"TrialsBecomeRare", TrialsBecomeRare}});

}  // namespace
}  // namespace jaxcoll::testing::copy_trials_test

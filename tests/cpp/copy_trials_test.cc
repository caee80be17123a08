// How data goes into windows and out of them: which way calls take, and that all move the same.
#include "host/copy_trials.h"

#include <algorithm>  // std::count
#include <cstddef>    // std::byte, std::size_t
#include <cstdint>    // std::int64_t
#include <memory>     // std::unique_ptr
#include <numeric>    // std::iota
#include <string>     // std::string
#include <vector>     // std::vector

#include "host/copy_work.h"
#include "host/membership.h"
#include "host/route.h"
#include "kernels/copy.h"
#include "ops.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::copy_trials_test {
namespace {

using Way = char;
constexpr Way kPlain = 'p';
constexpr Way kLeaving = 'l';
constexpr Way kBoth = 'b';

Way WayOf(const WindowCopies& copies) {
  return copies.leave == nullptr ? kPlain : copies.take == nullptr ? kLeaving : kBoth;
}

/// The ways of the next calls, a letter each, of which each takes twice `ns(way)`.
template <typename F>
std::string WaysOf(CopyTrials& trials, std::size_t num_calls, const F& ns) {
  std::string ways;
  for (std::size_t call = 0; call < num_calls; ++call) {
    trials.Begin();
    const Way way = WayOf(trials.copies());
    ways += way;
    for (int part = 0; part < 2 && trials.is_timed(); ++part) {
      trials.Count(ns(way));
    }
    trials.End();
  }
  return ways;
}

std::string Times(std::size_t count, Way way) { return std::string(count, way); }

std::int64_t FarCores(Way way) { return way == kPlain ? 2000 : way == kLeaving ? 800 : 750; }
std::int64_t NearCores(Way way) { return way == kPlain ? 700 : way == kLeaving ? 1500 : 2000; }

constexpr std::size_t kSmall = 0;
/// Of the first calls.
std::string Tried() { return Times(14, kPlain) + Times(6, kLeaving); }

void CallsKeepToTheQuickestWay(Context& context) {
  CopyTrials far(kSmall, true);
  context.Expect(WaysOf(far, 50, FarCores) == Tried() + Times(30, kLeaving), "far");
  CopyTrials near(kSmall, true);
  context.Expect(WaysOf(near, 50, NearCores) == Tried() + Times(30, kPlain), "near");
  CopyTrials same(kSmall, true);
  context.Expect(WaysOf(same, 50, [](Way way) { return way == kPlain ? 1000 : 950; }) ==
                     Tried() + Times(30, kPlain),
                 "hardly any difference");
}

void LargeCallsAreTakenPastTheCachesToo(Context& context) {
  const std::size_t large = CacheBytes();
  const auto ways = [](std::size_t bytes, const auto& ns) {
    CopyTrials trials(bytes, true);
    return WaysOf(trials, 50, ns);
  };
  const auto far = [](Way way) { return way == kPlain ? 2000 : way == kLeaving ? 800 : 600; };
  context.Expect(ways(large, far) == Tried() + Times(30, kBoth), "far");
  context.Expect(ways(large, FarCores) == Tried() + Times(6, kBoth) + Times(24, kLeaving),
                 "no gain");
  context.Expect(ways(large - 1, far) == Tried() + Times(30, kLeaving), "smaller");
  context.Expect(ways(large, NearCores) == Tried() + Times(30, kPlain), "near");
}

/// As a broadcast's root, which sees nothing of what the others' copies take.
void WhoDoesNotTakeNeedsAClearGain(Context& context) {
  const auto chosen = [](std::int64_t leaving_ns, bool takes) {
    CopyTrials trials(kSmall, takes);
    return WaysOf(trials, 50, [&](Way way) { return way == kPlain ? 1000 : leaving_ns; }).back();
  };
  context.Expect(chosen(700, true) == kLeaving, "who takes sees all");
  context.Expect(chosen(700, false) == kPlain, "who does not, half of it");
  context.Expect(chosen(400, false) == kLeaving, "much quicker");
}

/// As where the system moves a process to another core.
void WhatChangesIsTriedAgain(Context& context) {
  CopyTrials trials(kSmall, true);
  static_cast<void>(WaysOf(trials, 50, FarCores));
  const std::string again = Times(6, kPlain) + Times(6, kLeaving);
  const std::string to_near = WaysOf(trials, 200, NearCores);
  const std::size_t at = to_near.find(kPlain);
  context.Expect(at < 70 && to_near.substr(at, 12) == again, "soon");
  context.Expect(to_near.substr(at + 12) == Times(200 - at - 12, kPlain), "then the other way");
  const std::string to_far = WaysOf(trials, 200, FarCores);
  context.Expect(to_far.back() == kLeaving, "and back");
}

std::size_t NumLeaving(const std::string& ways) {
  return static_cast<std::size_t>(std::count(ways.begin(), ways.end(), kLeaving));
}

void WhatStaysIsSeldomTried(Context& context) {
  CopyTrials trials(kSmall, true);
  context.Expect(NumLeaving(WaysOf(trials, 4000, NearCores)) == 6, "at first");
  context.Expect(NumLeaving(WaysOf(trials, 20'000, NearCores)) == 5 * 6, "now and then");
}

/// What calls take changes, and the ways stay as they were to each other: ever fewer trials, also
/// where another way than the first is chosen.
void ChangesThatChangeNothingAreForgotten(Context& context) {
  const auto both = [](Way way) { return way == kPlain ? 2000 : way == kLeaving ? 1500 : 1000; };
  for (const std::size_t bytes : Sizes{kSmall, CacheBytes()}) {
    for (const auto& ns :
         {std::function<std::int64_t(Way)>(NearCores), std::function<std::int64_t(Way)>(both)}) {
      CopyTrials trials(bytes, true);
      std::int64_t slower = 1;
      std::string ways;
      for (int i = 0; i < 200; ++i) {
        slower = 3 - slower;
        ways += WaysOf(trials, 100, [&](Way way) { return ns(way) * slower; });
      }
      const char tried = ways.back() == kPlain ? kLeaving : kPlain;
      const auto num_tried = std::count(ways.begin(), ways.end(), tried);
      context.Expect(num_tried >= 6 * 6 && num_tried <= 8 + 6 * 15,
                     [&] { return std::to_string(num_tried) + " of 20000 calls"; });
    }
  }
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
                  {{"AllWaysMoveTheSame", AllWaysMoveTheSame},
                   {"CallsKeepToTheQuickestWay", CallsKeepToTheQuickestWay},
                   {"ChangesThatChangeNothingAreForgotten", ChangesThatChangeNothingAreForgotten},
                   {"LargeCallsAreTakenPastTheCachesToo", LargeCallsAreTakenPastTheCachesToo},
                   {"WhatChangesIsTriedAgain", WhatChangesIsTriedAgain},
                   {"WhatStaysIsSeldomTried", WhatStaysIsSeldomTried},
                   {"WhoDoesNotTakeNeedsAClearGain", WhoDoesNotTakeNeedsAClearGain}});

}  // namespace
}  // namespace jaxcoll::testing::copy_trials_test

// tests/cpp/exchange_test.cc: the order of a call's steps, and every op on many layouts against one
// process.
#include <unistd.h>  // sysconf

#include <algorithm>   // std::all_of, std::max, std::min, std::rotate
#include <array>       // std::array
#include <cstddef>     // std::size_t
#include <cstdint>     // std::int64_t, std::uint64_t
#include <cstring>     // std::memset
#include <functional>  // std::function
#include <map>         // std::map
#include <memory>      // std::make_unique, std::shared_ptr, std::unique_ptr, std::weak_ptr
#include <numeric>     // std::iota
#include <set>         // std::set
#include <string>      // std::string, std::to_string
#include <utility>     // std::pair
#include <vector>      // std::vector

#include "host/copy_costs.h"
#include "host/direct_reduce.h"
#include "host/direct_route.h"
#include "host/exchange.h"
#include "host/membership.h"
#include "host/reduce_route.h"
#include "host/reduce_work.h"
#include "host/route.h"
#include "kernels/reduce.h"
#include "ops.h"
#include "processes.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::exchange_test {
namespace {

// ---- Steps ------------------------------------------------------------------------------------

void EveryStepHasItsTurn(Context& context) {
  for (const std::size_t phases : Sizes{2, 3, 4}) {
    for (const std::size_t rounds : Sizes{1, 2, 3, 4, 5, 6}) {
      const Steps steps(phases, rounds);
      const std::string what = std::to_string(phases) + " phases, " + std::to_string(rounds);
      std::map<std::pair<std::size_t, std::size_t>, std::size_t> step_of;
      Step last;
      std::map<std::pair<std::size_t, std::size_t>, std::pair<std::size_t, std::size_t>> needs;
      for (Step step; !steps.is_end(step); steps.Next(step)) {
        last = step;
        if (steps.is_idle(step)) {
          continue;
        }
        const std::pair at{step.phase, steps.round(step)};
        context.Expect(at.first < phases && at.second < rounds, what);
        context.Expect(step_of.emplace(at, step.number).second, what + ": a step twice");
        needs[at] = {steps.NeedsLeft(step), steps.NeedsRead(step)};
        context.Expect(std::max(steps.NeedsLeft(step), steps.NeedsRead(step)) <= step.number,
                       what + ": a step needs itself or a later one");
      }
      context.Expect(step_of.size() == phases * rounds, what + ": a step is missing");
      context.Expect(!steps.is_idle(last), what + ": the last step is idle");
      for (const auto& [at, step] : step_of) {
        const auto& [phase, round] = at;
        // As host/route.h has it: a phase reads what the one before left, and overwrites what the
        // next one has read when the window was full.
        const std::size_t left = phase > 0 ? step_of.at({phase - 1, round}) + 1 : 0;
        const bool overwrites = phase + 1 < phases && round >= kRoundsInWindow;
        const std::size_t read =
            overwrites ? step_of.at({phase + 1, round - kRoundsInWindow}) + 1 : 0;
        context.Expect(needs.at(at) == std::pair{left, read},
                       what + ": step " + std::to_string(step));
      }
    }
  }
}

/// Processes that go on in any order that is allowed, each of which reads what some others leave.
void NoStepReadsOrWritesTooEarly(Context& context) {
  Random random(5);
  for (int i = 0; i < 600; ++i) {
    const std::size_t phases = 2 + Below(random, 2);
    const std::size_t rounds = 1 + Below(random, 10);
    const std::size_t num_processes = 2 + Below(random, 3);
    const Steps steps(phases, rounds);
    std::vector<Step> done(num_processes);
    std::vector<std::vector<bool>> reads(num_processes, std::vector<bool>(num_processes));
    for (std::vector<bool>& of_one : reads) {
      for (std::size_t q = 0; q < num_processes; ++q) {
        of_one[q] = Below(random, 2) == 0;
      }
    }
    // The round in each place of each process's window of each phase, and how many have read it.
    std::map<std::array<std::size_t, 3>, std::pair<std::size_t, std::size_t>> left;
    for (;;) {
      std::vector<std::size_t> ready;
      for (std::size_t p = 0; p < num_processes; ++p) {
        while (!steps.is_end(done[p]) && steps.is_idle(done[p])) {
          steps.Next(done[p]);
        }
        bool may_run = !steps.is_end(done[p]);
        for (std::size_t q = 0; q < num_processes && may_run; ++q) {
          may_run = (q == p || !reads[p][q] || done[q].number >= steps.NeedsLeft(done[p])) &&
                    (q == p || !reads[q][p] || done[q].number >= steps.NeedsRead(done[p]));
        }
        if (may_run) {
          ready.push_back(p);
        }
      }
      if (ready.empty()) {
        break;
      }
      const std::size_t p = ready[Below(random, ready.size())];
      const std::size_t phase = done[p].phase;
      const std::size_t round = steps.round(done[p]);
      for (std::size_t q = 0; q < num_processes && phase > 0; ++q) {
        if (!reads[p][q]) {
          continue;
        }
        auto& [what, num_reads] = left[{q, phase - 1, round % kRoundsInWindow}];
        context.Expect(what == round + 1, "a step reads what is not there");
        ++num_reads;
      }
      if (phase + 1 < phases) {
        auto& [what, num_reads] = left[{p, phase, round % kRoundsInWindow}];
        std::size_t wanted = 0;
        for (std::size_t q = 0; q < num_processes; ++q) {
          wanted += reads[q][p] ? 1 : 0;
        }
        context.Expect(what == 0 || num_reads == wanted, "a step overwrites what is not read");
        what = round + 1;
        num_reads = 0;
      }
      steps.Next(done[p]);
    }
    context.Expect(
        std::all_of(done.begin(), done.end(), [&](const Step& step) { return steps.is_end(step); }),
        "all come to the end");
  }
}

// ---- Ops --------------------------------------------------------------------------------------

struct Layout {
  Places process_of;
  std::size_t num_processes;
};

const std::vector<Layout>& Layouts() {
  static const std::vector<Layout> layouts{
#ifndef __SANITIZE_THREAD__  // which takes minutes, and finds nothing more in these
      {{0, 1}, 2},       {{0, 1, 2}, 3},    {{0, 0, 0, 1}, 2},   {{0, 1, 0, 1}, 2},
#endif
      {{0, 0, 1, 1}, 2}, {{0, 0, 1, 2}, 3}, {{0, 1, 2, 0, 1}, 3}};
  return layouts;
}

// Of calls that move megabytes, which the sanitizers take long for.
const std::vector<Layout>& LayoutsOfLarge() {
  static const std::vector<Layout> layouts{
#ifdef __SANITIZE_THREAD__
      {{0, 1, 2, 0}, 3}};
#else
      {{0, 1}, 2}, {{0, 0, 0, 1}, 2}, {{0, 1, 2, 0, 1}, 3}};
#endif
  return layouts;
}

std::vector<std::size_t> Seats(const Host& host, const Places& process_of) {
  std::vector<std::size_t> seats;
  for (const std::size_t process : process_of) {
    seats.push_back(host.num_processes() - 1 - process);
  }
  return seats;
}

std::vector<Op> ReduceOps(std::size_t p, std::size_t processes, std::size_t most,
                          std::size_t window) {
  std::vector<Op> ops{
      AllReduceOp({}),
      AllReduceOp({{DType::kF32, 0}, {DType::kI8, 0}}),
      AllReduceOp({{DType::kI64, 1}}),
      AllReduceOp(std::vector<LeafSize>(90, {DType::kI16, 31})),
      AllReduceOp({{DType::kF16, 7, ReduceOp::kMean},
                   {DType::kBF16, 333},
                   {DType::kF32, 0},
                   {DType::kF32, 2001, ReduceOp::kMax},
                   {DType::kI8, 3001},
                   {DType::kC64, 129, ReduceOp::kProd},
                   {DType::kF64, 1},
                   {DType::kC128, 515},
                   {DType::kI8, 1}}),
  };
  // host/reduce_route.cc: one shot fits a window, and 64 KiB of others; a chunk for each process.
  const std::size_t one_shot = std::min(window / most, std::size_t{65536} / (p - 1));
  const std::size_t round = window / kRoundsInWindow;
  const std::size_t chunk = round / (processes * most + 1) / 64 * 64;
  for (const std::size_t bytes : {one_shot, chunk * processes, 2 * chunk * processes,
                                  kRoundsInWindow * chunk * processes, 9 * chunk * processes}) {
    for (const std::size_t count : {bytes / 2 - 1, bytes / 2, bytes / 2 + 1}) {
      ops.push_back(AllReduceOp({{DType::kBF16, count}}));
    }
  }
  ops.push_back(AllReduceOp({{DType::kF32, window}, {DType::kF16, 3}}));
  const std::size_t piece = round / (p * most) / 64 * 64 / 4;
  for (const std::size_t inner :
       Sizes{0, 1, 5, piece - 1, piece, piece + 1, 2 * piece + 1, kRoundsInWindow * piece + 1}) {
    ops.push_back(ReduceScatterOp(DType::kF32, 1, p, inner));
    ops.push_back(ReduceScatterOp(DType::kF32, 3, p, inner));
  }
  ops.push_back(ReduceScatterOp(DType::kF32, 0, p, 3));
  ops.push_back(ReduceScatterOp(DType::kF16, 1 + piece, p, 3));
  ops.push_back(ReduceScatterOp(DType::kI8, 1, p, 7 * 4 * piece + 1));
  ops.push_back(ReduceScatterOp(DType::kC128, 7, p, 5));
  return ops;
}

std::vector<Op> CopyOps(std::size_t p, std::size_t most, std::size_t window) {
  std::vector<Op> ops;
  const std::size_t whole = window / kRoundsInWindow / most / 64 * 64;
  const std::size_t piece = window / kRoundsInWindow / most / p / 64 * 64;
  const Sizes around{0,
                     1,
                     whole - 1,
                     whole,
                     whole + 1,
                     kRoundsInWindow * whole,
                     kRoundsInWindow * whole + 1,
                     7 * whole + 5};
  for (const std::size_t inner : around) {
    ops.push_back(AllGatherOp(1, p, inner));
    ops.push_back(AllGatherOp(3, p, inner));
  }
  ops.push_back(AllGatherOp(0, p, 4));
  ops.push_back(AllGatherOp(whole / 4 + 1, p, 4));
  ops.push_back(AllGatherOp(300, p, 24));
  for (const bool joins_first : {false, true}) {
    ops.push_back(AllToAllOp(p, 1, 1, 1, 1, 1, joins_first));
    ops.push_back(AllToAllOp(p, 2, 3, 1, 5, 4, joins_first));
    ops.push_back(AllToAllOp(p, 0, 1, 1, 1, 1, joins_first));
    ops.push_back(AllToAllOp(p, 1, 2, 3, 4, 0, joins_first));
    ops.push_back(AllToAllOp(p, 2, 16, 3, 5, 16, joins_first));
    for (const std::size_t after : {piece - 1, piece, piece + 1, 5 * piece + 3}) {
      ops.push_back(AllToAllOp(p, 1, 1, 1, 1, after, joins_first));
    }
    ops.push_back(AllToAllOp(p, 3, 1, 2, 1, piece + 1, joins_first));
  }
  std::vector<std::size_t> ring(p);
  std::vector<std::size_t> holes(p, PermuteWork::kNone);
  for (std::size_t r = 0; r < p; ++r) {
    ring[r] = (r + 1) % p;
    if (r % 2 == 1) {
      holes[r] = p - 1 - r;
    }
  }
  for (const std::size_t bytes : around) {
    ops.push_back(PermuteOp(ring, bytes));
    ops.push_back(PermuteOp(holes, bytes));
    for (const std::size_t root : Sizes{0, p / 2, p - 1}) {
      ops.push_back(BroadcastOp(p, root, bytes));
    }
  }
  ops.push_back(PermuteOp(std::vector<std::size_t>(p, PermuteWork::kNone), 100));
  return ops;
}

/// Two ops in turn, several calls of each without a pause, so that lanes are left and taken again
/// while others still read.
void CheckInTurn(Context& context, Host& host, const Layout& layout, const Op& one, const Op& other,
                 std::size_t num_turns = 3) {
  static std::uint64_t next_id = 1000;
  const std::size_t p = layout.process_of.size();
  const Op* const ops[] = {&one, &other};
  std::vector<std::unique_ptr<SharedSite>> sites;
  std::vector<std::unique_ptr<CallData>> data;
  for (std::size_t i = 0; i < 2 * num_turns; ++i) {
    if (i < 2) {
      sites.push_back(std::make_unique<SharedSite>(host, ++next_id, OneGroup(p), layout.process_of,
                                                   ops[i]->make));
    }
    data.push_back(std::make_unique<CallData>(*ops[i % 2], p, next_id * 100 + i));
  }
  const std::int64_t run = FreshRuns();
  RunRanks(context, p, [&](std::size_t rank) -> Program {
    for (std::size_t i = 0; i < data.size(); ++i) {
      const CallResult result = co_await sites[i % 2]->Begin(rank, run, *data[i]);
      Check(result.ok, [&] { return ops[i % 2]->name + " failed: " + result.error; });
    }
  });
  for (const auto& call : data) {
    for (std::size_t r = 0; r < p; ++r) {
      const std::string problem = call->Problem(r);
      context.Expect(problem.empty(), [&] {
        return problem + ", " + std::to_string(p) + " ranks, windows of " +
               std::to_string(host.segment().shape().window_bytes);
      });
    }
  }
}

void CheckInPairs(Context& context, Host& host, const Layout& layout, const std::vector<Op>& ops) {
  for (std::size_t i = 0; i < ops.size(); i += 2) {
    CheckInTurn(context, host, layout, ops[i], ops[std::min(i + 1, ops.size() - 1)]);
  }
}

void CheckOps(Context& context, bool reduces) {
  for (const Layout& layout : Layouts()) {
    for (const std::size_t window : Sizes{4096, 65536}) {
      Host host(layout.num_processes, {.num_lanes = 3, .window_bytes = window});
      const Membership members(Seats(host, layout.process_of), 0);
      if (!context.Expect(MinWindowBytes(members) <= window, "the window is large enough")) {
        continue;
      }
      const std::size_t p = members.num_ranks();
      const std::size_t most = members.most_ranks();
      const std::vector<Op> ops =
          reduces ? ReduceOps(p, layout.num_processes, most, window) : CopyOps(p, most, window);
      CheckInPairs(context, host, layout, ops);
    }
  }
}

/// What is large enough to be read where it lies.
void CheckReadInPlace(Context& context, std::size_t window_bytes,
                      const std::function<std::vector<Op>(std::size_t)>& ops_of) {
  for (const Layout& layout : LayoutsOfLarge()) {
    Host host(layout.num_processes,
              {.num_lanes = 3, .window_bytes = window_bytes, .can_read_peers = true});
    const Membership members(Seats(host, layout.process_of), 0);
    const RouteOptions options{
        .window_bytes = window_bytes, .can_read_peers = true, .copy_costs = kReadingIsFree};
    const std::vector<Op> ops = ops_of(members.num_ranks());
    for (const Op& op : ops) {
      const auto route = op.make()->MakeRoute(members, options);
      const bool reads = dynamic_cast<const DirectRoute*>(route.get()) != nullptr ||
                         dynamic_cast<const DirectAllReduce*>(route.get()) != nullptr ||
                         dynamic_cast<const DirectReduceScatter*>(route.get()) != nullptr;
      context.Expect(reads, [&] { return op.name + " is read in place"; });
    }
    CheckInPairs(context, host, layout, ops);
  }
}

void CopiesReadInPlace(Context& context) {
  CheckReadInPlace(context, 4096, [](std::size_t p) {
    std::vector<std::size_t> ring(p);
    std::vector<std::size_t> holes(p, PermuteWork::kNone);
    for (std::size_t r = 0; r < p; ++r) {
      ring[r] = (r + 1) % p;
      if (r % 2 == 1) {
        holes[r] = (r + 1) % p;
      }
    }
    constexpr std::size_t kBytes = 1'060'001;
    return std::vector<Op>{AllGatherOp(1, p, kBytes),
                           AllGatherOp(5, p, kBytes / 5 + 1),
                           AllGatherOp(60, p, 20'000),
                           AllToAllOp(p, 3, 2, 1, 10, 18'000, true),
                           AllToAllOp(p, 1, 4, 2, 9, 16'384, false),
                           PermuteOp(ring, kBytes),
                           PermuteOp(holes, kBytes),
                           BroadcastOp(p, p - 1, kBytes),
                           BroadcastOp(p, 0, kBytes)};
  });
}

void ReductionsReadInPlace(Context& context) {
  for (const std::size_t window : Sizes{131072, 1048576}) {
    CheckReadInPlace(context, window, [](std::size_t p) {
      return std::vector<Op>{AllReduceOp({{DType::kF32, 600'001}}),
                             AllReduceOp({{DType::kBF16, 433'333},
                                          {DType::kF32, 1},
                                          {DType::kC64, 80'001},
                                          {DType::kF16, 70'000, ReduceOp::kMean},
                                          {DType::kI8, 500'001, ReduceOp::kMax},
                                          {DType::kF32, 0},
                                          {DType::kC128, 3}}),
                             ReduceScatterOp(DType::kF32, 1, p, 270'001),
                             ReduceScatterOp(DType::kF16, 70, p, 9'000),
                             ReduceScatterOp(DType::kI64, 3, p, 50'000)};
    });
  }
}

/// Who goes on writes over what the others have read.
void BuffersStayUntilOthersHaveRead(Context& context) {
  constexpr std::size_t kCount = 1 << 19;
  constexpr std::size_t kCalls = 8;
  const std::vector<Op> ops = {AllReduceOp({{DType::kF32, kCount}}),
                               ReduceScatterOp(DType::kF32, 1, 2, kCount)};
  for (std::size_t i = 0; i < ops.size(); ++i) {
    Host host(2, {.window_bytes = 1 << 20, .can_read_peers = true});
    const SharedSite site(host, 400 + i, OneGroup(2), {0, 1}, ops[i].make);
    const std::size_t bytes = ops[i].make()->operand_bytes(0);
    std::vector<std::unique_ptr<CallData>> calls;
    for (std::size_t call = 0; call < kCalls; ++call) {
      calls.push_back(std::make_unique<CallData>(ops[i], 2, 400 + call));
    }
    const std::int64_t run = FreshRuns();
    RunRanks(context, 2, [&](std::size_t rank) -> Program {
      for (const auto& call : calls) {
        const CallResult result = co_await site.Begin(rank, run, *call);
        Check(result.ok, result.error);
        const std::string problem = call->Problem(rank);
        Check(problem.empty(), problem);
        std::memset(const_cast<void*>(call->operands(rank)[0]), 0, bytes);
      }
    });
  }
}

/// Of a sum over as many processes as ranks, by what reading costs.
void SumsReadWhatIsFaster(Context& context) {
  const std::vector<ReducedLeaf> large{
      {DType::kF32, 1 << 20, GetReduce(DType::kF32, ReduceOp::kSum)}};
  const std::vector<ReducedLeaf> small{
      {DType::kF32, 1 << 16, GetReduce(DType::kF32, ReduceOp::kSum)}};
  struct Case {
    Places process_of;
    double most;
    double least;
  };
  for (const Case& each :
       {Case{{0, 1}, 2.1, 1.9}, Case{{0, 1, 2, 3}, 1.7, 1.6}, Case{{0, 0, 1, 1}, 2.1, 1.9}}) {
    const Membership members(each.process_of, 0);
    const auto is_better = [&](const auto& leaves, std::size_t window, bool can, double cost) {
      const CopyCosts costs{.leaving = 5, .taking = 5, .reading = 5 * cost};
      return DirectAllReduce::IsBetter(
          leaves, members, {.window_bytes = window, .can_read_peers = can, .copy_costs = costs});
    };
    constexpr std::size_t kWindow = 1 << 20;
    context.Expect(is_better(large, kWindow, true, each.least), "reading is faster");
    context.Expect(!is_better(large, kWindow, true, each.most), "windows are");
    context.Expect(!is_better(large, kWindow, false, 0), "where the system refuses");
    context.Expect(!is_better(small, kWindow, true, 0), "too little");
    context.Expect(!is_better(large, 4096, true, 0), "a window without room");
  }
}

/// By what reading costs in copies to or from a window, which cost the same here.
void ReadsWhatIsFaster(Context& context) {
  struct Case {
    std::string op;
    Places process_of;
    bool leaves_once;
    std::function<bool(std::size_t, std::size_t)> wants;
    double most;  // that reading may cost, between these
    double least;
  };
  const auto all = [](std::size_t, std::size_t) { return true; };
  const auto ring = [](std::size_t to, std::size_t from) { return to == (from + 1) % 4; };
  const auto of_root = [](std::size_t, std::size_t from) { return from == 0; };
  const Places pair{0, 1};
  const Places four{0, 1, 2, 3};
  const std::vector<Case> cases = {{"all_gather", pair, true, all, 2.1, 1.9},
                                   {"all_gather", four, true, all, 1.4, 1.3},
                                   {"all_gather", {0, 0, 1, 1}, true, all, 1.6, 1.4},
                                   {"all_to_all", pair, false, all, 2.1, 1.9},
                                   {"all_to_all", four, false, all, 2.1, 1.9},
                                   {"ppermute", four, true, ring, 2.1, 1.9},
                                   {"broadcast", pair, true, of_root, 1.1, 0.9},
                                   {"broadcast", four, true, of_root, 1.1, 0.9}};
  for (const Case& each : cases) {
    for (const std::size_t mine : Sizes{0, 1}) {  // the answer is the same on all
      const Membership members(each.process_of, mine);
      const auto is_faster = [&](bool can_read, double cost) {
        const CopyCosts costs{.leaving = 5, .taking = 5, .reading = 5 * cost};
        return IsReadingFaster({.can_read_peers = can_read, .copy_costs = costs}, members,
                               each.leaves_once, each.wants);
      };
      context.Expect(is_faster(true, each.least), each.op + ": reading is faster");
      context.Expect(!is_faster(true, each.most), each.op + ": windows are");
      context.Expect(!is_faster(false, 0), each.op + ": where the system refuses");
    }
  }
}

/// Where reading costs less, but for the system's call.
void ReadsFromOneMebibyteOn(Context& context) {
  constexpr std::size_t kLeast = 1 << 20;
  const RouteOptions options{.window_bytes = kLeast,
                             .can_read_peers = true,
                             .copy_costs = {.leaving = 5, .taking = 5, .reading = 1}};
  for (const std::size_t size : Sizes{2, 4}) {
    Places process_of(size);
    std::iota(process_of.begin(), process_of.end(), 0);
    std::vector<std::size_t> ring = process_of;
    std::rotate(ring.begin(), ring.begin() + 1, ring.end());
    const std::size_t taken = kLeast / (size - 1) + 1;
    const auto reads = [&](const Op& op) {
      const auto route = op.make()->MakeRoute(Membership(process_of, 0), options);
      return dynamic_cast<const DirectRoute*>(route.get()) != nullptr;
    };
    const auto all_to_all = [&](std::size_t block) {
      return AllToAllOp(size, 1, 1, 1, 1, block, false);
    };
    const std::string where = " of " + std::to_string(size);
    context.Expect(reads(all_to_all(kLeast / size)), "all_to_all" + where);
    context.Expect(!reads(all_to_all(kLeast / size - 1)), "a smaller all_to_all" + where);
    context.Expect(reads(AllGatherOp(1, size, taken)), "all_gather" + where);
    context.Expect(!reads(AllGatherOp(1, size, taken - 2)), "a smaller all_gather" + where);
    context.Expect(reads(PermuteOp(ring, kLeast)), "ppermute" + where);
    context.Expect(!reads(PermuteOp(ring, kLeast - 1)), "a smaller ppermute" + where);
  }
}

/// Though nobody finds out by looking, since what processes say there is wiped out.
void LanesGoRoundByWhatIsHeard(Context& context) {
  constexpr std::size_t kNumLanes = 32;
  Host host(3, {.num_lanes = kNumLanes, .window_bytes = 4096});
  const Op op = AllGatherOp(1, 3, 100);
  const SharedSite site(host, 77, OneGroup(3), {0, 1, 2}, op.make);
  std::vector<std::unique_ptr<CallData>> calls;
  for (std::size_t i = 0; i < kNumLanes; ++i) {
    calls.push_back(std::make_unique<CallData>(op, 3, 10 + i));
  }
  const std::int64_t run = FreshRuns();
  RunRanks(context, 3, [&](std::size_t rank) -> Program {
    for (const auto& data : calls) {
      const CallResult result = co_await site.Begin(rank, run, *data);
      Check(result.ok, result.error);
      for (std::size_t seat = 0; seat < 3; ++seat) {
        for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
          host.segment().ended(seat, host.job(rank).session()->seat(), lane) = 0;
        }
      }
    }
  });
  for (std::size_t seat = 0; seat < 3; ++seat) {
    const std::uint32_t used = host.segment().seat(seat).num_used_lanes;
    context.Expect(used <= 4, [&] { return std::to_string(used) + " lanes"; });
  }
  for (const auto& call : calls) {
    for (std::size_t rank = 0; rank < 3; ++rank) {
      context.Expect(call->Problem(rank).empty(), [&] { return call->Problem(rank); });
    }
  }
}

// Where calls in a row begin in the windows of each process.
std::vector<std::set<std::size_t>> Begins(Context& context, Host& host, const Op& op,
                                          std::size_t num_ranks, std::size_t num_calls) {
  std::vector<std::size_t> process_of(num_ranks);
  std::iota(process_of.begin(), process_of.end(), std::size_t{0});
  const SharedSite site(host, 79, OneGroup(num_ranks), process_of, op.make);
  std::vector<std::unique_ptr<CallData>> calls;
  for (std::size_t i = 0; i < num_calls; ++i) {
    calls.push_back(std::make_unique<CallData>(op, num_ranks, 10 + i));
  }
  std::vector<std::set<std::size_t>> begins(num_ranks);
  const std::int64_t run = FreshRuns();
  RunRanks(context, num_ranks, [&](std::size_t rank) -> Program {
    const std::size_t seat = host.job(rank).session()->seat();
    for (const auto& data : calls) {
      const CallResult result = co_await site.Begin(rank, run, *data);
      Check(result.ok, result.error);
      Check(data->Problem(rank).empty(), [&] { return data->Problem(rank); });
      for (std::size_t lane = 0; lane < host.segment().seat(seat).num_used_lanes; ++lane) {
        begins[rank].insert(host.segment().lane(seat, lane).begin());
      }
    }
  });
  return begins;
}

/// Calls that use enough of a window for what others have read to matter, but not all of it: on as
/// many processes as there are cores at most they go round all of it, on more a quarter of it, and
/// a root's an eighth.
void CallsGoRoundTheirWindow(Context& context) {
  constexpr std::size_t kWindow = std::size_t{128} * 1024;
  constexpr std::size_t kMost = 8;  // on a machine of so many cores none share one
  const auto cores = static_cast<std::size_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  const auto places = [](std::size_t used, std::size_t span) {
    std::set<std::size_t> begins{0};
    for (std::size_t at = used; used > 0 && at + used <= span; at += used) {
      begins.insert(at);
    }
    return begins;
  };
  struct Case {
    std::size_t bytes;
    std::size_t used;       // in cache lines; 0: it begins where the window does
    std::size_t num_calls;  // in few lanes, each of which has so been everywhere
  };
  for (const std::size_t num_ranks : {std::size_t{2}, std::min(cores + 1, kMost)}) {
    const std::size_t span = num_ranks > cores ? kWindow / 4 : kWindow;
    for (const Case& each :
         {Case{100, 0, 8}, Case{8'190, 8'192, 80}, Case{40'000, kWindow / 2, 8},  // in two rounds
          Case{70'000, 0, 8}}) {
      const auto where = [&] {
        return std::to_string(each.bytes) + " bytes of " + std::to_string(num_ranks);
      };
      Host host(num_ranks, {.num_lanes = 4, .window_bytes = kWindow});
      const Op gather = AllGatherOp(1, num_ranks, each.bytes);
      for (const auto& begins : Begins(context, host, gather, num_ranks, each.num_calls)) {
        context.Expect(begins == places(each.used, span), where);
      }
      Host other(num_ranks, {.num_lanes = 4, .window_bytes = kWindow});
      const Op send = BroadcastOp(num_ranks, 0, each.bytes);
      const auto of_root = Begins(context, other, send, num_ranks, each.num_calls)[0];
      context.Expect(of_root == places(each.used, kWindow / 8), where);
    }
  }
}

/// Each of a ring is ahead by few calls.
void ARingHasNoRoot(Context& context) {
  const auto cores = static_cast<std::size_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  Host host(3, {.num_lanes = 4, .window_bytes = std::size_t{128} * 1024});
  const Op op = PermuteOp({2, 0, 1}, 8'192);
  for (const auto& begins : Begins(context, host, op, 3, 80)) {
    context.Expect(begins.size() == (cores < 3 ? 4U : 16U), std::to_string(begins.size()));
  }
}

/// Notes how its calls are to copy: past the caches is quicker in all processes but the first.
class TriedRoute final : public Route {
 public:
  TriedRoute(std::string& ways, const Membership& members) : ways_(ways), members_(members) {}
  [[nodiscard]] std::size_t num_phases() const override { return 2; }
  [[nodiscard]] std::size_t num_rounds() const override { return 1; }
  [[nodiscard]] std::size_t round_bytes() const override { return kLeastStreamBytes; }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t /*round*/, const Buffers& /*local*/,
                         const Processes& processes) const override {
    const bool streams = processes.copies.leave != nullptr;
    if (phase == 0) {
      ways_ += streams ? 's' : 'p';
    }
    SleepMs(streams == (members_.mine() == 0) ? 2 : 0);
    return true;
  }

 private:
  std::string& ways_;  // of its process
  const Membership& members_;
};

void CallsTryTheirWays(Context& context) {
  Host host(2, {.num_lanes = 4, .window_bytes = 65536});
  std::string ways[2];
  const SharedSite site(host, 80, OneGroup(2), {0, 1}, [&] {
    return std::make_unique<RoutedWork>([&](const Membership& members) {
      return std::make_unique<TriedRoute>(ways[members.mine()], members);
    });
  });
  const std::int64_t run = FreshRuns();
  RunRanks(context, 2, [&](std::size_t rank) -> Program {
    for (int call = 0; call < 30; ++call) {
      const double operand = 0;
      double result = 0;
      const void* const from = &operand;
      void* const to = &result;
      const CallResult ended = co_await site.Begin(rank, run, {&from, 1}, {&to, 1});
      Check(ended.ok, ended.error);
    }
  });
  const std::string tried = std::string(14, 'p') + std::string(6, 's');
  context.Expect(ways[0] == tried + std::string(10, 'p'), "the first one keeps to plain copies");
  context.Expect(ways[1] == tried + std::string(10, 's'), "the second one does not");
}

/// So often that they try all ways to copy into their windows, and choose one.
void ManyCallsInTurn(Context& context) {
  constexpr std::size_t kTurns = 32;
  for (const Layout& layout : LayoutsOfLarge()) {
    Host host(layout.num_processes, {.num_lanes = 4, .window_bytes = 65536});
    const std::size_t p = layout.process_of.size();
    CheckInTurn(context, host, layout, AllReduceOp({{DType::kF32, 10'000}}),
                AllGatherOp(1, p, 30'000), kTurns);
    CheckInTurn(context, host, layout, ReduceScatterOp(DType::kF32, 1, p, 5000),
                BroadcastOp(p, 0, 50'000), kTurns);
  }
}

void Reductions(Context& context) { CheckOps(context, /*reduces=*/true); }
void Copies(Context& context) { CheckOps(context, /*reduces=*/false); }

/// A process knows its own members, wherever they stand among all, and no others.
void MembersAreThoseOfTheProcess(Context& context) {
  const Groups groups = {{0, 3}, {7, 2}};
  Host host(4, {.num_lanes = 3, .window_bytes = 4096});
  const SharedSite site(host, 1, groups, {0, 3, 1, 1, 3, 3, 3, 2}, [] {
    return std::make_unique<AllReduceWork>(
        std::vector<ReducedLeaf>{{DType::kF32, 1, GetReduce(DType::kF32, ReduceOp::kSum)}});
  });
  const std::vector<std::set<std::int64_t>> members = {{0}, {2, 3}, {7}, {}};
  for (std::size_t process = 0; process < members.size(); ++process) {
    CallSite& here = site.in_process(process);
    const std::set<std::int64_t>& mine = members[process];
    context.Expect(here.only_member() == (mine.size() == 1 ? *mine.begin() : -1), "the only one");
    std::set<Meeting*> meetings;
    for (const std::int64_t id : {-1, 0, 1, 2, 3, 4, 6, 7, 8, 1000}) {
      Meeting* const meeting = here.Begin(id, 0, 0).meeting;
      here.Prefetch(id);
      context.Expect((meeting != nullptr) == (mine.count(id) > 0),
                     std::to_string(id) + " in process " + std::to_string(process));
      context.Expect(meeting == nullptr || meetings.insert(meeting).second, "in its own group");
    }
  }
}

void GroupsHaveOneMembership(Context& context) {
  std::shared_ptr<const Membership> first = MembershipOf({4, 5, 4}, 5);
  const std::weak_ptr<const Membership> kept = first;
  context.Expect(MembershipOf({4, 5, 4}, 5) == first, "one for all that ask");
  context.Expect(MembershipOf({4, 5, 4}, 4) != first, "but not of another process");
  context.Expect(MembershipOf({4, 5, 5}, 5) != first, "nor for other ranks");
  first = nullptr;
  context.Expect(kept.expired() && MembershipOf({4, 5, 4}, 5)->mine() == 1, "and again later");
}

const Suite suite("exchange", {{"EveryStepHasItsTurn", EveryStepHasItsTurn},
                               {"MembersAreThoseOfTheProcess", MembersAreThoseOfTheProcess},
                               {"GroupsHaveOneMembership", GroupsHaveOneMembership},
                               {"LanesGoRoundByWhatIsHeard", LanesGoRoundByWhatIsHeard},
                               {"NoStepReadsOrWritesTooEarly", NoStepReadsOrWritesTooEarly},
                               {"CallsGoRoundTheirWindow", CallsGoRoundTheirWindow},
                               {"ARingHasNoRoot", ARingHasNoRoot},
                               {"Reductions", Reductions},
                               {"Copies", Copies},
                               {"CopiesReadInPlace", CopiesReadInPlace},
                               {"ReductionsReadInPlace", ReductionsReadInPlace},
                               {"BuffersStayUntilOthersHaveRead", BuffersStayUntilOthersHaveRead},
                               {"SumsReadWhatIsFaster", SumsReadWhatIsFaster},
                               {"CallsTryTheirWays", CallsTryTheirWays},
                               {"ManyCallsInTurn", ManyCallsInTurn},
                               {"ReadsFromOneMebibyteOn", ReadsFromOneMebibyteOn},
                               {"ReadsWhatIsFaster", ReadsWhatIsFaster}});

}  // namespace
}  // namespace jaxcoll::testing::exchange_test

// tests/cpp/open_calls_test.cc: calls across processes beside each other: groups, clones, lanes,
// waits, and calls that one process takes long for.
#include <algorithm>  // std::sort
#include <cstddef>    // std::byte, std::size_t
#include <cstdint>    // std::int64_t, std::uint64_t
#include <cstring>    // std::memcpy
#include <memory>     // std::make_unique, std::unique_ptr
#include <string>     // std::string, std::to_string
#include <utility>    // std::pair
#include <vector>     // std::vector

#include "core/clock.h"
#include "host/route.h"
#include "host/work.h"
#include "ops.h"
#include "processes.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::open_calls_test {
namespace {

// ---- Many calls -------------------------------------------------------------------------------

/// Calls by all ranks of 3 processes over several partitions into groups, one after the other.
void GroupsOfAMesh(Context& context) {
  const Places process_of{0, 0, 0, 1, 1, 1, 2, 2, 2};
  const std::vector<Groups> partitions{
      {{0, 3, 6}, {1, 4, 7}, {2, 5, 8}},  // one rank of each process
      {{0, 1, 2}, {3, 4, 5}, {6, 7, 8}},  // inside each process
      {{0, 2, 1}, {8, 3, 4}, {7, 6, 5}},  // both, in no order
      {{0, 1, 2, 3, 4, 5, 6, 7, 8}},
  };
  Host host(3, {.num_lanes = 6, .window_bytes = 8192});
  constexpr std::size_t kTurns = 20;
  std::vector<std::unique_ptr<SharedSite>> sites;
  // By turn, partition and group.
  std::vector<std::vector<std::vector<std::unique_ptr<CallData>>>> data(kTurns);
  std::vector<std::vector<std::pair<std::size_t, std::size_t>>> at(partitions.size());
  const Op op = AllReduceOp({{DType::kI32, 1500}});
  for (std::size_t i = 0; i < partitions.size(); ++i) {
    sites.push_back(std::make_unique<SharedSite>(host, 50 + i, partitions[i], process_of, op.make));
    at[i].resize(process_of.size());
    for (std::size_t g = 0; g < partitions[i].size(); ++g) {
      for (std::size_t r = 0; r < partitions[i][g].size(); ++r) {
        at[i][static_cast<std::size_t>(partitions[i][g][r])] = {g, r};
      }
    }
    for (std::size_t turn = 0; turn < kTurns; ++turn) {
      data[turn].resize(partitions.size());
      for (std::size_t g = 0; g < partitions[i].size(); ++g) {
        data[turn][i].push_back(
            std::make_unique<CallData>(op, partitions[i][g].size(), turn * 100 + i * 10 + g));
      }
    }
  }
  const std::int64_t run = FreshRuns();
  RunRanks(context, process_of.size(), [&](std::size_t id) -> Program {
    for (std::size_t turn = 0; turn < kTurns; ++turn) {
      for (std::size_t i = 0; i < sites.size(); ++i) {
        const auto [group, rank] = at[i][id];
        const CallData& mine = *data[turn][i][group];
        const CallResult result =
            co_await sites[i]->Begin(id, run, mine.operands(rank), mine.results(rank));
        Check(result.ok, result.error);
        Check(mine.Problem(rank).empty(), [&] { return mine.Problem(rank); });
      }
    }
  });
}

/// XLA may clone a call: two sites with one id, which all processes call in the same order.
void ClonesShareTheirCount(Context& context) {
  Host host(2, {.num_lanes = 3, .window_bytes = 4096});
  const Places process_of{0, 1, 1};
  const Op op = AllReduceOp({{DType::kI32, 700}});
  const SharedSite one(host, 70, OneGroup(3), process_of, op.make);
  const SharedSite clone(host, 70, OneGroup(3), process_of, op.make);
  std::vector<std::unique_ptr<CallData>> data;
  for (std::size_t i = 0; i < 120; ++i) {
    data.push_back(std::make_unique<CallData>(op, 3, i));
  }
  const std::int64_t run = FreshRuns();
  RunRanks(context, 3, [&](std::size_t rank) -> Program {
    for (std::size_t i = 0; i < data.size(); ++i) {
      const SharedSite& site = i % 5 < 2 ? one : clone;
      const CallResult result = co_await site.Begin(rank, run, *data[i]);
      Check(result.ok, result.error);
      Check(data[i]->Problem(rank).empty(), [&] { return data[i]->Problem(rank); });
    }
  });
}

/// A process that sleeps looks by itself, too, but not often: the median of some times.
void SleepersAreWoken(Context& context) {
  Host host(2);
  const Op op = AllReduceOp({{DType::kI32, 10}});
  const SharedSite site(host, 75, OneGroup(2), {0, 1}, op.make);
  const CallData data(op, 2, 1);
  const std::int64_t run = FreshRuns();
  std::vector<std::int64_t> times_ns;
  for (std::int64_t i = 0; i < 11; ++i) {
    std::int64_t came_ns = 0;
    const auto waits = [&]() -> Program {
      const CallResult result = co_await site.Begin(0, run + i, data);
      Check(result.ok, result.error);
      times_ns.push_back(NowNs() - came_ns);
    };
    const auto comes = [&]() -> Program { co_await site.Begin(1, run + i, data); };
    RunThreads(context, 1, [&](std::size_t) {
      waits().Start();
      SleepMs(5);
      came_ns = NowNs();
      comes().Start();
    });
  }
  std::sort(times_ns.begin(), times_ns.end());
  context.Expect(times_ns[5] < 20'000'000, std::to_string(times_ns[5] / 1000) + " us");
}

/// Begins a call and does not wait for it.
Program One(const SharedSite& site, std::size_t rank, std::int64_t run, const CallData& data) {
  const CallResult result = co_await site.Begin(rank, run, data);
  Check(result.ok, result.error);
  Check(data.Problem(rank).empty(), [&] { return data.Problem(rank); });
}

/// Calls that don't depend on each other, begun in the same order everywhere, each of several
/// rounds.
void MoreOpenCallsThanLanes(Context& context) {
  for (const std::size_t num_lanes : Sizes{1, 2, 3, 8}) {
    Host host(2, {.num_lanes = num_lanes, .window_bytes = 4096});
    const Op op = AllReduceOp({{DType::kI32, 5000}});
    std::vector<std::unique_ptr<SharedSite>> sites;
    std::vector<std::unique_ptr<CallData>> data;
    for (std::size_t i = 0; i < 12; ++i) {
      sites.push_back(
          std::make_unique<SharedSite>(host, 80 + i, OneGroup(2), Places{0, 1}, op.make));
      data.push_back(std::make_unique<CallData>(op, 2, i));
    }
    const std::int64_t run = FreshRuns();
    RunThreads(context, 2, [&](std::size_t rank) {
      for (std::size_t i = 0; i < sites.size(); ++i) {
        if (rank == 1 && i == 0) {
          SleepMs(20);  // all of the other's calls are open by then
        }
        One(*sites[i], rank, run, *data[i]).Start();
      }
    });
  }
}

constexpr std::size_t kCalls = 40;

/// In the opposite order, where there are lanes for all: and threads, although each open call has
/// one wait for it.
void OpenCallsInAnyOrder(Context& context) {
  Host host(2, {.num_lanes = kCalls + 1, .window_bytes = 4096});
  const Op op = AllReduceOp({{DType::kI32, 5000}});
  std::vector<std::unique_ptr<SharedSite>> sites;
  std::vector<std::unique_ptr<CallData>> data;
  for (std::size_t i = 0; i <= kCalls; ++i) {
    sites.push_back(
        std::make_unique<SharedSite>(host, 120 + i, OneGroup(2), Places{0, 1}, op.make));
    data.push_back(std::make_unique<CallData>(op, 2, i));
  }
  const std::int64_t run = FreshRuns();
  // The others come once the last is over, which the first rank has begun behind them.
  const auto last_first = [&]() -> Program {
    const CallResult result = co_await sites[kCalls]->Begin(1, run, *data[kCalls]);
    Check(result.ok, result.error);
    for (std::size_t i = kCalls; i > 0; --i) {
      One(*sites[i - 1], 1, run, *data[i - 1]).Start();
    }
  };
  RunThreads(context, 2, [&](std::size_t rank) {
    if (rank == 1) {
      SleepMs(20);
      last_first().Start();
      return;
    }
    for (std::size_t i = 0; i <= kCalls; ++i) {
      One(*sites[i], 0, run, *data[i]).Start();
    }
  });
}

// ---- Slow steps -------------------------------------------------------------------------------

/// Leaves the call's number in each round, and reads it slowly in process 1.
struct SlowSteps {
  std::size_t num_rounds = 1;
  std::int64_t (*read_ms)(std::uint64_t call) = nullptr;
};

class SlowRoute final : public Route {
 public:
  SlowRoute(const SlowSteps& slow, const Membership& members) : slow_(slow), members_(members) {}
  [[nodiscard]] std::size_t num_phases() const override { return 2; }
  [[nodiscard]] std::size_t num_rounds() const override { return slow_.num_rounds; }
  [[nodiscard]] bool Run(std::size_t phase, std::size_t round, const Buffers& local,
                         const Processes& processes) const override {
    std::uint64_t call = 0;
    std::memcpy(&call, local.operands[0], sizeof(call));
    const std::size_t at = RoundBegin(round, sizeof(call));
    if (phase == 0) {
      std::memcpy(processes.windows[members_.mine()] + at, &call, sizeof(call));
      return true;
    }
    for (int i = 0; i < 2; ++i) {
      for (std::size_t process = 0; process < members_.num_processes(); ++process) {
        std::uint64_t seen = 0;
        std::memcpy(&seen, processes.windows[process] + at, sizeof(seen));
        Check(seen == call, [&] {
          return "call " + std::to_string(call) + " reads what call " + std::to_string(seen) +
                 " left";
        });
      }
      SleepMs(members_.mine() == 1 && round == 0 ? slow_.read_ms(call) : 0);
    }
    std::memcpy(local.results[0], &call, sizeof(call));
    return true;
  }

 private:
  const SlowSteps slow_;
  const Membership& members_;
};

std::unique_ptr<const Work> SlowWork(const SlowSteps& slow) {
  return std::make_unique<RoutedWork>(
      [slow](const Membership& members) { return std::make_unique<SlowRoute>(slow, members); });
}

/// A rank's calls of SlowWork, in turn at the sites.
Program CallInTurn(std::vector<const SharedSite*> sites, std::size_t rank, std::int64_t run,
                   std::uint64_t num_calls) {
  for (std::uint64_t call = 1; call <= num_calls; ++call) {
    std::uint64_t result = 0;
    const void* const operand = &call;
    void* const target = &result;
    const CallResult ended =
        co_await sites[call % sites.size()]->Begin(rank, run, {&operand, 1}, {&target, 1});
    Check(ended.ok && result == call, [&] { return "call: " + ended.error; });
  }
}

/// A call is over for a process that has read, though others still read what it left.
void NobodyOverwritesWhatOthersRead(Context& context) {
  for (const std::size_t num_lanes : Sizes{1, 2, 6}) {
    Host host(3, {.num_lanes = num_lanes, .window_bytes = 4096});
    const auto make = [] {
      const auto read_ms = [](std::uint64_t call) -> std::int64_t { return call % 3 == 0 ? 2 : 0; };
      return SlowWork(SlowSteps{.num_rounds = 1, .read_ms = read_ms});
    };
    const SharedSite one(host, 241, OneGroup(3), {0, 1, 2}, make);
    const SharedSite other(host, 242, OneGroup(3), {0, 1, 2}, make);
    const std::int64_t run = FreshRuns();
    RunRanks(context, 3,
             [&](std::size_t rank) { return CallInTurn({&one, &other}, rank, run, 40); });
  }
}

/// Not even where one has waited before it takes so long, and the others wait for it.
void ASlowStepIsNoMismatch(Context& context) {
  Host host(2);
  const SharedSite site(host, 243, OneGroup(2), {0, 1}, [] {
    const auto read_ms = [](std::uint64_t) -> std::int64_t { return 650; };
    return SlowWork(SlowSteps{.num_rounds = 3, .read_ms = read_ms});
  });
  const std::int64_t run = FreshRuns();
  RunThreads(context, 2, [&](std::size_t rank) {
    SleepMs(rank == 0 ? 300 : 0);
    CallInTurn({&site}, rank, run, 1).Start();
  });
}

// The first one counts on few runners.
const Suite suite("open_calls", {{"OpenCallsInAnyOrder", OpenCallsInAnyOrder},
                                 {"MoreOpenCallsThanLanes", MoreOpenCallsThanLanes},
                                 {"GroupsOfAMesh", GroupsOfAMesh},
                                 {"ClonesShareTheirCount", ClonesShareTheirCount},
                                 {"SleepersAreWoken", SleepersAreWoken},
                                 {"NobodyOverwritesWhatOthersRead", NobodyOverwritesWhatOthersRead},
                                 {"ASlowStepIsNoMismatch", ASlowStepIsNoMismatch}});

}  // namespace
}  // namespace jaxcoll::testing::open_calls_test

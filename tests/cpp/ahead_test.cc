// tests/cpp/ahead_test.cc: calls across processes that one process ends before others have come.
#include <algorithm>  // std::sort
#include <atomic>     // std::atomic
#include <cstddef>    // std::size_t
#include <cstdint>    // SIZE_MAX, std::int64_t, std::uint64_t
#include <memory>     // std::make_unique, std::unique_ptr
#include <string>     // std::string, std::to_string
#include <vector>     // std::vector

#include "core/clock.h"
#include "host/job.h"
#include "host/stalemate.h"
#include "host/watchdog.h"
#include "ops.h"
#include "processes.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::ahead_test {
namespace {

constexpr std::int64_t kMs = 1'000'000;

/// One rank's calls, one after the other: `first` and the rest, or so many.
Program InTurn(const SharedSite& site, std::size_t rank, std::int64_t run,
               const std::vector<std::unique_ptr<CallData>>& calls,
               std::atomic<std::size_t>& num_ended, std::size_t first = 0,
               std::size_t count = SIZE_MAX) {
  for (std::size_t i = first; i < calls.size() && i - first < count; ++i) {
    CallData& data = *calls[i];
    const CallResult result = co_await site.Begin(rank, run, data);
    Check(result.ok, result.error);
    Check(data.Problem(rank).empty(), [&] { return data.Problem(rank); });
    num_ended.fetch_add(1);
  }
}

std::vector<std::unique_ptr<CallData>> Calls(const Op& op, std::size_t num_ranks,
                                             std::size_t count) {
  std::vector<std::unique_ptr<CallData>> calls;
  for (std::size_t i = 0; i < count; ++i) {
    calls.push_back(std::make_unique<CallData>(op, num_ranks, 10 + i));
  }
  return calls;
}

void ARootGoesAFewCallsAhead(Context& context) {
  for (const std::size_t bytes : Sizes{0, 100, 1000, 3500}) {  // of none, one and four rounds
    Host host(3, {.num_lanes = 4, .window_bytes = 4096});      // two to go ahead with
    const Op op = BroadcastOp(3, 1, bytes);
    const SharedSite site(host, 301, OneGroup(3), {0, 1, 2}, op.make);
    const auto calls = Calls(op, 3, 7);
    const std::int64_t run = FreshRuns();
    std::atomic<std::size_t> num_ended{0};
    RunThreads(context, 2, [&](std::size_t i) {
      if (i == 0) {
        InTurn(site, 1, run, calls, num_ended).Start();
        return;
      }
      SleepMs(50);
      Check(num_ended == 2, [&] { return std::to_string(num_ended.load()) + " have ended"; });
      InTurn(site, 2, run, calls, num_ended).Start();
      SleepMs(50);
      Check(num_ended == 2 + 3, [&] { return std::to_string(num_ended.load()) + " have ended"; });
      InTurn(site, 0, run, calls, num_ended).Start();
    });
    context.Expect(num_ended == 21, "all end");
  }
}

/// Lanes are memory that calls go round, and so few of them stay in a cache.
void LanesThatWentAheadAreLeftAgain(Context& context) {
  constexpr std::size_t kNumLanes = 32;
  Host host(2, {.num_lanes = kNumLanes, .window_bytes = 4096});
  const std::size_t seat = host.job(0).session()->seat();
  const Op ahead = BroadcastOp(2, 0, 100);
  const Op together = AllGatherOp(1, 2, 100);
  const SharedSite ahead_site(host, 303, OneGroup(2), {0, 1}, ahead.make);
  const SharedSite together_site(host, 304, OneGroup(2), {0, 1}, together.make);
  const auto calls = Calls(ahead, 2, 12);
  const auto others = Calls(together, 2, 100);
  const std::int64_t run = FreshRuns();
  const auto make = [&](std::size_t rank, const SharedSite& site, const auto& made,
                        std::size_t first, std::size_t end) -> Program {
    for (std::size_t i = first; i < end; ++i) {
      const CallResult result = co_await site.Begin(rank, run, *made[i]);
      Check(result.ok, result.error);
      Check(made[i]->Problem(rank).empty(), [&] { return made[i]->Problem(rank); });
    }
  };
  const auto run_both = [&](const SharedSite& site, const auto& made, std::size_t first,
                            std::size_t end, int late_ms) {
    RunRanks(context, 2, [&](std::size_t rank) {
      SleepMs(rank == 0 ? 0 : late_ms);
      return make(rank, site, made, first, end);
    });
  };
  run_both(ahead_site, calls, 0, calls.size(), 100);  // the root has left its calls by then
  run_both(together_site, others, 0, 50, 0);
  context.Expect(host.segment().seat(seat).num_used_lanes > 8, "a root has many lanes");
  const auto words = [&] {
    std::vector<std::uint64_t> all;
    for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
      all.push_back(host.segment().lane(seat, lane).word);
    }
    return all;
  };
  const std::vector<std::uint64_t> before = words();
  run_both(together_site, others, 50, others.size(), 0);
  const std::vector<std::uint64_t> after = words();
  std::size_t num_lanes = 0;
  for (std::size_t lane = 0; lane < kNumLanes; ++lane) {
    num_lanes += after[lane] != before[lane] ? 1 : 0;
  }
  context.Expect(num_lanes <= 6, [&] { return std::to_string(num_lanes) + " lanes"; });
}

/// A process that sleeps looks by itself, too, but not often: the median of some times.
void ARootIsWoken(Context& context) {
  Host host(2, {.num_lanes = 1, .window_bytes = 4096});  // none to go ahead with
  const Op op = BroadcastOp(2, 0, 100);
  const SharedSite site(host, 307, OneGroup(2), {0, 1}, op.make);
  const auto calls = Calls(op, 2, 1);
  std::vector<std::int64_t> times_ns;
  std::atomic<std::size_t> num_ended{0};
  const auto root = [&](std::int64_t run, const std::int64_t& came_ns) -> Program {
    const CallResult result = co_await site.Begin(0, run, *calls[0]);
    Check(result.ok, result.error);
    times_ns.push_back(NowNs() - came_ns);
  };
  for (std::int64_t i = 0; i < 11; ++i) {
    const std::int64_t run = FreshRuns();
    std::int64_t came_ns = 0;
    RunThreads(context, 1, [&](std::size_t) {
      root(run, came_ns).Start();
      SleepMs(5);
      came_ns = NowNs();
      InTurn(site, 1, run, calls, num_ended).Start();
    });
  }
  std::sort(times_ns.begin(), times_ns.end());
  context.Expect(times_ns[5] < 20'000'000, std::to_string(times_ns[5] / 1000) + " us");
}

/// Not for the last call that it has left: the first one's end makes room.
void ARootWaitsForTheOldestCall(Context& context) {
  Host host(2, {.num_lanes = 4, .window_bytes = 4096});  // two to go ahead with
  const Op op = BroadcastOp(2, 0, 100);
  const SharedSite site(host, 309, OneGroup(2), {0, 1}, op.make);
  const auto calls = Calls(op, 2, 3);
  std::vector<std::int64_t> times_ns;
  std::atomic<std::size_t> num_ended{0}, num_roots{0};
  const auto root = [&](std::int64_t run, const std::int64_t& came_ns) -> Program {
    for (const auto& data : calls) {
      const CallResult result = co_await site.Begin(0, run, *data);
      Check(result.ok, result.error);
    }
    times_ns.push_back(NowNs() - came_ns);
    num_roots.fetch_add(1);
  };
  for (std::size_t i = 0; i < 11; ++i) {
    const std::int64_t run = FreshRuns();
    std::int64_t came_ns = 0;
    RunThreads(context, 1, [&](std::size_t) {
      root(run, came_ns).Start();
      SleepMs(5);
      Check(num_roots == i, "it has to wait");
      came_ns = NowNs();
      InTurn(site, 1, run, calls, num_ended, 0, 1).Start();
      for (int waited_ms = 0; num_roots == i && waited_ms < 5'000; ++waited_ms) {
        SleepMs(1);
      }
      Check(num_roots == i + 1, "one call makes room");
      InTurn(site, 1, run, calls, num_ended, 1).Start();
    });
  }
  std::sort(times_ns.begin(), times_ns.end());
  context.Expect(times_ns[5] < 20'000'000, std::to_string(times_ns[5] / 1000) + " us");
}

/// In a ring, each waits for the one before it alone.
void NobodyWaitsForThoseItGetsNothingFrom(Context& context) {
  Host host(3, {.num_lanes = 8, .window_bytes = 4096});
  const Op op = PermuteOp({2, 0, 1}, 100);
  const SharedSite site(host, 302, OneGroup(3), {0, 1, 2}, op.make);
  const auto calls = Calls(op, 3, 1);
  const std::int64_t run = FreshRuns();
  std::atomic<std::size_t> first{0}, second{0}, third{0};
  RunThreads(context, 1, [&](std::size_t) {
    InTurn(site, 0, run, calls, first).Start();
    InTurn(site, 1, run, calls, second).Start();
    SleepMs(50);
    Check(first == 0 && second == 1, "the third sends to the first");
    InTurn(site, 2, run, calls, third).Start();
  });
  context.Expect(first == 1 && third == 1, "all end");
}

/// What is read where it lies is the caller's own memory.
void ABufferThatOthersReadStays(Context& context) {
  Host host(2, {.num_lanes = 8, .window_bytes = 4096, .can_read_peers = true});
  const Op op = BroadcastOp(2, 0, 1'060'001);
  const SharedSite site(host, 308, OneGroup(2), {0, 1}, op.make);
  const auto calls = Calls(op, 2, 1);
  const std::int64_t run = FreshRuns();
  std::atomic<std::size_t> num_ended{0};
  RunThreads(context, 1, [&](std::size_t) {
    InTurn(site, 0, run, calls, num_ended).Start();
    SleepMs(20);
    Check(num_ended == 0, "the root waits");
    InTurn(site, 1, run, calls, num_ended).Start();
  });
  context.Expect(num_ended == 2, "all end");
}

/// What a program leaves behind keeps no lanes from another one, to whose call others come first.
void OtherCallsHaveLanes(Context& context) {
  Host host(2, {.num_lanes = 4, .window_bytes = 4096});
  const Op send = BroadcastOp(2, 0, 100);
  const Op sum = AllReduceOp({{DType::kI32, 10}});
  const SharedSite sends(host, 303, OneGroup(2), {0, 1}, send.make);
  const SharedSite sums(host, 304, OneGroup(2), {0, 1}, sum.make);
  const auto sent = Calls(send, 2, 6);
  const auto summed = Calls(sum, 2, 1);
  const std::int64_t run = FreshRuns();
  std::atomic<std::size_t> num_ended{0};
  const auto second = [&]() -> Program {
    const CallResult result = co_await sums.Begin(1, run, *summed[0]);
    Check(result.ok, result.error);
    InTurn(sends, 1, run, sent, num_ended).Start();
  };
  RunThreads(context, 1, [&](std::size_t) {
    InTurn(sends, 0, run, sent, num_ended).Start();
    SleepMs(20);
    InTurn(sums, 0, run, summed, num_ended).Start();
    second().Start();
  });
  context.Expect(num_ended == 13, "all end");
}

/// A call that one has ended, and another one waits in a different call, as its next.
void ADifferentCallIsNamedOnAll(Context& context) {
  Watchdog::Get().SetTimeout(-1);
  DescribeSite(305, "the call that is over for one");
  DescribeSite(306, "the call of the other");
  Host host(2);
  const Op send = BroadcastOp(2, 0, 100);
  const Op sum = AllReduceOp({{DType::kI32, 10}});
  const SharedSite sends(host, 305, OneGroup(2), {0, 1}, send.make);
  const SharedSite sums(host, 306, OneGroup(2), {0, 1}, sum.make);
  const CallData sent(send, 2, 1);
  const CallData summed(sum, 2, 1);
  const std::int64_t run = FreshRuns();
  std::vector<std::string> errors(2);
  const std::int64_t start_ns = NowNs();
  const auto first = [&]() -> Program {
    const CallResult result = co_await sends.Begin(0, run, sent);
    Check(result.ok, "it is over: " + result.error);
  };
  const auto second = [&]() -> Program {
    CallResult result = co_await sums.Begin(1, run, summed);
    Check(!result.ok, "nobody else comes");
    errors[1] = result.error;
  };
  const auto next = [&]() -> Program {
    CallResult result = co_await sends.Begin(0, run + 1, sent);
    Check(!result.ok, "the job has failed");
    errors[0] = result.error;
  };
  RunThreads(context, 2, [&](std::size_t rank) { rank == 0 ? first().Start() : second().Start(); });
  const std::int64_t took_ns = NowNs() - start_ns;
  RunThreads(context, 1, [&](std::size_t) { next().Start(); });
  context.Expect(took_ns < 2000 * kMs, std::to_string(took_ns / kMs) + " ms");
  context.Expect(errors[0] == errors[1], errors[0]);
  context.Expect(
      errors[1].find(
          "process 40 has ended, before others came to it, the call that is over for one") !=
              std::string::npos &&
          errors[1].find("process 41 waits in the call of the other") != std::string::npos,
      errors[1]);
  Watchdog::Get().SetTimeout(300'000 * kMs);
}

constexpr std::uint64_t kPlace = std::uint64_t{1} << 39;  // see CallName::place

/// What the process finds that others have left instead of what it has: looks for `limit_ms`.
std::string DifferentLeft(const Host& host, std::size_t process, std::int64_t limit_ms) {
  const std::shared_ptr<Session> session = host.job(process).session();
  const std::int64_t until_ns = NowNs() + limit_ms * kMs;
  while (NowNs() < until_ns) {
    for (const std::uint64_t group : session->GroupsLeft()) {
      if (Stalemate found = FindDifferentLeft(*session, group, NowNs(), 20 * kMs);
          !found.text.empty()) {
        return found.text;
      }
    }
    SleepMs(5);
  }
  return "";
}

/// Two roots, in call sites of these ids: each ends its own call, and the other's never comes.
std::string LeftByTwoRoots(Context& context, std::uint64_t first, std::uint64_t second,
                           std::int64_t limit_ms) {
  DescribeSite(first, "the call from 0");
  DescribeSite(second, "the call from 1");
  Host host(2);
  const Op from_zero = BroadcastOp(2, 0, 100);
  const Op from_one = BroadcastOp(2, 1, 100);
  const SharedSite zeros(host, first, OneGroup(2), {0, 1}, from_zero.make);
  const SharedSite ones(host, second, OneGroup(2), {0, 1}, from_one.make);
  const auto zero_data = Calls(from_zero, 2, 1);
  const auto one_data = Calls(from_one, 2, 1);
  const std::int64_t run = FreshRuns();
  std::atomic<std::size_t> num_ended{0};
  Watchdog::Get().SetTimeout(1000 * kMs);  // it looks often
  RunThreads(context, 1, [&](std::size_t) {
    InTurn(zeros, 0, run, zero_data, num_ended).Start();
    InTurn(ones, 1, run, one_data, num_ended).Start();
  });
  context.Expect(num_ended == 2, "both end");
  std::string found = DifferentLeft(host, 0, limit_ms);
  RunThreads(context, 1, [&](std::size_t) {
    InTurn(ones, 0, run, one_data, num_ended).Start();
    InTurn(zeros, 1, run, zero_data, num_ended).Start();
  });
  context.Expect(num_ended == 4, "each takes the other's, where that comes");
  Watchdog::Get().SetTimeout(300'000 * kMs);
  return found;
}

void DifferentRootsAreFound(Context& context) {
  const std::string found = LeftByTwoRoots(context, kPlace | 1, kPlace | 2, 5'000);
  for (const char* each : {"process 40 has ended, before others came to it, the call from 0",
                           "process 41 has ended, before others came to it, the call from 1"}) {
    context.Expect(found.find(each) != std::string::npos, found);
  }
}

void RootsInOtherPlacesMayMeet(Context& context) {
  const std::string found = LeftByTwoRoots(context, 2 * kPlace | 1, 3 * kPlace | 2, 500);
  context.Expect(found.empty(), found);
}

/// Each executes another time of one call, and its earlier ones are in no lane any more.
void AChainIsNoDifference(Context& context) {
  Host host(3, {.num_lanes = 16, .window_bytes = 4096});
  const Op op = PermuteOp({PermuteWork::kNone, 0, 1}, 100);
  const SharedSite site(host, 4 * kPlace | 1, OneGroup(3), {0, 1, 2}, op.make);
  const auto first = Calls(op, 3, 1);
  const auto more = Calls(op, 3, 2);
  std::atomic<std::size_t> num_ended{0};
  const std::int64_t run = FreshRuns();
  Watchdog::Get().SetTimeout(1000 * kMs);
  RunThreads(context, 1, [&](std::size_t) {
    InTurn(site, 0, run, first, num_ended).Start();
    InTurn(site, 1, run, first, num_ended).Start();
    InTurn(site, 0, run, more, num_ended).Start();
  });
  context.Expect(num_ended == 4, "all of these end");
  for (const std::size_t process : {0, 1}) {
    const std::string found = DifferentLeft(host, process, 300);
    context.Expect(found.empty(), found);
  }
  Watchdog::Get().SetTimeout(300'000 * kMs);
}

/// The owners send in turn; who has got a part has no lane of it any more.
void OwnersInTurnAreNoDifference(Context& context) {
  Host host(3, {.num_lanes = 8, .window_bytes = 4096});
  const Op from_one = BroadcastOp(3, 1, 100);
  const Op from_zero = BroadcastOp(3, 0, 100);
  const SharedSite ones(host, 5 * kPlace | 1, OneGroup(3), {0, 1, 2}, from_one.make);
  const SharedSite zeros(host, 5 * kPlace | 2, OneGroup(3), {0, 1, 2}, from_zero.make);
  const auto one_data = Calls(from_one, 3, 1);
  const auto zero_data = Calls(from_zero, 3, 1);
  std::atomic<std::size_t> num_ended{0};
  const std::int64_t run = FreshRuns();
  Watchdog::Get().SetTimeout(1000 * kMs);
  RunThreads(context, 1, [&](std::size_t) {
    InTurn(ones, 1, run, one_data, num_ended).Start();
    InTurn(ones, 0, run, one_data, num_ended).Start();
    InTurn(zeros, 0, run, zero_data, num_ended).Start();
  });
  context.Expect(num_ended == 3, "all of these end");
  for (const std::size_t process : {0, 1}) {
    const std::string found = DifferentLeft(host, process, 300);
    context.Expect(found.empty(), found);
  }
  Watchdog::Get().SetTimeout(300'000 * kMs);
}

const Suite suite("ahead",
                  {{"ARootGoesAFewCallsAhead", ARootGoesAFewCallsAhead},
                   {"NobodyWaitsForThoseItGetsNothingFrom", NobodyWaitsForThoseItGetsNothingFrom},
                   {"LanesThatWentAheadAreLeftAgain", LanesThatWentAheadAreLeftAgain},
                   {"ARootIsWoken", ARootIsWoken},
                   {"ARootWaitsForTheOldestCall", ARootWaitsForTheOldestCall},
                   {"ABufferThatOthersReadStays", ABufferThatOthersReadStays},
                   {"OtherCallsHaveLanes", OtherCallsHaveLanes},
                   {"ADifferentCallIsNamedOnAll", ADifferentCallIsNamedOnAll},
                   {"DifferentRootsAreFound", DifferentRootsAreFound},
                   {"RootsInOtherPlacesMayMeet", RootsInOtherPlacesMayMeet},
                   {"AChainIsNoDifference", AChainIsNoDifference},
                   {"OwnersInTurnAreNoDifference", OwnersInTurnAreNoDifference}});

}  // namespace
}  // namespace jaxcoll::testing::ahead_test

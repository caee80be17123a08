// tests/cpp/failing_test.cc: waits that end with an error, and those that must not.
#include <algorithm>   // std::min, std::sort
#include <atomic>      // std::atomic
#include <cstddef>     // std::size_t
#include <cstdint>     // std::int64_t
#include <functional>  // std::function
#include <memory>      // std::make_shared, std::make_unique
#include <string>      // std::string
#include <utility>     // std::move
#include <vector>      // std::vector

#include "core/clock.h"
#include "failures.h"
#include "host/call_site.h"
#include "host/runners.h"
#include "host/watchdog.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::failing_test {
namespace {

/// A StampWork that must not run.
std::unique_ptr<const Work> IdleWork() {
  auto work = std::make_unique<StampWork>();
  work->in_chunk = [](std::size_t) { Check(false, "data was moved for a call that failed"); };
  return work;
}

void ADeadlineNamesWhoCameAndWhoDidNot(Context& context) {
  const Limit limit(100 * kMs);
  DescribeSite(77, "all_reduce over \"data\" of f32[8], called at train.py:12");
  const Site site = MakeSite(77, OneGroup(4), IdleWork());
  const std::int64_t run = FreshRuns() - 1000'000;  // negative, as half of XLA's are
  Errors errors;
  const std::int64_t start_ns = NowNs();
  RunThreads(context, 2,
             [&](std::size_t i) { Fails(*site, 4, /*rank=*/i == 0 ? 0 : 3, run, errors).Start(); });
  const std::int64_t took_ns = NowNs() - start_ns;
  context.Expect(took_ns >= 100 * kMs, "not before the deadline");
  context.Expect(took_ns < 1000 * kMs, "soon after the deadline");
  context.Expect(errors.texts().size() == 2, "both ranks that came got the error");
  for (const std::string& text : errors.texts()) {
    context.Expect(text == errors.texts()[0], "all got the same text");
    Contains(context, text, "all_reduce over \"data\" of f32[8], called at train.py:12");
    Contains(context, text, "arrived: rank 0 (device 100), 3 (device 103)");
    Contains(context, text, "for rank 1");
    Contains(context, text, "(the limit is 0.1 s)");
    Contains(context, text, "run " + std::to_string(run));
    Contains(context, text, "execution 1 of this call");
  }
}

/// A rank that has not called yet has no device ordinal, but its number in the program is known.
void ARankThatNeverCameHasAName(Context& context) {
  const Limit limit(20 * kMs);
  const Site site = MakeSite(78, {{6, 4, 2, 0}}, IdleWork());
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) {
    [](CallSite& s, Errors& e) -> Program {
      Stamped stamped(4);
      CallResult result = co_await stamped.Begin(s, /*logical_id=*/4, /*rank=*/1, FreshRuns(), 0);
      e.Add(std::move(result.error));
    }(*site, errors)
                                      .Start();
  });
  Contains(context, errors.texts().at(0), "arrived: rank 1 (device 104)");
  Contains(context, errors.texts().at(0),
           "for rank 0 (partition 6), 2 (partition 2), 3 (partition 0)");
}

/// It has a device where it has been at another call of the run, and then all that is known of it.
void ARankIsKnownByAnotherCallOfItsRun(Context& context) {
  const Limit limit(100 * kMs);
  DescribeSite(79, "the call before");
  DescribeSite(80, "the call elsewhere");
  const Site before = MakeSite(79, OneGroup(3), std::make_unique<StampWork>());
  const Site elsewhere = MakeSite(80, {{1, 2}}, IdleWork());
  const Site site = MakeSite(81, OneGroup(2), IdleWork());
  const std::int64_t run = FreshRuns();
  RunRanks(context, 3, [&](std::size_t rank) { return Succeeds(*before, 3, rank, run); });
  Errors errors;
  const auto goes_elsewhere = [&]() -> Program {
    Stamped stamped(2);
    CallResult result = co_await stamped.Begin(*elsewhere, /*logical_id=*/1, /*rank=*/0, run, 0);
    errors.Add(std::move(result.error));
  };
  RunThreads(context, 1, [&](std::size_t) {
    Fails(*site, 2, 0, run, errors).Start();
    SleepMs(50);  // else its limit may be over first
    goes_elsewhere().Start();
  });
  const std::string& text = errors.texts().at(0);
  Contains(context, text, "for rank 1 (device 101) of 2");
  Contains(context, text, "\n  rank 1: waits, since 0.");
  Contains(context, text, " in the call elsewhere (call ");
  Contains(context, text, "; last call, ended 0.");
  Contains(context, text, "\n  device 102, for which device 101 waits: last call, ended 0.");
}

/// XLA's numbers of runs are any numbers.
void RunZeroHasADeadline(Context& context) {
  const Limit limit(100 * kMs);
  const Site site = MakeSite(1, OneGroup(2), IdleWork());
  Errors errors;
  const std::int64_t start_ns = NowNs();
  RunThreads(context, 1, [&](std::size_t) { Fails(*site, 2, 0, /*run=*/0, errors).Start(); });
  context.Expect(NowNs() - start_ns >= 100 * kMs, "not before the deadline");
  Contains(context, errors.texts().at(0), "for rank 1 (partition 1)");
}

void ALateRankGetsTheSameErrorAndTouchesNothing(Context& context) {
  const Limit limit(20 * kMs);
  const Site site = MakeSite(1, OneGroup(3), IdleWork());
  const std::int64_t run = FreshRuns();
  Errors errors;
  RunThreads(context, 2, [&](std::size_t rank) { Fails(*site, 3, rank, run, errors).Start(); });
  RunThreads(context, 1, [&](std::size_t) { Fails(*site, 3, /*rank=*/2, run, errors).Start(); });
  context.Expect(errors.texts().size() == 3, "every rank got an error");
  for (const std::string& text : errors.texts()) {
    context.Expect(text == errors.texts()[0], "the late rank got the same text: " + text);
  }
}

/// It may also begin before the watchdog has told the ranks that wait in the failed run.
void TheNextRunNeedNotWaitForALook(Context& context) {
  const Limit limit(kForever);
  const Site site = MakeSite(1, OneGroup(2), std::make_unique<StampWork>());
  for (int i = 0; i < 50; ++i) {
    const std::int64_t run = FreshRuns();
    const auto fails_and_goes_on = [&]() -> Program {
      Stamped stamped(2);
      const CallResult result = co_await stamped.Begin(*site, 0, 0, run, 0);
      Check(!result.ok && result.error == "failed elsewhere", "the run's cause: " + result.error);
      stamped.Verify(co_await stamped.Begin(*site, 0, 0, run + 1, 0));
    };
    RunThreads(context, 1, [&](std::size_t) {
      fails_and_goes_on().Start();
      Watchdog::Get().FailRun(run, std::make_shared<const Status>(Internal("failed elsewhere")));
      Succeeds(*site, 2, 1, run + 1).Start();
    });
  }
}

/// Also where the run's failure has been forgotten, because many others have failed since.
void ALateRankIsTurnedAwayByTheMeetingItself(Context& context) {
  const Limit limit(20 * kMs);
  const Site site = MakeSite(1, OneGroup(2), IdleWork());
  const std::int64_t run = FreshRuns();
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) { Fails(*site, 2, 0, run, errors).Start(); });
  while (Watchdog::Get().FailureOf(run) == nullptr) {
    SleepMs(1);  // the rank is told before the run is
  }
  const auto other = std::make_shared<const Status>(Internal("another run's failure"));
  const std::int64_t others = FreshRuns();
  for (std::int64_t i = 0; i < 600; ++i) {
    Watchdog::Get().FailRun(others + i, other);
  }
  RunThreads(context, 1, [&](std::size_t) { Fails(*site, 2, 1, run, errors).Start(); });
  context.Expect(errors.texts()[0] == errors.texts()[1], "the late rank got the same text");
}

/// The late rank of the failed one gets its error, and does not disturb the meeting's next call.
void TheNextRunMayBeginBeforeThat(Context& context) {
  // Often: a run must be known to have failed by the time that its first rank is told.
  for (int i = 0; i < 20; ++i) {
    const Limit limit(10 * kMs);
    const Site site = MakeSite(1, OneGroup(2), std::make_unique<StampWork>());
    const std::int64_t run = FreshRuns();
    Errors errors;
    RunThreads(context, 1, [&](std::size_t) { Fails(*site, 2, 0, run, errors).Start(); });
    Watchdog::Get().SetTimeout(kForever);
    RunThreads(context, 1, [&](std::size_t) {
      Succeeds(*site, 2, 0, run + 1).Start();
      Fails(*site, 2, 1, run, errors).Start();
      Succeeds(*site, 2, 1, run + 1).Start();
    });
    context.Expect(errors.texts()[0] == errors.texts()[1],
                   "the late rank got the same text: " + errors.texts()[1]);
  }
}

void AFailureEndsTheOtherMeetingsOfItsRunAtOnce(Context& context) {
  const Limit limit(kForever);
  const Site first = MakeSite(1, OneGroup(3), IdleWork());
  const Site second = MakeSite(2, {{0, 1}, {2, 3}}, IdleWork());
  const Site bystander = MakeSite(3, OneGroup(2), std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  Errors errors;
  std::atomic<int> waiting{0};
  const std::int64_t start_ns = NowNs();
  RunThreads(context, 3, [&](std::size_t i) {
    if (i == 0) {
      Fails(*first, 3, 0, run, errors).Start();
      Fails(*second, 2, 1, run, errors).Start();
      waiting.fetch_add(1);
    } else if (i == 1) {
      Succeeds(*bystander, 2, 0, run + 1).Start();  // another run, which must live
      waiting.fetch_add(1);
    } else {
      while (waiting.load() < 2) {
        SleepMs(1);
      }
      Watchdog::Get().FailRun(run, std::make_shared<const Status>(Internal("the first cause")));
      Watchdog::Get().FailRun(run, std::make_shared<const Status>(Internal("a later one")));
      Fails(*second, 2, 0, run, errors).Start();  // late, at a meeting that may still be open
      SleepMs(20);
      Succeeds(*bystander, 2, 1, run + 1).Start();
    }
  });
  context.Expect(NowNs() - start_ns < 2000 * kMs, "at once, though the limit is infinite");
  context.Expect(errors.texts().size() == 3, "all calls of the run failed");
  for (const std::string& text : errors.texts()) {
    context.Expect(text == "the first cause", "the first cause is the one shown, not: " + text);
  }
}

/// Even at a site where nobody waits, and where all ranks would come.
void CallsOfAFailedRunFailWithoutMeeting(Context& context) {
  const Limit limit(kForever);
  const Site site = MakeSite(1, OneGroup(2), IdleWork());
  const std::int64_t run = FreshRuns();
  Watchdog::Get().FailRun(run, std::make_shared<const Status>(Internal("failed elsewhere")));
  Errors errors;
  RunRanks(context, 2, [&](std::size_t rank) { return Fails(*site, 2, rank, run, errors); });
  context.Expect(errors.texts().size() == 2 && errors.texts()[0] == "failed elsewhere" &&
                     errors.texts()[1] == "failed elsewhere",
                 "both got the cause");
}

/// The deadline of one call is the cause that all others of the run show.
void ADeadlineIsTheCauseOfItsRun(Context& context) {
  const Limit limit(50 * kMs);
  DescribeSite(81, "the one that waited longest");
  DescribeSite(82, "the other one");
  const Site first = MakeSite(81, OneGroup(2), IdleWork());
  const Site second = MakeSite(82, OneGroup(2), IdleWork());
  for (int round = 0; round < 3; ++round) {
    const std::int64_t run = FreshRuns();
    Errors errors;
    RunThreads(context, 1, [&](std::size_t) {
      Fails(*first, 2, 0, run, errors).Start();
      SleepMs(25);
      Fails(*second, 2, 0, run, errors).Start();
    });
    RunThreads(context, 1, [&](std::size_t) {
      Fails(*second, 2, 1, run, errors).Start();
      Fails(*first, 2, 1, run, errors).Start();
    });
    context.Expect(errors.texts().size() == 4, "all calls of the run failed");
    for (const std::string& text : errors.texts()) {
      Contains(context, text, "the one that waited longest");
    }
  }
}

void TheNextRunWorks(Context& context) {
  const Limit limit(20 * kMs);
  const Site site = MakeSite(1, OneGroup(2), std::make_unique<StampWork>());
  const std::int64_t base = FreshRuns();
  for (std::int64_t i = 0; i < 6; ++i) {
    const std::int64_t run = base + 10 * i;
    Errors errors;
    RunThreads(context, 1, [&](std::size_t) { Fails(*site, 2, 0, run, errors).Start(); });
    if (i % 2 == 1) {
      RunThreads(context, 1, [&](std::size_t) { Fails(*site, 2, 1, run, errors).Start(); });
    }
    RunRanks(context, 2, [&](std::size_t rank) { return Succeeds(*site, 2, rank, run + 1); });
  }
}

void AMoveInProgressIsNeverFailed(Context& context) {
  const Limit limit(20 * kMs);
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1} << 20}) {  // without and with help
    auto work = std::make_unique<StampWork>(2, bytes);
    work->in_chunk = [](std::size_t) { SleepMs(150); };
    const Site site = MakeSite(1, OneGroup(3), std::move(work));
    const std::int64_t run = FreshRuns();
    RunRanks(context, 3, [&](std::size_t rank) -> Program {
      Stamped stamped(3, 2);
      stamped.Verify(co_await stamped.Begin(*site, rank, rank, run, 0));
    });
  }
}

/// Where chunks run before all ranks have come: no other one is begun, and ranks get the error when
/// those that run have ended. The late rank gets it at once, and its next run waits for them.
void AnEarlyStartFailsWhenItsChunksHaveEnded(Context& context) {
  const Limit limit(kForever);
  const std::size_t p = 3;
  const std::size_t num_at_work = std::min<std::size_t>(2, Runners::Get().num_cores());
  for (const bool are_long : {true, false}) {
    const std::int64_t run = FreshRuns();
    std::atomic<std::size_t> num_begun{0};
    std::atomic<std::size_t> num_running{0};
    auto work = std::make_unique<EarlyStampWork>(p);
    work->in_chunk = [&](const Stamp& source, std::size_t) {
      if (source.run == run) {
        num_running.fetch_add(1);
        num_begun.fetch_add(1);
        while (are_long && Watchdog::Get().FailureOf(run) == nullptr) {
          SleepMs(1);
        }
        SleepMs(are_long ? 100 : 0);
        num_running.fetch_sub(1);
      }
    };
    const Site site = MakeSite(1, OneGroup(p), std::move(work));
    const std::size_t first = are_long ? num_at_work : (p - 1) * (p - 1);
    RunRanks(context, p, [&](std::size_t rank) -> Program {
      Stamped stamped(1, p);
      if (rank == p - 1) {
        while (num_begun.load() < first) {
          SleepMs(1);
        }
        Watchdog::Get().FailRun(run, std::make_shared<const Status>(Internal("failed elsewhere")));
      }
      const CallResult result = co_await stamped.Begin(*site, rank, rank, run, 0);
      Check(!result.ok && result.error == "failed elsewhere", "the run's cause: " + result.error);
      Check(num_running.load() == 0 || rank == p - 1, "the chunks have ended");
      Check(stamped.untouched() || rank < p - 1, "the late rank's result is left alone");
      stamped.Verify(co_await stamped.Begin(*site, rank, rank, run + 1, 0));
    });
    context.Expect(num_begun.load() == first, std::to_string(num_begun.load()) + " chunks began");
  }
}

/// Whoever looked while it was open comes too late, and so does a deadline of another call.
void OnlyTheOpenCallThatWasLookedAtFails(Context& context) {
  const auto cause = std::make_shared<const Status>(Internal("a deadline"));
  const std::int64_t run = FreshRuns() + 1;
  const Key key{.run = run, .iteration = 0};
  Meeting* meeting = nullptr;
  auto work = std::make_unique<StampWork>();
  work->in_chunk = [&](std::size_t) {
    Check(!meeting->Fail(key, cause), "a meeting that moves can't fail");
  };
  const Site site = MakeSite(1, OneGroup(2), std::move(work));
  meeting = site->Begin(0, 0, run - 1).meeting;
  RunThreads(context, 1, [&](std::size_t) {
    Succeeds(*site, 2, 0, run).Start();
    Meeting::Call call;
    Check(meeting->IsUnderWay(call) && !call.is_complete && call.key == key, "it is open");
    Check(!meeting->Fail({.run = run + 1, .iteration = 0}, cause), "for another run");
    Check(!meeting->Fail({.run = run, .iteration = 1}, cause), "for another iteration");
    Succeeds(*site, 2, 1, run).Start();
  });
  context.Expect(!meeting->Fail(key, cause), "a meeting that is done can't fail");
}

/// Not even by a failure elsewhere in its run: the buffers are being written.
void AMoveInProgressOutlivesItsRun(Context& context) {
  auto work = std::make_unique<StampWork>();
  std::atomic<bool> moving{false};
  work->in_chunk = [&moving](std::size_t) {
    moving.store(true);
    SleepMs(100);
  };
  const Site site = MakeSite(1, OneGroup(2), std::move(work));
  const std::int64_t run = FreshRuns();
  RunThreads(context, 3, [&](std::size_t i) {
    if (i < 2) {
      Succeeds(*site, 2, i, run).Start();
    } else {
      while (!moving.load()) {
        SleepMs(1);
      }
      Watchdog::Get().FailRun(run, std::make_shared<const Status>(Internal("failed elsewhere")));
    }
  });
}

/// How long `act` takes to end a wait that begins before it: the median of some times, because the
/// watchdog also looks by itself now and then.
std::int64_t MedianNsToFail(Context& context, CallSite& site, std::size_t num_ranks,
                            const std::function<void(std::int64_t run)>& act) {
  std::vector<std::int64_t> times_ns;
  for (int i = 0; i < 7; ++i) {
    const Limit limit(300'000 * kMs);
    const std::int64_t run = FreshRuns();
    Errors errors;
    std::int64_t acted_ns = 0;
    RunThreads(context, 1, [&](std::size_t) {
      Fails(site, num_ranks, 0, run, errors).Start();
      SleepMs(20);
      acted_ns = NowNs();
      act(run);
    });
    times_ns.push_back(NowNs() - acted_ns);
  }
  std::sort(times_ns.begin(), times_ns.end());
  return times_ns[times_ns.size() / 2];
}

void ANewLimitCountsForWaitsInProgress(Context& context) {
  const Site site = MakeSite(1, OneGroup(2), IdleWork());
  const std::int64_t took_ns =
      MedianNsToFail(context, *site, 2, [](std::int64_t) { Watchdog::Get().SetTimeout(10 * kMs); });
  context.Expect(took_ns < 120 * kMs, std::to_string(took_ns / kMs) + " ms");
}

void AFailureSpreadsWithoutWaitingForALook(Context& context) {
  const Site site = MakeSite(1, OneGroup(2), IdleWork());
  const std::int64_t took_ns = MedianNsToFail(context, *site, 2, [](std::int64_t run) {
    Watchdog::Get().FailRun(run, std::make_shared<const Status>(Internal("failed elsewhere")));
  });
  context.Expect(took_ns < 120 * kMs, std::to_string(took_ns / kMs) + " ms");
}

void NoLimitWaits(Context& context) {
  const Site site = MakeSite(1, OneGroup(2), std::make_unique<StampWork>());
  const Limit limit(200 * kMs);
  const std::int64_t run = FreshRuns();
  RunThreads(context, 1, [&](std::size_t) {
    Succeeds(*site, 2, 0, run).Start();
    Watchdog::Get().SetTimeout(kForever);  // for the wait in progress as well
    SleepMs(700);
    Succeeds(*site, 2, 1, run).Start();
  });
}

void GroupsFailForThemselves(Context& context) {
  const Limit limit(50 * kMs);
  const Site site = MakeSite(1, {{0, 1}, {2, 3}}, std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) {
    Succeeds(*site, 2, 0, run).Start();
    Fails(*site, 2, 2, run, errors).Start();
    [](CallSite& s, std::int64_t r) -> Program {
      Stamped stamped(2);
      stamped.Verify(co_await stamped.Begin(s, 1, 1, r, 0));
    }(*site, run)
                                           .Start();
  });
  context.Expect(errors.texts().size() == 1, "one group failed");
}

/// Deadlines, late ranks and last ranks all at once: either all ranks of a call succeed or all
/// fail.
void AllRanksAgree(Context& context) {
  const Limit limit(6 * kMs);
  constexpr std::size_t kRanks = 3;
  const Site site = MakeSite(1, OneGroup(kRanks), std::make_unique<StampWork>());
  const std::int64_t base = FreshRuns();
  std::size_t failed = 0;
  for (std::int64_t i = 0; i < 150; ++i) {
    std::atomic<int> ok{0};
    RunRanks(context, kRanks, [&](std::size_t rank) -> Program {
      Stamped stamped(kRanks);
      if (rank == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(4000 + 50 * i));
      }
      const CallResult result = co_await stamped.Begin(*site, rank, rank, base + i, 0);
      if (result.ok) {
        stamped.Verify(result);
        ok.fetch_add(1);
      } else {
        Check(stamped.untouched(), "the result of a failed call is left alone");
      }
    });
    const int n = ok.load();
    context.Expect(n == 0 || n == kRanks, std::to_string(n) + " of 3 ranks succeeded");
    failed += n == 0 ? 1 : 0;
  }
  context.Expect(failed > 10 && failed < 140, std::to_string(failed) + " of 150 calls failed");
}

const Suite suite(
    "failing",
    {{"ADeadlineNamesWhoCameAndWhoDidNot", ADeadlineNamesWhoCameAndWhoDidNot},
     {"ARankThatNeverCameHasAName", ARankThatNeverCameHasAName},
     {"ARankIsKnownByAnotherCallOfItsRun", ARankIsKnownByAnotherCallOfItsRun},
     {"RunZeroHasADeadline", RunZeroHasADeadline},
     {"ALateRankGetsTheSameErrorAndTouchesNothing", ALateRankGetsTheSameErrorAndTouchesNothing},
     {"ALateRankIsTurnedAwayByTheMeetingItself", ALateRankIsTurnedAwayByTheMeetingItself},
     {"AFailureEndsTheOtherMeetingsOfItsRunAtOnce", AFailureEndsTheOtherMeetingsOfItsRunAtOnce},
     {"CallsOfAFailedRunFailWithoutMeeting", CallsOfAFailedRunFailWithoutMeeting},
     {"ADeadlineIsTheCauseOfItsRun", ADeadlineIsTheCauseOfItsRun},
     {"TheNextRunMayBeginBeforeThat", TheNextRunMayBeginBeforeThat},
     {"TheNextRunNeedNotWaitForALook", TheNextRunNeedNotWaitForALook},
     {"TheNextRunWorks", TheNextRunWorks},
     {"AnEarlyStartFailsWhenItsChunksHaveEnded", AnEarlyStartFailsWhenItsChunksHaveEnded},
     {"OnlyTheOpenCallThatWasLookedAtFails", OnlyTheOpenCallThatWasLookedAtFails},
     {"AMoveInProgressIsNeverFailed", AMoveInProgressIsNeverFailed},
     {"AMoveInProgressOutlivesItsRun", AMoveInProgressOutlivesItsRun},
     {"ANewLimitCountsForWaitsInProgress", ANewLimitCountsForWaitsInProgress},
     {"AFailureSpreadsWithoutWaitingForALook", AFailureSpreadsWithoutWaitingForALook},
     {"NoLimitWaits", NoLimitWaits},
     {"GroupsFailForThemselves", GroupsFailForThemselves},
     {"AllRanksAgree", AllRanksAgree}});

}  // namespace
}  // namespace jaxcoll::testing::failing_test

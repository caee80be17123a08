// tests/cpp/device_stalemate_test.cc: devices that wait for one another in different calls.
#include <atomic>      // std::atomic
#include <cstddef>     // std::size_t
#include <cstdint>     // std::int64_t
#include <functional>  // std::function
#include <memory>      // std::make_unique
#include <string>      // std::string
#include <thread>      // std::thread

#include "core/clock.h"
#include "failures.h"
#include "host/black_box.h"
#include "host/watchdog.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::device_stalemate_test {
namespace {

constexpr std::int64_t kSoonNs = 5'000 * kMs;
constexpr int kLongMs = 2'000;  // than it takes to see a stalemate

/// Looks after this process, as Python does, and says what it is told to.
class Watch {
 public:
  explicit Watch(Phase phase, std::int64_t callbacks = 0) {
    Header().phase.store(static_cast<std::int64_t>(phase));
    Header().callbacks.store(callbacks);
    thread_ = std::thread([this] {
      while (!ends_.load()) {
        Header().beat_ns.store(NowNs());
        Header().told.store(Header().asked.load());
        SleepMs(5);
      }
    });
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() {
    ends_.store(true);
    thread_.join();
    Header().beat_ns.store(0);
  }

  static BlackBox::Header& Header() { return BlackBox::Get().header(); }

 private:
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

/// Rank 0 calls one thing, rank 1 another, in one run; what both are told.
std::string Mismatch(Context& context, const std::function<void(Errors&)>& meanwhile) {
  const Limit limit(kForever);
  DescribeSite(91, "the first call");
  DescribeSite(92, "the second call");
  const Site first = MakeSite(91, OneGroup(2), std::make_unique<StampWork>());
  const Site second = MakeSite(92, OneGroup(2), std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) {
    Fails(*first, 2, 0, run, errors).Start();
    Fails(*second, 2, 1, run, errors).Start();
    meanwhile(errors);
  });
  context.Expect(errors.texts().size() == 2, "both failed");
  context.Expect(errors.texts()[0] == errors.texts()[1], "with one text");
  return errors.texts()[0];
}

void DifferentCallsFailAll(Context& context) {
  const Watch watch(Phase::kAwaiting);
  const std::int64_t start_ns = NowNs();
  const std::string text = Mismatch(context, [](Errors&) {});
  context.Expect(NowNs() - start_ns < kSoonNs, "soon, though the limit is infinite");
  Contains(context, text,
           "called different collectives, or the same in another order: device 100 ");
  Contains(context, text,
           "device 100 waits in the first call, execution 1 of this call; device 101 waits in the "
           "second call, execution 1 of this call; run ");
}

/// Who computes may be on its way.
void NotWhileAnythingComputes(Context& context) {
  const Watch watch(Phase::kAwaiting);
  Mismatch(context, [&](Errors& errors) {
    const std::int64_t until_ns = NowNs() + kLongMs * kMs;
    while (NowNs() < until_ns) {
    }
    context.Expect(errors.empty(), "nothing was said meanwhile");
  });
}

void NotInACallback(Context& context) {
  const Watch watch(Phase::kPython, /*callbacks=*/1);
  Mismatch(context, [&](Errors& errors) {
    SleepMs(kLongMs);
    context.Expect(errors.empty(), "nothing was said meanwhile");
    Watch::Header().callbacks.store(0);
  });
}

void NotWhileItIsExcused(Context& context) {
  const Watch watch(Phase::kAwaiting);
  Watch::Header().paused_until_ns.store(NowNs() + kLongMs * kMs);
  Mismatch(context, [&](Errors& errors) {
    SleepMs(kLongMs - 200);
    context.Expect(errors.empty(), "nothing was said meanwhile");
  });
}

void ALateRankIsNoStalemate(Context& context) {
  const Watch watch(Phase::kAwaiting);
  const Limit limit(kForever);
  const Site site = MakeSite(1, OneGroup(2), std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  RunThreads(context, 1, [&](std::size_t) {
    Succeeds(*site, 2, 0, run).Start();
    SleepMs(kLongMs);
    Succeeds(*site, 2, 1, run).Start();
  });
}

/// Rank 1 of one run waits for rank 0, whose run fails then, and which JAX so gives nothing to do.
void WhoWaitsForAFailedRankIsToldWhy(Context& context) {
  const Watch watch(Phase::kAwaiting);
  const Limit limit(kForever);
  const Site site = MakeSite(1, OneGroup(2), std::make_unique<StampWork>());
  const Site other = MakeSite(2, OneGroup(2), std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  RunRanks(context, 2, [&](std::size_t rank) { return Succeeds(*site, 2, rank, run); });
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) {
    Fails(*other, 2, 0, run + 1, errors).Start();
    Fails(*site, 2, 1, run + 2, errors).Start();
    SleepMs(1);
    Watchdog::Get().FailRun(run + 1, std::make_shared<const Status>(Internal("the first cause")));
  });
  context.Expect(errors.texts()[1] == "the first cause", "not: " + errors.texts()[1]);
  RunRanks(context, 2, [&](std::size_t rank) { return Succeeds(*site, 2, rank, run + 3); });
}

/// But not who comes after that: its program may need nothing of what has failed.
void WhoComesAfterAFailureWaits(Context& context) {
  const Watch watch(Phase::kAwaiting);
  const Site site = MakeSite(1, OneGroup(2), std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  RunRanks(context, 2, [&](std::size_t rank) { return Succeeds(*site, 2, rank, run); });
  Errors errors;
  {
    const Limit limit(20 * kMs);
    RunThreads(context, 1, [&](std::size_t) { Fails(*site, 2, 0, run + 1, errors).Start(); });
  }
  SleepMs(100);  // else it was launched before
  const Limit limit(kForever);
  RunThreads(context, 1, [&](std::size_t) {
    Succeeds(*site, 2, 1, run + 2).Start();
    SleepMs(kLongMs);
    Succeeds(*site, 2, 0, run + 2).Start();
  });
}

void WhatWasLaunchedBeforeAFailureFails(Context& context) {
  const Watch watch(Phase::kAwaiting);
  const Site site = MakeSite(1, OneGroup(2), std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  RunRanks(context, 2, [&](std::size_t rank) { return Succeeds(*site, 2, rank, run); });
  Errors errors;
  {
    const Limit limit(20 * kMs);
    RunThreads(context, 1, [&](std::size_t) { Fails(*site, 2, 0, run + 1, errors).Start(); });
  }
  const Limit limit(kForever);
  RunThreads(context, 1, [&](std::size_t) { Fails(*site, 2, 1, run + 2, errors).Start(); });
  errors.Expect(context, 2, {});  // for the reason for which the other rank does not come
}

/// A callback of rank 2 has raised: its program ended there, and it comes to no call.
void WhoWaitsForARaisedCallbackIsToldWhy(Context& context) {
  const Watch watch(Phase::kAwaiting);
  const Limit limit(kForever);
  DescribeSite(93, "a call of two");
  DescribeSite(94, "a call of three");
  const Site of_two = MakeSite(93, OneGroup(2), std::make_unique<StampWork>());
  const Site of_three = MakeSite(94, OneGroup(3), std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  Watchdog::Get().NoteCallbackError("ValueError: no such file, at a.py:3 (load)");
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) {
    Fails(*of_two, 2, 0, run, errors).Start();
    Fails(*of_three, 3, 1, run, errors).Start();
  });
  // Not the call in which one waits for who waits itself.
  errors.Expect(context, 2,
                {"a call of three: waited ", " s for rank 0 (device 100), 2 (partition 2) of 3",
                 "a callback of this process has raised ValueError: no such file, at a.py:3"});
  Watchdog::Get().NoteCallbackError("");
}

const Suite suite("device_stalemate",
                  {{"DifferentCallsFailAll", DifferentCallsFailAll},
                   {"NotWhileAnythingComputes", NotWhileAnythingComputes},
                   {"NotInACallback", NotInACallback},
                   {"NotWhileItIsExcused", NotWhileItIsExcused},
                   {"ALateRankIsNoStalemate", ALateRankIsNoStalemate},
                   {"WhoWaitsForAFailedRankIsToldWhy", WhoWaitsForAFailedRankIsToldWhy},
                   {"WhoComesAfterAFailureWaits", WhoComesAfterAFailureWaits},
                   {"WhatWasLaunchedBeforeAFailureFails", WhatWasLaunchedBeforeAFailureFails},
                   {"WhoWaitsForARaisedCallbackIsToldWhy", WhoWaitsForARaisedCallbackIsToldWhy}});

}  // namespace
}  // namespace jaxcoll::testing::device_stalemate_test

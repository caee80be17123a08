// tests/cpp/runners_test.cc: where programs resume: what may block, what must not, and how many
// threads that takes.
#include <atomic>      // std::atomic
#include <barrier>     // std::barrier
#include <cstddef>     // std::size_t
#include <cstdint>     // std::int64_t
#include <deque>       // std::deque
#include <filesystem>  // std::filesystem::directory_iterator
#include <latch>       // std::latch
#include <memory>      // std::make_unique
#include <string>      // std::string
#include <thread>      // std::this_thread
#include <vector>      // std::vector

#include "core/clock.h"
#include "host/call_site.h"
#include "host/runners.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::runners_test {
namespace {

constexpr std::size_t kNumRanks[] = {1, 2, 3, 4, 8};

std::size_t CountThreads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

/// Native and XLA's own collectives in turn: what follows a native call blocks until every rank is
/// there, so every waiting program needs a thread.
void ContinuationsMayBlockOnEachOther(Context& context) {
  for (const std::size_t p : kNumRanks) {
    const Site site = MakeSite(1, OneGroup(p), std::make_unique<StampWork>());
    for (const std::int64_t run : {FreshRuns(), FreshRuns()}) {
      std::barrier theirs(static_cast<std::ptrdiff_t>(p));
      RunRanks(context, p, [&](std::size_t rank) -> Program {
        Stamped stamped(p);
        for (std::int64_t i = 0; i < 100; ++i) {
          stamped.Verify(co_await stamped.Begin(*site, rank, rank, run, i));
          theirs.arrive_and_wait();
        }
      });
    }
  }
}

/// The same where the calls before it taught that continuations are short.
void AChainMayEndInABlockingCall(Context& context) {
  for (const std::size_t p : kNumRanks) {
    const Site site = MakeSite(1, OneGroup(p), std::make_unique<StampWork>());
    std::barrier theirs(static_cast<std::ptrdiff_t>(p));
    const std::int64_t run = FreshRuns();
    RunRanks(context, p, [&](std::size_t rank) -> Program {
      Stamped stamped(p);
      for (std::int64_t i = 0; i < 600; ++i) {
        stamped.Verify(co_await stamped.Begin(*site, rank, rank, run, i));
        if (i % 200 == 199) {
          theirs.arrive_and_wait();
        }
      }
    });
  }
}

/// More blocked programs than runners were reserved: several parts of each device's program at
/// once.
void ManyProgramsMayBlockAtOnce(Context& context) {
  constexpr std::size_t kParts = 6;
  const std::size_t p = 8;
  std::vector<Site> sites;
  for (std::size_t s = 0; s < kParts; ++s) {
    sites.push_back(MakeSite(s, OneGroup(p), std::make_unique<StampWork>()));
  }
  const std::int64_t run = FreshRuns();
  std::barrier everybody(static_cast<std::ptrdiff_t>(p * kParts));
  RunThreads(context, p, [&](std::size_t rank) {
    for (std::size_t s = 0; s < kParts; ++s) {
      [](CallSite& site, std::size_t r, std::int64_t at_run, auto& barrier) -> Program {
        Stamped stamped(8);
        for (std::int64_t i = 0; i < 5; ++i) {
          stamped.Verify(co_await stamped.Begin(site, r, r, at_run, i));
          // On a thread of RunThreads only after a call that finished at once; nobody may block
          // there, because the other parts have not been started.
          if (on_rank_thread) {
            Shared::Get().Add(1);
            std::thread([&barrier] {
              barrier.arrive_and_wait();
              Shared::Get().Add(-1);
            }).detach();
          } else {
            barrier.arrive_and_wait();
          }
        }
      }(*sites[s], rank, run, everybody)
                                                                                   .Start();
    }
  });
}

/// Threads are bounded by the programs that block at once, however long that goes on.
void ThreadsAreBounded(Context& context) {
  const std::size_t p = 8;
  const Site site = MakeSite(1, OneGroup(p), std::make_unique<StampWork>());
  const auto blocking_run = [&] {
    std::barrier theirs(static_cast<std::ptrdiff_t>(p));
    const std::int64_t run = FreshRuns();
    RunRanks(context, p, [&](std::size_t rank) -> Program {
      Stamped stamped(p);
      for (std::int64_t i = 0; i < 50; ++i) {
        stamped.Verify(co_await stamped.Begin(*site, rank, rank, run, i));
        theirs.arrive_and_wait();
        SpinUs(200);
      }
    });
  };
  blocking_run();
  const std::size_t before = CountThreads();
  for (int i = 0; i < 5; ++i) {
    blocking_run();
  }
  const std::size_t after = CountThreads();
  context.Expect(after <= before + p,
                 std::to_string(before) + " threads became " + std::to_string(after));
}

/// Two tasks of the queue itself, without a meeting; the first blocks until the second has run.
struct Pair {
  class First final : public Task {
   public:
    explicit First(Pair& pair) : pair_(pair) {}
    void Run() override {
      pair_.second_ran.wait();
      Shared::Get().Add(-1);
    }

   private:
    Pair& pair_;
  };

  class Second final : public Task {
   public:
    explicit Second(Pair& pair) : pair_(pair) {}
    void Run() override { pair_.second_ran.count_down(); }

   private:
    Pair& pair_;
  };

  std::latch second_ran{1};
  First first{*this};
  Second second{*this};
  Pace first_pace;
  Pace second_pace;
};

/// A program that blocks until another has gone on, which is queued at about the same time:
/// whatever the runners are doing in between, somebody must see that the second one stands there.
void AProgramMayBlockOnALaterOne(Context& context) {
  static auto* const pairs = new std::deque<Pair>();  // runners come back to them for a moment
  for (int i = 0; i < 400; ++i) {
    Pair& pair = pairs->emplace_back();
    RunThreads(context, 1, [&pair, i](std::size_t) {
      Shared::Get().Add(1);
      TaskList first;
      first.Append(pair.first);
      TaskList second;
      second.Append(pair.second);
      Runners::Get().Resume(first, pair.first_pace);
      SpinUs(i % 4 == 0 ? 0 : i / 4);
      Runners::Get().Resume(second, pair.second_pace);
    });
    SpinUs(i % 2 == 0 ? 0 : 3000);  // until the standby sleeps
  }
}

/// One device's program is long after the call, the others' are short: they must not wait for it.
void ALongContinuationHoldsUpNobody(Context& context) {
  const std::size_t p = 4;
  const Site first = MakeSite(1, OneGroup(p), std::make_unique<StampWork>());
  const Site second = MakeSite(2, OneGroup(p - 1), std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  std::atomic<std::int64_t> others_ended_ns{0};
  std::atomic<std::int64_t> long_ended_ns{0};
  RunRanks(context, p, [&](std::size_t rank) -> Program {
    Stamped stamped(p);
    stamped.Verify(co_await stamped.Begin(*first, rank, rank, run, 0));
    if (rank == p - 1) {
      SleepMs(300);
      long_ended_ns.store(NowNs());
      co_return;
    }
    stamped = Stamped(p - 1);
    for (std::int64_t i = 0; i < 20; ++i) {
      stamped.Verify(co_await stamped.Begin(*second, rank, rank, run, i));
    }
    others_ended_ns.store(NowNs());
  });
  context.Expect(others_ended_ns.load() < long_ended_ns.load(), "three ranks went ahead");
}

/// Not in the coroutine itself, where GCC 12 computes with volatiles at compile time.
bool DenormalsAreFlushed() {
  volatile float denormal = 1e-40F;
  volatile float smallest = 2e-38F;
  volatile float half = 0.5F;
  volatile float huge = 1e38F;
  return denormal * huge == 0.0F && smallest * half * huge == 0.0F;
}

/// XLA flushes denormals on every thread that runs a program.
void ProgramsResumeWithDenormalsFlushed(Context& context) {
  const std::size_t p = 4;
  const Site site = MakeSite(1, OneGroup(p), std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  std::atomic<int> resumed{0};
  RunRanks(context, p, [&](std::size_t rank) -> Program {
    Stamped stamped(p);
    for (std::int64_t i = 0; i < 20; ++i) {
      stamped.Verify(co_await stamped.Begin(*site, rank, rank, run, i));
      if (!on_rank_thread) {
        Check(DenormalsAreFlushed(), "denormals are flushed");
        resumed.fetch_add(1);
      }
    }
  });
  context.Expect(resumed.load() > 0, "some program was resumed by a runner");
}

void PaceLearnsAndForgets(Context& context) {
  Pace pace;
  context.Expect(pace.kind() == Pace::Kind::kShort, "at first");
  pace.Note(/*duration_ns=*/10'000'000, /*overdue=*/false);
  context.Expect(pace.kind() == Pace::Kind::kLong, "after a long task");
  pace.Note(/*duration_ns=*/1000, /*overdue=*/true);
  context.Expect(pace.kind() == Pace::Kind::kBlocking, "after one that had to be taken over");
  for (int i = 0; i < 1000; ++i) {
    pace.Note(10'000'000, true);
  }
  int notes = 0;
  while (pace.kind() != Pace::Kind::kShort && notes < 1000) {
    pace.Note(1000, false);
    ++notes;
  }
  context.Expect(notes >= 10 && notes <= 100,
                 "forgotten after " + std::to_string(notes) + " short tasks");
}

/// Calls until a thread stays again.
int RestOf(Pace& pace) {
  int rest = 0;
  while (!pace.Stays() && rest < 1'000'000) {
    ++rest;
  }
  return rest;
}

void ThreadsStaySeldomWhereItIsInVain(Context& context) {
  Pace pace;
  context.Expect(!pace.Stays(), "at first");
  pace.NoteComputing(true);
  context.Expect(pace.Stays(), "after a program computed");
  int before = 0;
  for (int i = 0; i < 20; ++i) {
    pace.NoteStay(/*came=*/false);
    const int rest = RestOf(pace);
    context.Expect(rest > before || rest > 10'000, "a longer rest each time");
    context.Expect(rest < 100'000, "not for ever");
    before = rest;
  }
  for (int i = 0; i < 20; ++i) {
    pace.NoteStay(/*came=*/true);
    context.Expect(pace.Stays(), "no rest after it was right");
  }
  pace.NoteStay(/*came=*/false);
  context.Expect(RestOf(pace) < 100, "what was long ago is forgotten");
  for (int i = 0; i < 100; ++i) {
    pace.NoteComputing(false);
  }
  context.Expect(!pace.Stays(), "after programs that hardly computed");
}

const Suite suite("runners",
                  {{"ContinuationsMayBlockOnEachOther", ContinuationsMayBlockOnEachOther},
                   {"AChainMayEndInABlockingCall", AChainMayEndInABlockingCall},
                   {"ManyProgramsMayBlockAtOnce", ManyProgramsMayBlockAtOnce},
                   {"AProgramMayBlockOnALaterOne", AProgramMayBlockOnALaterOne},
                   {"ThreadsAreBounded", ThreadsAreBounded},
                   {"ALongContinuationHoldsUpNobody", ALongContinuationHoldsUpNobody},
                   {"ProgramsResumeWithDenormalsFlushed", ProgramsResumeWithDenormalsFlushed},
                   {"PaceLearnsAndForgets", PaceLearnsAndForgets},
                   {"ThreadsStaySeldomWhereItIsInVain", ThreadsStaySeldomWhereItIsInVain}});

}  // namespace
}  // namespace jaxcoll::testing::runners_test

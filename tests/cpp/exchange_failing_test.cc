// tests/cpp/exchange_failing_test.cc: what ends calls across processes with an error, and what does
// not.
#include <sys/wait.h>  // waitpid
#include <unistd.h>    // fork, getpid, pause

#include <atomic>   // std::atomic
#include <chrono>   // std::chrono::microseconds
#include <csignal>  // kill, SIGKILL, SIGSTOP
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <string>   // std::string, std::to_string
#include <utility>  // std::move
#include <vector>   // std::vector

#include "core/clock.h"
#include "failures.h"
#include "host/black_box.h"
#include "host/diagnosis.h"
#include "host/job.h"
#include "host/recorder.h"
#include "host/watchdog.h"
#include "ops.h"
#include "processes.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::exchange_failing_test {
namespace {

/// Small enough that nothing is written before all have come.
Op SmallOp() { return AllReduceOp({{DType::kF32, 33}}); }
Op LargeOp() { return AllReduceOp({{DType::kF32, 60'000}}); }

Program Fails(const SharedSite& site, std::size_t rank, std::int64_t run, const CallData& data,
              Errors& errors) {
  CallResult result = co_await site.Begin(rank, run, data);
  Check(!result.ok, "the call fails");
  Check(data.untouched(rank), "a failed call leaves the buffers alone");
  errors.Add(std::move(result.error));
}

void Succeeds(Context& context, const SharedSite& site, const Op& op, std::size_t num_ranks) {
  const CallData data(op, num_ranks, 1);
  const std::int64_t run = FreshRuns();
  RunRanks(context, num_ranks, [&](std::size_t rank) -> Program {
    const CallResult result = co_await site.Begin(rank, run, data);
    Check(result.ok, result.error);
    Check(data.Problem(rank).empty(), [&] { return data.Problem(rank); });
  });
}

/// All processes read what this one tells about itself as what the others do.
void ObserveAll(const Host& host) {
  for (std::size_t process = 0; process < host.num_processes(); ++process) {
    for (std::size_t seat = 0; seat < host.num_processes(); ++seat) {
      host.job(process).session()->Observe(seat, BlackBox::Map(BlackBox::Get().memory()));
    }
  }
}

// ---- Deadlines and mismatches -----------------------------------------------------------------

void AProcessThatNeverComesIsNamed(Context& context) {
  const Limit limit(200 * kMs);
  DescribeSite(201, "all_reduce over \"data\", called at train.py:12");
  Host host(3);
  const SharedSite site(host, 201, OneGroup(4), {0, 0, 1, 2}, SmallOp().make);
  const CallData data(SmallOp(), 4, 1);
  const std::int64_t run = FreshRuns();
  Errors errors;
  const std::int64_t start_ns = NowNs();
  RunThreads(context, 3, [&](std::size_t rank) { Fails(site, rank, run, data, errors).Start(); });
  const std::int64_t took_ns = NowNs() - start_ns;
  context.Expect(took_ns >= 200 * kMs, "not before the deadline");
  context.Expect(took_ns < 1500 * kMs, "soon after the deadline");
  errors.Expect(context, 3,
                {"all_reduce over \"data\", called at train.py:12: waited 0.",
                 " for rank 3 (process 42", "pid " + std::to_string(getpid()) + ", running)",
                 "arrived: rank 0, 1 (process 40), rank 2 (process 41)", "(the limit is 0.2 s)",
                 "execution 1 of this call"});
}

/// Its limit begins when that is over.
void WhoCompilesIsWaitedFor(Context& context) {
  const Limit limit(200 * kMs);
  Host host(2);
  ObserveAll(host);
  const SharedSite site(host, 211, OneGroup(2), {0, 1}, SmallOp().make);
  BlackBox::Header& header = BlackBox::Get().header();
  const auto look = [&header](Phase phase) {
    header.phase.store(static_cast<std::int64_t>(phase));
    header.phase_since_ns.store(NowNs());
    header.beat_ns.store(NowNs());
    header.told.store(header.asked.load() + 1000);  // nobody waits for an answer
  };
  look(Phase::kCompiling);
  const CallData data(SmallOp(), 2, 1);
  const std::int64_t run = FreshRuns();
  RunThreads(context, 1, [&](std::size_t) {
    const auto call = [&](std::size_t rank) -> Program {
      const CallResult result = co_await site.Begin(rank, run, data);
      Check(result.ok, result.error);
    };
    call(0).Start();
    SleepMs(500);
    look(Phase::kPython);
    SleepMs(100);
    call(1).Start();
  });
  // And who does not compile is not.
  const std::int64_t next = FreshRuns();
  const CallData next_data(SmallOp(), 2, 1);
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) { Fails(site, 0, next, next_data, errors).Start(); });
  errors.Expect(context, 1, {"for rank 1 (process 41", "rank 1: ", "of device 101"});
  header.beat_ns.store(0);
}

void AFailedCallIsRecordedAsOne(Context& context) {
  const Limit limit(200 * kMs);
  Host host(2);
  const SharedSite site(host, 212, OneGroup(2), {0, 1}, SmallOp().make);
  const CallData data(SmallOp(), 2, 1);
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) { Fails(site, 0, FreshRuns(), data, errors).Start(); });
  std::size_t found = 0;
  for (const CallRecord& record : RecordsIn(BlackBox::Get())) {
    if (record.site == 212) {
      ++found;
      context.Expect(record.moments_ns[static_cast<std::size_t>(Moment::kMoved)] == 0 &&
                         record.moments_ns[static_cast<std::size_t>(Moment::kResumed)] != 0,
                     "it was resumed, and nothing was moved");
      context.Expect(record.execution > 0, "it has the number that all ranks would have");
    }
  }
  context.Expect(found == 1, "one call");
}

/// Also in the middle of a call of many rounds, which is why its buffers may have been written.
void ARankThatIsMissingInItsProcessFailsTheOthers(Context& context) {
  const Limit limit(200 * kMs);
  DescribeSite(202, "the call with a missing rank");
  Host host(2);
  const SharedSite site(host, 202, OneGroup(3), {0, 1, 1}, SmallOp().make);
  const CallData data(SmallOp(), 3, 1);
  const std::int64_t run = FreshRuns();
  Watchdog::Get().NoteCallbackError("ValueError: no such file, at a.py:3 (load)");
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) {
    Fails(site, 1, run, data, errors).Start();
    SleepMs(100);
    Fails(site, 0, run, data, errors).Start();
  });
  errors.Expect(
      context, 2,
      {"the call with a missing rank: waited 0.", "for rank 2 (process 41, pid ",
       ", running, device 102) of 3; arrived: rank 1 (process 41, device 101); "
       "execution 1 of this call in a run of its program; a callback of process 41 has raised "
       "ValueError: no such file"});
  Watchdog::Get().NoteCallbackError("");
}

/// Rank 2 has come, and is not blamed for what rank 3 of the same process did not do.
void OfAProcessOnlyThoseThatAreMissingAreNamed(Context& context) {
  const Limit limit(400 * kMs);
  DescribeSite(213, "the call in question");
  DescribeSite(214, "the call before");
  Host host(2);
  ObserveAll(host);
  const SharedSite site(host, 213, OneGroup(4), {0, 0, 1, 1}, SmallOp().make);
  const SharedSite before(host, 214, OneGroup(4), {0, 0, 1, 1}, SmallOp().make);
  Succeeds(context, before, SmallOp(), 4);
  const CallData data(SmallOp(), 4, 1);
  const std::int64_t run = FreshRuns();
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) {
    Fails(site, 0, run, data, errors).Start();
    Fails(site, 1, run, data, errors).Start();
    SleepMs(200);  // so that the other process's limit is not over first
    Fails(site, 2, run, data, errors).Start();
  });
  errors.Expect(context, 3,
                {" for rank 3 (process 41, pid ",
                 "; arrived: rank 0, 1 (process 40), rank 2 (process 41); execution 1 ",
                 "\n  rank 3: last call, ended 0.", " ago: the call before (call "});
  for (const std::string& text : errors.texts()) {
    context.Expect(text.find("rank 2:") == std::string::npos, text);
  }
}

/// One of its ranks waits in the call, and will not take part any more.
void WhoIsGoneIsNamedThoughItHadCome(Context& context) {
  constexpr std::int64_t kNobody = (std::int64_t{1} << 22) + 1;  // beyond all pids of Linux
  const Limit limit(kForever);
  Host host(2);
  ObserveAll(host);
  const SharedSite site(host, 215, OneGroup(4), {0, 0, 1, 1}, SmallOp().make);
  const CallData data(SmallOp(), 4, 1);
  const std::int64_t run = FreshRuns();
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) {
    for (const std::size_t rank : {2, 0, 1}) {
      Fails(site, rank, run, data, errors).Start();
    }
    host.segment().seat(host.job(1).session()->seat()).pid.store(kNobody);
  });
  errors.Expect(context, 3,
                {" for rank 2, 3 (process 41, pid " + std::to_string(kNobody) + ", gone); ",
                 "arrived: rank 0, 1 (process 40); execution 1 ", "(the process is gone)"});
}

/// As who is gone; a third process that is late is named beside it.
void WhoIsStoppedIsNamedThoughItHadCome(Context& context) {
  const Limit limit(400 * kMs);
  const pid_t child = fork();
  if (child == 0) {
    for (;;) {
      pause();
    }
  }
  int state = 0;
  context.Expect(kill(child, SIGSTOP) == 0 && waitpid(child, &state, WUNTRACED) == child, "stops");
  Host host(3);
  ObserveAll(host);
  const SharedSite site(host, 216, OneGroup(5), {0, 0, 1, 1, 2}, SmallOp().make);
  const CallData data(SmallOp(), 5, 1);
  const std::int64_t run = FreshRuns();
  Errors errors;
  RunThreads(context, 1, [&](std::size_t) {
    Fails(site, 0, run, data, errors).Start();
    Fails(site, 1, run, data, errors).Start();
    SleepMs(200);  // so that the other process's limit is not over first
    Fails(site, 2, run, data, errors).Start();
    Seat& seat = host.segment().seat(host.job(1).session()->seat());
    seat.start_ticks.store(0);  // the child's is not asked for
    seat.pid.store(child);
  });
  errors.Expect(context, 3,
                {" for rank 2, 3 (process 41, pid " + std::to_string(child) + ", stopped), ",
                 "rank 4 (process 42, ", "arrived: rank 0, 1 (process 40); execution 1 "});
  kill(child, SIGKILL);
  waitpid(child, &state, 0);
}

/// A call between ranks of one process that fails keeps them from what the others wait for.
void AFailureInsideAProcessFailsTheOthers(Context& context) {
  const Limit limit(200 * kMs);
  DescribeSite(208, "the call inside");
  Host host(2);
  const SharedSite inside(host, 208, {{1, 2}}, {0, 1, 1}, SmallOp().make);
  const SharedSite across(host, 209, OneGroup(3), {0, 1, 1}, SmallOp().make);
  const CallData inside_data(SmallOp(), 2, 1);
  const CallData across_data(SmallOp(), 3, 1);
  const std::int64_t run = FreshRuns();
  Errors errors;
  const auto rank_1 = [&]() -> Program {
    CallResult result =
        co_await inside.Begin(1, run, inside_data.operands(0), inside_data.results(0));
    Check(!result.ok, "rank 2 does not come");
    errors.Add(std::move(result.error));
  };
  RunThreads(context, 1, [&](std::size_t) {
    rank_1().Start();
    SleepMs(100);
    Fails(across, 0, run, across_data, errors).Start();
  });
  errors.Expect(context, 2,
                {"the call inside: waited 0.2 s", "for rank 1 (process 41, pid ",
                 ", running, device 102) of 2"});
}

void DifferentCallsFailBoth(Context& context) {
  const Limit limit(kForever);
  DescribeSite(203, "the call of two");
  DescribeSite(204, "the call of the third");
  for (const Op& op : {SmallOp(), LargeOp()}) {
    Host host(3);
    const SharedSite one(host, 203, OneGroup(4), {0, 0, 1, 2}, op.make);
    const SharedSite other(host, 204, OneGroup(4), {0, 0, 1, 2}, op.make);
    const CallData data(op, 4, 1);
    const std::int64_t run = FreshRuns();
    Errors errors;
    const std::int64_t start_ns = NowNs();
    RunThreads(context, 4, [&](std::size_t rank) {
      Fails(rank == 3 ? other : one, rank, run, data, errors).Start();
    });
    const std::int64_t took_ns = NowNs() - start_ns;
    context.Expect(took_ns < 2000 * kMs, std::to_string(took_ns / kMs) + " ms");
    errors.Expect(context, 4,
                  {"process 42 waits in the call of the third, execution 1 of this call; "
                   "process 41 (and 40) waits in the call of two, execution 1 of this call"});
  }
}

/// A call that all have come to is no mismatch, however long another one waits, nor are ranks of
/// one process that are late.
void WaitsOfAnyLengthAreNoMismatch(Context& context) {
  const Limit limit(kForever);
  Host host(2);
  const SharedSite early(host, 205, OneGroup(2), {0, 1}, SmallOp().make);
  const SharedSite late(host, 206, OneGroup(2), {0, 1}, SmallOp().make);
  const CallData early_data(SmallOp(), 2, 1);
  const CallData late_data(SmallOp(), 2, 2);
  const std::int64_t run = FreshRuns();
  const auto program = [&](const SharedSite& site, std::size_t rank,
                           const CallData& data) -> Program {
    const CallResult result = co_await site.Begin(rank, run, data);
    Check(result.ok && data.Problem(rank).empty(), [&] { return result.error; });
  };
  RunThreads(context, 2, [&](std::size_t rank) {
    if (rank == 1) {
      SleepMs(1300);  // the other one waits in both
    }
    program(early, rank, early_data).Start();
    SleepMs(rank == 1 ? 100 : 0);
    program(late, rank, late_data).Start();
  });
}

/// Once a process has said that it exits, others wait for what it has begun, not for more.
void AProcessThatLeavesIsNotWaitedFor(Context& context) {
  const Limit limit(kForever);
  Host host(2);
  const SharedSite site(host, 207, OneGroup(2), {0, 1}, SmallOp().make);
  const CallData data(SmallOp(), 2, 1);
  const std::int64_t run = FreshRuns();
  Errors errors;
  host.job(1).session()->Leave();
  Succeeds(context, site, SmallOp(), 2);  // still
  RunThreads(context, 1, [&](std::size_t) { Fails(site, 0, run, data, errors).Start(); });
  errors.Expect(context, 1,
                {"for rank 1 (process 41, pid ", ", leaving)",
                 "the process has come to its end without this call", "execution 2"});
}

/// Of calls that only the callers record: by the records of the others.
void WhoHasNotMadeACallIsTold(Context& context) {
  DescribeSite(5010, "a call on GPUs");
  Host host(3);
  ObserveAll(host);
  const auto call = [](std::int64_t device, std::uint64_t site, std::int64_t rank,
                       std::int64_t execution) {
    Recorder::Entry& entry = Recorder::Get().Begin(
        device, {.site = site, .group = 79, .rank = rank, .now_ns = NowNs() - 1000 * kMs});
    entry.execution.store(execution);
  };
  call(1801, 5010, 1, 3);
  call(1801, 5010, 1, 4);
  call(1802, 5010, 2, 3);
  call(1803, 5010, 3, 3);
  const auto text = [&] {
    return AbsentText(*host.job(0).session(), {40, 41, 42, 42}, 79, 5010, 4);
  };
  const std::string pid = std::to_string(getpid());
  const std::string both = text();
  context.Expect(both.starts_with("rank 2, 3 (process 42, pid " + pid + ", running)\n  rank 2: "),
                 both);
  context.Expect(both.find("\n  rank 3: waits, since 1.") != std::string::npos, both);
  for (std::size_t i = 0; i < Recorder::kCapacity; ++i) {
    call(1802, 5011, 2, 1);
  }
  const std::string one = text();
  context.Expect(one.starts_with("rank 3 (process 42, pid " + pid + ", running)\n"),
                 "of the other it isn't known any more: " + one);
  call(1803, 5010, 3, 5);
  context.Expect(text().empty(), text());
}

// ---- After a failure --------------------------------------------------------------------------

void EveryLaterCallFailsAtOnce(Context& context) {
  const Limit limit(kForever);
  Host host(2);
  const Places process_of{0, 0, 1, 1};
  const SharedSite site(host, 211, OneGroup(4), process_of, SmallOp().make);
  const SharedSite large(host, 212, OneGroup(4), process_of, LargeOp().make);
  const CallData data(SmallOp(), 4, 1);
  const CallData large_data(LargeOp(), 4, 1);
  Succeeds(context, site, SmallOp(), 4);
  Errors errors;
  const std::int64_t start_ns = NowNs();
  // Some wait for other processes, one for its own.
  const std::int64_t run = FreshRuns();
  RunThreads(context, 2, [&](std::size_t i) {
    if (i == 0) {
      Fails(site, 0, run, data, errors).Start();
      Fails(site, 1, run, data, errors).Start();
      Fails(large, 2, run, large_data, errors).Start();
    } else {
      SleepMs(50);
      Check(host.segment().Fail("the first cause"), "nobody has failed it before");
      Check(!host.segment().Fail("a later one"), "the first cause stays");
    }
  });
  for (std::int64_t i = 1; i < 4; ++i) {
    const CallData again(LargeOp(), 4, 2);
    RunRanks(context, 4,
             [&](std::size_t rank) { return Fails(large, rank, run + i, again, errors); });
  }
  context.Expect(NowNs() - start_ns < 2000 * kMs, "at once");
  errors.Expect(context, 3 + 12, {"the first cause"});
  Errors alone;
  RunThreads(context, 1, [&](std::size_t) {
    Fails(large, 0, FreshRuns(), large_data, alone).Start();
    Check(!alone.empty(), "a rank need not wait for the others of its process");
  });
  for (const std::string& text : errors.texts()) {
    context.Expect(text == "the first cause", text);
  }
}

/// Call sites outlive a session, and what is left of its calls.
void AllWorksInTheNextSegment(Context& context) {
  const Limit limit(kForever);
  Host host(2, {.num_lanes = 3, .window_bytes = 4096});
  const Op op = LargeOp();
  const Places process_of{0, 1, 1};
  const SharedSite site(host, 221, OneGroup(3), process_of, op.make);
  const SharedSite other(host, 222, OneGroup(3), process_of, SmallOp().make);
  std::size_t num_failed = 0;
  for (std::size_t i = 0; i < 40; ++i) {
    const CallData data(op, 3, i);
    const std::int64_t run = FreshRuns();
    std::atomic<std::size_t> num_ok{0};
    RunThreads(context, 4, [&](std::size_t rank) {
      if (rank == 3) {
        std::this_thread::sleep_for(std::chrono::microseconds(20 * i));
        host.segment().Fail("in the middle");
        return;
      }
      [](const SharedSite& in, std::size_t r, std::int64_t n, const CallData& with,
         std::atomic<std::size_t>& oks) -> Program {
        const CallResult result = co_await in.Begin(r, n, with);
        if (result.ok) {
          Check(with.Problem(r).empty(), [&] { return with.Problem(r); });
          oks.fetch_add(1);
        } else {
          Check(result.error == "in the middle", result.error);
        }
      }(site, rank, run, data, num_ok)
                                               .Start();
    });
    num_failed += num_ok.load() < 3 ? 1 : 0;
    host.Attach();
    Succeeds(context, other, SmallOp(), 3);
    Succeeds(context, site, op, 3);
    Succeeds(context, other, SmallOp(), 3);
  }
  context.Expect(num_failed > 3, std::to_string(num_failed) + " of 40 calls failed");
}

/// A call that failed in the old segment has failed, though the new one is sound by the time that
/// its ranks are told.
void AttachingDoesNotMendCallsInProgress(Context& context) {
  const Limit limit(kForever);
  Host host(2);
  const SharedSite site(host, 231, OneGroup(3), {0, 0, 1}, SmallOp().make);
  const CallData data(SmallOp(), 3, 1);
  for (int i = 0; i < 60; ++i) {
    const std::int64_t run = FreshRuns();
    Errors errors;
    RunThreads(context, 1, [&](std::size_t) {
      Fails(site, 0, run, data, errors).Start();
      Fails(site, 1, run, data, errors).Start();
      SleepMs(i % 4);
      host.segment().Fail("the old one's cause");
      host.Attach();
    });
    errors.Expect(context, 2, {"the old one's cause"});
  }
  Succeeds(context, site, SmallOp(), 3);
}

/// A rank of a run that failed before the job was attached anew comes late.
void ALateRankLeavesTheNewSegmentAlone(Context& context) {
  const Limit limit(100 * kMs);
  Host host(2);
  const Op op = AllReduceOp({{DType::kI32, 10}});
  const SharedSite site(host, 1, OneGroup(3), {0, 0, 1}, op.make);
  const CallData data(op, 3, 1);
  const std::int64_t run = FreshRuns();
  const auto fails = [&](std::size_t rank) -> Program {
    Check(!(co_await site.Begin(rank, run, data)).ok, "the call fails");
  };
  RunThreads(context, 1, [&](std::size_t) { fails(0).Start(); });
  host.Attach();
  RunThreads(context, 1, [&](std::size_t) { fails(1).Start(); });
  context.Expect(!host.segment().failed(), "the new segment is sound");
}

/// A call that was open when the job was attached anew is of the old segment.
void AnOldCallMeetsNoNewOne(Context& context) {
  const Limit limit(300 * kMs);
  Host host(2);
  const Op op = AllReduceOp({{DType::kI32, 10}});
  const SharedSite site(host, 1, OneGroup(3), {0, 0, 1}, op.make);
  const CallData data(op, 3, 1);
  const std::int64_t run = FreshRuns();
  const auto fails = [&](std::size_t rank, std::int64_t in_run) -> Program {
    Check(!(co_await site.Begin(rank, in_run, data)).ok, "the call fails");
  };
  RunThreads(context, 1, [&](std::size_t) {
    fails(0, run).Start();
    host.segment().Fail("a cause");
    host.Attach();
    fails(1, run).Start();      // of the old run
    fails(2, run + 1).Start();  // of the new one, alone in it
  });
}

const Suite suite(
    "exchange_failing",
    {{"AProcessThatNeverComesIsNamed", AProcessThatNeverComesIsNamed},
     {"WhoCompilesIsWaitedFor", WhoCompilesIsWaitedFor},
     {"AFailedCallIsRecordedAsOne", AFailedCallIsRecordedAsOne},
     {"ARankThatIsMissingInItsProcessFailsTheOthers", ARankThatIsMissingInItsProcessFailsTheOthers},
     {"WhoIsGoneIsNamedThoughItHadCome", WhoIsGoneIsNamedThoughItHadCome},
     {"WhoIsStoppedIsNamedThoughItHadCome", WhoIsStoppedIsNamedThoughItHadCome},
     {"OfAProcessOnlyThoseThatAreMissingAreNamed", OfAProcessOnlyThoseThatAreMissingAreNamed},
     {"AFailureInsideAProcessFailsTheOthers", AFailureInsideAProcessFailsTheOthers},
     {"DifferentCallsFailBoth", DifferentCallsFailBoth},
     {"WaitsOfAnyLengthAreNoMismatch", WaitsOfAnyLengthAreNoMismatch},
     {"AProcessThatLeavesIsNotWaitedFor", AProcessThatLeavesIsNotWaitedFor},
     {"WhoHasNotMadeACallIsTold", WhoHasNotMadeACallIsTold},
     {"EveryLaterCallFailsAtOnce", EveryLaterCallFailsAtOnce},
     {"AllWorksInTheNextSegment", AllWorksInTheNextSegment},
     {"AttachingDoesNotMendCallsInProgress", AttachingDoesNotMendCallsInProgress},
     {"ALateRankLeavesTheNewSegmentAlone", ALateRankLeavesTheNewSegmentAlone},
     {"AnOldCallMeetsNoNewOne", AnOldCallMeetsNoNewOne}});

}  // namespace
}  // namespace jaxcoll::testing::exchange_failing_test

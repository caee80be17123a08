// tests/cpp/meeting_test.cc: which call meets which, and that nothing else does.
#include <sched.h>  // sched_setscheduler

#include <atomic>   // std::atomic
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t
#include <limits>   // std::numeric_limits
#include <memory>   // std::make_unique
#include <string>   // std::string
#include <thread>   // std::thread
#include <utility>  // std::move
#include <vector>   // std::vector

#include "core/clock.h"
#include "host/call_site.h"
#include "host/runners.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::meeting_test {
namespace {

constexpr std::size_t kNumRanks[] = {1, 2, 3, 4, 8};

/// `iterations` calls of one site in one run, by one rank of a group that has all ranks.
Program Repeat(CallSite& site, std::size_t num_ranks, std::size_t rank, std::int64_t run,
               std::int64_t iterations, std::int64_t first = 0, std::size_t num_chunks = 1) {
  Stamped stamped(num_ranks, num_chunks);
  for (std::int64_t i = 0; i < iterations; ++i) {
    stamped.Verify(co_await stamped.Begin(site, rank, rank, run, first + i));
  }
}

void IterationsMeetTheirOwn(Context& context) {
  for (const std::size_t p : kNumRanks) {
    const Site site = MakeSite(1, OneGroup(p), std::make_unique<StampWork>());
    const std::int64_t run = FreshRuns();
    RunRanks(context, p, [&](std::size_t rank) { return Repeat(*site, p, rank, run, 300); });
  }
}

void RunsMeetTheirOwn(Context& context) {
  constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();
  for (const std::size_t p : kNumRanks) {
    const Site site = MakeSite(1, OneGroup(p), std::make_unique<StampWork>());
    const std::int64_t base = FreshRuns();
    for (const std::int64_t run :
         {base, base + 1, base + 2, base + 4, -base - 3, -base - 1, kLowest, kLowest + 1,
          std::numeric_limits<std::int64_t>::max()}) {
      RunRanks(context, p, [&](std::size_t rank) { return Repeat(*site, p, rank, run, 3); });
    }
  }
}

/// XLA counts runs in 32 bits, each program from where its fingerprint says.
void RunIdsMayRepeat(Context& context) {
  const std::size_t p = 4;
  const Site site = MakeSite(1, OneGroup(p), std::make_unique<StampWork>());
  const std::int64_t base = FreshRuns();
  std::int64_t before = -1;
  std::int64_t iteration = 0;
  for (const std::int64_t run : {7, 8, 7, 9, 7, 7, 8, 8, 7, 9}) {
    iteration = run == before ? iteration + 1 : 0;  // the count goes on where the same id follows
    before = run;
    RunRanks(context, p,
             [&](std::size_t rank) { return Repeat(*site, p, rank, base + run, 1, iteration); });
  }
}

/// Calls of a rank that computes for long between them; the first one is early. Counts where it has
/// waited for all of them in its own thread.
Program Compute(CallSite& site, std::size_t num_ranks, std::size_t rank, std::int64_t run,
                std::atomic<int>& num_stayed) {
  Stamped stamped(num_ranks, 1);
  const std::thread::id own = std::this_thread::get_id();
  for (std::int64_t i = 0; i < 3; ++i) {
    SpinUs(rank == 0 ? 500 : 1500);
    stamped.Verify(co_await stamped.Begin(site, rank, rank, run, i));
  }
  num_stayed += rank == 0 && std::this_thread::get_id() == own ? 1 : 0;
}

void ThreadsStayWhereProgramsCompute(Context& context) {
  for (const std::size_t p : {2, 4}) {
    const Site site = MakeSite(1, OneGroup(p), std::make_unique<StampWork>());
    const std::int64_t base = FreshRuns();
    std::atomic<int> num_stayed = 0;
    for (std::int64_t run = base; run < base + 100 && num_stayed < 3; ++run) {
      RunRanks(context, p,
               [&](std::size_t rank) { return Compute(*site, p, rank, run, num_stayed); });
    }
    context.Expect(num_stayed == 3, "threads stay");
  }
}

/// The thread of one rank may be needed for another, which then comes once the first has gone.
void NoThreadStaysForEver(Context& context) {
  const std::size_t p = 2;
  const Site site = MakeSite(1, OneGroup(p), std::make_unique<StampWork>());
  const std::int64_t base = FreshRuns();
  site->pace().NoteComputing(true);
  context.Expect(site->pace().Stays(), "the first one stays");
  for (std::int64_t run = base; run < base + 200; ++run) {
    RunThreads(context, 1, [&](std::size_t) {
      Repeat(*site, p, 0, run, 3).Start();
      Repeat(*site, p, 1, run, 3).Start();
    });
  }
}

/// Only programs for several devices are compiled for these.
void DevicesAreKnownWhereProgramsCantMove(Context& context) {
  for (const std::size_t p : kNumRanks) {
    const Site site = MakeSite(1, OneGroup(p), std::make_unique<StampWork>());
    context.Expect(site->FixedDevice(0) == -1, "nobody has been here");
    const std::int64_t run = FreshRuns();
    RunRanks(context, p, [&](std::size_t rank) { return Repeat(*site, p, rank, run, 1); });
    for (std::size_t rank = 0; rank < p; ++rank) {
      const std::int64_t device = kFirstDevice + static_cast<std::int64_t>(rank);
      context.Expect(site->FixedDevice(static_cast<std::int64_t>(rank)) == (p > 1 ? device : -1),
                     "the device of each member, if it can't move");
    }
    context.Expect(site->FixedDevice(static_cast<std::int64_t>(p)) == -1, "no member, no device");
  }
}

/// XLA starts independent calls in any order, and on each device in another.
void AnyOrderOfSitesWillDo(Context& context) {
  constexpr std::size_t kSites = 6;
  for (const std::size_t p : kNumRanks) {
    std::vector<Site> sites;
    for (std::size_t s = 0; s < kSites; ++s) {
      sites.push_back(MakeSite(s, OneGroup(p), std::make_unique<StampWork>()));
    }
    const std::int64_t base = FreshRuns();
    for (std::int64_t run = base; run < base + 50; ++run) {
      RunThreads(context, p, [&](std::size_t rank) {
        for (std::size_t i = 0; i < kSites; ++i) {
          const std::size_t s = (rank % 2 == 0 ? i : kSites - 1 - i);
          Repeat(*sites[(s + rank) % kSites], p, rank, run, 3).Start();
        }
      });
    }
  }
}

/// One call of the program, cloned by the compiler: same id, same run, same iteration.
void ClonesStayApart(Context& context) {
  const std::size_t p = 4;
  std::vector<Site> clones;
  for (std::size_t s = 0; s < 4; ++s) {
    clones.push_back(MakeSite(42, OneGroup(p), std::make_unique<StampWork>()));
  }
  const std::int64_t base = FreshRuns();
  for (std::int64_t run = base; run < base + 50; ++run) {
    RunThreads(context, p, [&](std::size_t rank) {
      for (std::size_t i = 0; i < clones.size(); ++i) {
        const std::size_t number = (i + rank) % clones.size();
        // To tell clones apart, a clone's number stands where the iteration would, which is 0.
        Repeat(*clones[number], p, rank, run, 1, static_cast<std::int64_t>(number)).Start();
      }
    });
  }
}

/// A (4, 2) mesh whose devices are listed in no order; calls over its rows, its columns and all.
void GroupsOfAMesh(Context& context) {
  constexpr std::int64_t kMesh[4][2] = {{3, 6}, {0, 1}, {7, 4}, {2, 5}};
  Groups rows;
  Groups columns(2);
  Groups all(1);
  struct Place {
    std::size_t row, column;
  };
  std::vector<Place> place(8);
  for (std::size_t i = 0; i < 4; ++i) {
    rows.push_back({kMesh[i][0], kMesh[i][1]});
    for (std::size_t j = 0; j < 2; ++j) {
      columns[j].push_back(kMesh[i][j]);
      all[0].push_back(kMesh[i][j]);
      place[static_cast<std::size_t>(kMesh[i][j])] = {i, j};
    }
  }
  const Site over_rows = MakeSite(1, rows, std::make_unique<StampWork>());
  const Site over_columns = MakeSite(2, columns, std::make_unique<StampWork>());
  const Site over_all = MakeSite(3, all, std::make_unique<StampWork>());
  const std::int64_t base = FreshRuns();
  for (std::int64_t run = base; run < base + 20; ++run) {
    RunRanks(context, 8, [&](std::size_t id) -> Program {
      const auto [row, column] = place[id];
      Stamped stamped(0);
      for (std::int64_t i = 0; i < 10; ++i) {
        // The group's number goes into the stamp's iteration: groups of one site must not meet.
        const auto in_group = [&](std::size_t group) {
          return i * 16 + static_cast<std::int64_t>(group);
        };
        stamped = Stamped(2);
        stamped.Verify(co_await stamped.Begin(*over_rows, id, column, run, in_group(row)));
        stamped = Stamped(4);
        stamped.Verify(co_await stamped.Begin(*over_columns, id, row, run, in_group(column)));
        stamped = Stamped(8);
        stamped.Verify(co_await stamped.Begin(*over_all, id, row * 2 + column, run, in_group(0)));
      }
    });
  }
}

/// Groups need not go through a site equally often (a `cond` on the group's number).
void GroupsCountForThemselves(Context& context) {
  const Site site = MakeSite(1, {{0, 1}, {2, 3}}, std::make_unique<StampWork>());
  const std::int64_t base = FreshRuns();
  for (std::int64_t run = base; run < base + 20; ++run) {
    RunRanks(context, 4, [&](std::size_t id) -> Program {
      Stamped stamped(2);
      for (std::int64_t i = 0; i < (id < 2 ? 3 : 10); ++i) {
        stamped.Verify(co_await stamped.Begin(*site, id, id % 2, run, i));
      }
    });
  }
}

void StrangersAreTurnedAway(Context& context) {
  const Site site = MakeSite(1, {{1, 3}}, std::make_unique<StampWork>());
  for (const std::int64_t id : {-1, 0, 2, 4, 1000}) {
    context.Expect(site->Begin(id, 0, 0).meeting == nullptr,
                   "device " + std::to_string(id) + " is in no group");
  }
  for (const std::int64_t id : {1, 3}) {
    const CallSite::Visit visit = site->Begin(id, 0, 0);
    context.Expect(visit.meeting != nullptr && visit.rank == static_cast<std::size_t>(id / 2),
                   "device " + std::to_string(id) + " has its rank");
  }
}

/// Runners help with a large move: every chunk runs once, and no rank goes on before the last.
void HelpersFinishBeforeAnybodyGoesOn(Context& context) {
  constexpr std::size_t kChunks = 16;
  for (const std::size_t p : kNumRanks) {
    auto work = std::make_unique<StampWork>(kChunks, std::size_t{1} << 20);
    std::atomic<std::size_t> helped{0};
    work->in_chunk = [&helped](std::size_t) {
      if (on_rank_thread) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));  // leaves some to the helper
      } else {
        helped.fetch_add(1, std::memory_order_relaxed);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // and the helper ends last
      }
    };
    const Site site = MakeSite(1, OneGroup(p), std::move(work));
    const std::int64_t run = FreshRuns();
    RunRanks(context, p, [&](std::size_t rank) {
      return Repeat(*site, p, rank, run, /*iterations=*/30, /*first=*/0, kChunks);
    });
    context.Expect(Runners::Get().num_cores() == 1 || helped.load() > 0, "a runner helped");
  }
}

/// Several threads take chunks of one call as fast as they can, and helpers come late, when the
/// next call is under way.
void EveryChunkRunsOnce(Context& context) {
  for (const std::size_t num_chunks : Sizes{3, 100}) {
    for (const std::size_t p : kNumRanks) {
      auto work = std::make_unique<StampWork>(num_chunks, std::size_t{1} << 20);
      if (num_chunks > 3) {
        work->in_chunk = [](std::size_t) {
          const std::int64_t end_ns = NowNs() + 300;  // long enough, in all, for a helper to come
          while (NowNs() < end_ns) {
          }
        };
      }
      const Site site = MakeSite(1, OneGroup(p), std::move(work));
      const std::int64_t run = FreshRuns();
      RunRanks(context, p, [&](std::size_t rank) {
        return Repeat(*site, p, rank, run, /*iterations=*/600, /*first=*/0, num_chunks);
      });
    }
  }
}

/// Ranks take chunks as they come, alone and with runners' help.
void EveryEarlyChunkRunsOnce(Context& context) {
  for (const std::size_t bytes : Sizes{0, std::size_t{1} << 20}) {
    for (const std::size_t p : kNumRanks) {
      const Site site = MakeSite(1, OneGroup(p), std::make_unique<EarlyStampWork>(p, bytes));
      const std::int64_t run = FreshRuns();
      RunRanks(context, p, [&](std::size_t rank) -> Program {
        Stamped stamped(1, p);
        for (std::int64_t i = 0; i < 600; ++i) {
          stamped.Verify(co_await stamped.Begin(*site, rank, rank, run, i));
        }
      });
    }
  }
}

/// Also those of a rank that came when there was a rank at work for each core, though with nothing
/// left to do.
void ChunksRunBeforeTheLastRankComes(Context& context) {
  const std::size_t num_cores = Runners::Get().num_cores();
  const std::size_t p = num_cores + 2;
  for (std::size_t late = 0; late < p; ++late) {
    std::atomic<std::size_t> num_come{0};
    std::atomic<std::size_t> num_run{0};
    const auto wait_for_chunks = [&](std::size_t count) {
      const std::int64_t until_ns = NowNs() + 20'000'000'000;
      while (num_run.load() < count && NowNs() < until_ns) {
        SleepMs(1);
      }
    };
    auto work = std::make_unique<EarlyStampWork>(p);
    work->on_arrival = [&](std::size_t count) {
      num_come.store(count);
      if (count == num_cores + 1) {
        wait_for_chunks(num_cores * num_cores);
        SleepMs(10);  // the others find that nothing is left
      }
    };
    work->in_chunk = [&](const Stamp& source, std::size_t target) {
      while (num_come.load() <= num_cores) {
        SleepMs(1);
      }
      if (source.rank != late && target != late) {
        num_run.fetch_add(1);
      }
    };
    const Site site = MakeSite(1, OneGroup(p), std::move(work));
    const std::int64_t run = FreshRuns();
    std::size_t before = 0;
    RunRanks(context, p, [&](std::size_t rank) -> Program {
      if (rank == late) {
        wait_for_chunks((p - 1) * (p - 1));
        before = num_run.load();
      }
      Stamped stamped(1, p);
      stamped.Verify(co_await stamped.Begin(*site, rank, rank, run, 0));
    });
    context.Expect(before == (p - 1) * (p - 1),
                   std::to_string(before) + " chunks before rank " + std::to_string(late));
  }
}

/// While it lives, every core has something better to do than to run a thread of SCHED_IDLE.
class BusyCores {
 public:
  BusyCores() {
    for (std::size_t i = 0; i < Runners::Get().num_cores(); ++i) {
      threads_.emplace_back([this] {
        while (!ended_.load(std::memory_order_relaxed)) {
        }
      });
    }
  }
  ~BusyCores() {
    ended_.store(true);
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

 private:
  std::atomic<bool> ended_{false};
  std::vector<std::thread> threads_;
};

void SetPolicy(int policy) {
  const sched_param param{};
  Check(sched_setscheduler(0, policy, &param) == 0, "the scheduling policy can be set");
}

/// Helpers finish the call before the last rank to come takes a chunk, for want of a core, and the
/// other rank opens the meeting for the next call.
void TheLastRankMayLeaveLate(Context& context) {
  const BusyCores busy;
  for (int i = 0; i < 200; ++i) {
    const Site site =
        MakeSite(1, OneGroup(2), std::make_unique<StampWork>(2, std::size_t{1} << 20));
    const std::int64_t run = FreshRuns();
    RunThreads(context, 1, [&](std::size_t) {
      Repeat(*site, 2, /*rank=*/0, run, /*iterations=*/2, /*first=*/0, /*num_chunks=*/2).Start();
      SetPolicy(SCHED_IDLE);
      Repeat(*site, 2, /*rank=*/1, run, /*iterations=*/2, /*first=*/0, /*num_chunks=*/2).Start();
    });
  }
}

/// One call on a site that its program frees right after.
Program Own(std::shared_ptr<CallSite> site, std::size_t num_ranks, std::size_t rank,
            std::int64_t run, std::size_t num_chunks) {
  const std::shared_ptr<CallSite> mine = std::move(site);  // not freed later than the program ends
  Stamped stamped(num_ranks, num_chunks);
  stamped.Verify(co_await stamped.Begin(*mine, rank, rank, run, 0));
}

/// The program that goes on last frees the site while a helper may still be on its way.
void ASiteEndsWithItsProgram(Context& context) {
  const std::int64_t base = FreshRuns();
  for (const std::size_t p :
       Sizes{1, 4}) {  // a rank that needs nobody may end before its helper comes
    for (std::int64_t run = base; run < base + 500; ++run) {
      std::vector<std::shared_ptr<CallSite>> held(
          p, std::shared_ptr<CallSite>(
                 MakeSite(1, OneGroup(p), std::make_unique<StampWork>(2, std::size_t{1} << 20))
                     .release(),
                 Release()));
      RunRanks(context, p, [&held, p, run](std::size_t rank) {
        return Own(std::move(held[rank]), p, rank, run, /*num_chunks=*/2);
      });
    }
  }
}

/// A call of another execution comes to an open meeting. Returns when it has been refused.
Program Overlaps(CallSite& site, std::size_t rank, std::int64_t run) {
  Stamped stamped(2);
  const CallResult result = co_await stamped.Begin(site, rank, rank, run, 0);
  Check(!result.ok && result.error.find("overlap") != std::string::npos,
        "the overlap is refused, and said: " + result.error);
  Check(stamped.untouched(), "a refused rank's buffer is left alone");
}

/// XLA runs the launches of a program one after the other, and so never does this. If it did, or if
/// a device lost count, ranks must not meet for different executions.
void OverlappingExecutionsAreRefused(Context& context) {
  for (const std::size_t other : Sizes{1, 0}) {  // another rank, and the one that waits
    const Site site = MakeSite(1, OneGroup(2), std::make_unique<StampWork>());
    const std::int64_t run = FreshRuns();
    RunThreads(context, 1, [&](std::size_t) {
      Repeat(*site, 2, /*rank=*/0, run, 1).Start();
      Overlaps(*site, other, run + 1).Start();
      Repeat(*site, 2, /*rank=*/1, run, 1).Start();
    });
  }
}

void OtherIterationsAreRefused(Context& context) {
  const Site site = MakeSite(1, OneGroup(2), std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  const auto waits = [&](std::size_t rank) -> Program {
    Stamped stamped(2);
    const CallResult result = co_await stamped.Begin(*site, rank, rank, run, 0);
    Check(!result.ok, "the run has failed for all ranks");
  };
  RunThreads(context, 1, [&](std::size_t) {
    waits(/*rank=*/0).Start();
    site->Begin(/*logical_id=*/1, kFirstDevice + 1, run);  // an execution that never arrives
    Overlaps(*site, /*rank=*/1, run).Start();
  });
}

const Suite suite("meeting",
                  {{"IterationsMeetTheirOwn", IterationsMeetTheirOwn},
                   {"RunsMeetTheirOwn", RunsMeetTheirOwn},
                   {"RunIdsMayRepeat", RunIdsMayRepeat},
                   {"ThreadsStayWhereProgramsCompute", ThreadsStayWhereProgramsCompute},
                   {"NoThreadStaysForEver", NoThreadStaysForEver},
                   {"DevicesAreKnownWhereProgramsCantMove", DevicesAreKnownWhereProgramsCantMove},
                   {"AnyOrderOfSitesWillDo", AnyOrderOfSitesWillDo},
                   {"ClonesStayApart", ClonesStayApart},
                   {"GroupsOfAMesh", GroupsOfAMesh},
                   {"GroupsCountForThemselves", GroupsCountForThemselves},
                   {"StrangersAreTurnedAway", StrangersAreTurnedAway},
                   {"HelpersFinishBeforeAnybodyGoesOn", HelpersFinishBeforeAnybodyGoesOn},
                   {"EveryChunkRunsOnce", EveryChunkRunsOnce},
                   {"EveryEarlyChunkRunsOnce", EveryEarlyChunkRunsOnce},
                   {"ChunksRunBeforeTheLastRankComes", ChunksRunBeforeTheLastRankComes},
                   {"TheLastRankMayLeaveLate", TheLastRankMayLeaveLate},
                   {"ASiteEndsWithItsProgram", ASiteEndsWithItsProgram},
                   {"OverlappingExecutionsAreRefused", OverlappingExecutionsAreRefused},
                   {"OtherIterationsAreRefused", OtherIterationsAreRefused}});

}  // namespace
}  // namespace jaxcoll::testing::meeting_test

// tests/cpp/stress_test.cc: programs drawn by chance, for JAXCOLL_STRESS_S seconds (3 by default):
// many sites, groups, loops, clones, parts that run beside each other in any order, delays, calls
// of others that block, and deadlines.
#include <atomic>   // std::atomic
#include <barrier>  // std::barrier
#include <chrono>   // std::chrono::microseconds
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <cstdio>   // std::printf
#include <cstdlib>  // std::getenv, std::strtod
#include <memory>   // std::make_unique, std::shared_ptr, std::unique_ptr
#include <random>   // std::mt19937_64
#include <string>   // std::to_string
#include <thread>   // std::this_thread
#include <vector>   // std::vector

#include "core/clock.h"
#include "host/call_site.h"
#include "host/watchdog.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::stress_test {
namespace {

using Random = std::mt19937_64;

std::size_t Below(Random& random, std::size_t n) { return random() % n; }

double StressSeconds() {
  const char* const text = std::getenv("JAXCOLL_STRESS_S");  // NOLINT(concurrency-mt-unsafe)
  return text == nullptr ? 3.0 : std::strtod(text, nullptr);
}

/// A site of the drawn program, and where each device stands in it.
struct DrawnSite {
  std::shared_ptr<CallSite> site;
  std::size_t group_size;
  std::vector<std::size_t> group;  // by logical id
  std::vector<std::size_t> rank;
  std::size_t num_chunks;
  bool is_early;  // an EarlyStampWork
};

DrawnSite DrawSite(Random& random, std::size_t num_devices, std::uint64_t id) {
  std::vector<std::size_t> sizes;
  for (std::size_t size = 1; size <= num_devices; ++size) {
    if (num_devices % size == 0 && size > 1) {
      sizes.push_back(size);
    }
  }
  DrawnSite drawn;
  drawn.group_size = sizes.empty() ? 1 : sizes[Below(random, sizes.size())];
  std::vector<std::int64_t> ids(num_devices);
  std::iota(ids.begin(), ids.end(), std::int64_t{0});
  std::shuffle(ids.begin(), ids.end(), random);
  Groups groups;
  drawn.group.resize(num_devices);
  drawn.rank.resize(num_devices);
  for (std::size_t i = 0; i < num_devices; ++i) {
    if (i % drawn.group_size == 0) {
      groups.emplace_back();
    }
    groups.back().push_back(ids[i]);
    drawn.group[static_cast<std::size_t>(ids[i])] = i / drawn.group_size;
    drawn.rank[static_cast<std::size_t>(ids[i])] = i % drawn.group_size;
  }
  const bool helped = Below(random, 3) == 0;
  const std::size_t bytes = helped ? std::size_t{1} << 20 : 0;
  drawn.num_chunks = helped ? 2 + Below(random, 6) : 1;
  drawn.is_early = Below(random, 3) == 0;
  std::unique_ptr<const Work> work;
  if (drawn.is_early) {
    drawn.num_chunks = drawn.group_size;
    work = std::make_unique<EarlyStampWork>(drawn.group_size, bytes);
  } else {
    work = std::make_unique<StampWork>(drawn.num_chunks, bytes);
  }
  drawn.site =
      std::shared_ptr<CallSite>(MakeSite(id, groups, std::move(work)).release(), Release());
  return drawn;
}

/// One of the parts of a program that run beside each other: its sites in a loop, each of them
/// called one to three times; where `theirs` is given, XLA's own collective after each turn.
struct Part {
  std::vector<DrawnSite> sites;
  std::vector<std::int64_t> times;
  std::int64_t turns;
  std::shared_ptr<std::barrier<>> theirs;
};

void Delay(Random& random) {
  const std::size_t kind = Below(random, 40);
  if (kind == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(Below(random, 2000)));
  } else if (kind < 4) {
    const std::int64_t end_ns = NowNs() + static_cast<std::int64_t>(Below(random, 100'000));
    while (NowNs() < end_ns) {
    }
  }
}

Program RunPart(const Part& part, std::size_t device, std::int64_t run, std::uint64_t seed) {
  Random random(seed);
  Stamped stamped(0);
  for (std::int64_t turn = 0; turn < part.turns; ++turn) {
    for (std::size_t s = 0; s < part.sites.size(); ++s) {
      const DrawnSite& drawn = part.sites[s];
      for (std::int64_t i = 0; i < part.times[s]; ++i) {
        Delay(random);
        stamped = Stamped(drawn.is_early ? 1 : drawn.group_size, drawn.num_chunks);
        // The stamp's iteration also says which group it is.
        const std::int64_t at = (turn * part.times[s] + i) * 16;
        const CallResult result =
            co_await stamped.Begin(*drawn.site, device, drawn.rank[device], run,
                                   at + static_cast<std::int64_t>(drawn.group[device]));
        stamped.Verify(result);
      }
    }
    if (part.theirs != nullptr) {
      part.theirs->arrive_and_wait();
    }
  }
}

void ProgramsDrawnByChance(Context& context) {
  const std::int64_t end_ns = NowNs() + static_cast<std::int64_t>(StressSeconds() * 1e9);
  std::uint64_t seed = 1;
  std::int64_t run = -500;  // through 0, and odd and even
  for (; NowNs() < end_ns && context.failures() == 0; ++seed) {
    Random random(seed);
    const std::size_t p = std::size_t{1} + Below(random, 8);
    std::vector<Part> parts(1 + Below(random, 4));
    for (std::size_t i = 0; i < parts.size(); ++i) {
      Part& part = parts[i];
      part.turns = static_cast<std::int64_t>(1 + Below(random, 6));
      for (std::size_t s = 0; s < 1 + Below(random, 4); ++s) {
        part.sites.push_back(DrawSite(random, p, /*id=*/Below(random, 3)));  // clones share an id
        part.times.push_back(static_cast<std::int64_t>(1 + Below(random, 3)));
      }
      // XLA orders its own collectives, and they block: in one part only, and not the first, whose
      // thread starts the others.
      if (i + 1 == parts.size() && Below(random, 2) == 0) {
        part.theirs = std::make_shared<std::barrier<>>(static_cast<std::ptrdiff_t>(p));
      }
    }
    const std::size_t runs = 1 + Below(random, 5);
    for (std::size_t r = 0; r < runs; ++r, ++run) {
      RunThreads(context, p, [&](std::size_t device) {
        Random order_random(seed * 64 + device);
        std::vector<std::size_t> order(parts.size() - 1);
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::shuffle(order.begin(), order.end(), order_random);
        order.push_back(parts.size() - 1);  // it may block this thread
        for (const std::size_t i : order) {
          RunPart(parts[i], device, run, order_random()).Start();
        }
      });
    }
    context.Expect(context.failures() == 0, "seed " + std::to_string(seed));
  }
  std::printf("     %llu programs\n", static_cast<unsigned long long>(seed - 1));
}

/// The same with ranks that stay away or come late: every call either succeeds on all ranks of its
/// group with the right result or fails on all of them, and the next run works.
void RanksThatComeLate(Context& context) {
  Watchdog::Get().SetTimeout(3'000'000);
  const std::int64_t end_ns = NowNs() + static_cast<std::int64_t>(StressSeconds() / 3 * 1e9);
  std::int64_t run = 1'000'000;
  std::size_t failed_runs = 0;
  for (std::uint64_t seed = 1; NowNs() < end_ns && context.failures() == 0; ++seed) {
    Random random(seed);
    const std::size_t p = std::size_t{2} + Below(random, 4);
    std::vector<Site> sites;
    for (std::size_t s = 0; s < 3; ++s) {
      sites.push_back(MakeSite(s, OneGroup(p), std::make_unique<StampWork>(3, s << 20)));
    }
    for (int r = 0; r < 6; ++r, ++run) {
      const bool late = r % 3 == 1;
      std::vector<std::atomic<std::size_t>> succeeded(sites.size());
      RunThreads(context, p, [&](std::size_t rank) {
        Random mine(seed * 64 + rank);
        for (std::size_t i = 0; i < sites.size(); ++i) {
          const std::size_t s = (i + rank) % sites.size();
          if (late && rank == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(Below(mine, 8000)));
          }
          [](CallSite& site, std::size_t num_ranks, std::size_t at, std::int64_t in_run,
             std::atomic<std::size_t>& ok) -> Program {
            Stamped stamped(num_ranks, 3);
            const CallResult result = co_await stamped.Begin(site, at, at, in_run, 0);
            if (result.ok) {
              stamped.Verify(result);
              ok.fetch_add(1);
            } else {
              Check(stamped.untouched(), "a call that failed has touched the result");
            }
          }(*sites[s], p, rank, run, succeeded[s])
                                                  .Start();
        }
      });
      bool failed = false;
      for (const auto& ok : succeeded) {
        context.Expect(ok.load() == 0 || ok.load() == p, "seed " + std::to_string(seed) + ": " +
                                                             std::to_string(ok.load()) + " of " +
                                                             std::to_string(p) + " succeeded");
        failed = failed || ok.load() == 0;
      }
      failed_runs += failed ? 1 : 0;
    }
  }
  Watchdog::Get().SetTimeout(300'000'000'000);
  context.Expect(failed_runs > 0, "some runs failed");
  std::printf("     %zu runs failed\n", failed_runs);
}

const Suite suite("stress", {{"ProgramsDrawnByChance", ProgramsDrawnByChance},
                             {"RanksThatComeLate", RanksThatComeLate}});

}  // namespace
}  // namespace jaxcoll::testing::stress_test

// tests/cpp/processes_stress_test.cc: programs drawn by chance over processes, which are threads
// here, for JAXCOLL_STRESS_S seconds (3 by default): many sites, groups, ops and sizes, parts that
// run beside each other in any order, delays, and failures with a new segment after each.
#include <algorithm>  // std::shuffle
#include <atomic>     // std::atomic
#include <chrono>     // std::chrono::microseconds
#include <cstddef>    // std::size_t
#include <cstdint>    // std::int64_t, std::uint64_t
#include <cstdio>     // std::printf
#include <cstdlib>    // std::getenv, std::strtod
#include <memory>     // std::make_unique, std::unique_ptr
#include <numeric>    // std::iota
#include <string>     // std::string, std::to_string
#include <thread>     // std::this_thread
#include <vector>     // std::vector

#include "core/clock.h"
#include "ops.h"
#include "processes.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::processes_stress_test {
namespace {

double StressSeconds() {
  const char* const text = std::getenv("JAXCOLL_STRESS_S");  // NOLINT(concurrency-mt-unsafe)
  return text == nullptr ? 3.0 : std::strtod(text, nullptr);
}

/// A site of the drawn program, and where each device stands in it.
struct DrawnSite {
  Op op;
  std::size_t group_size = 0;
  std::size_t num_groups = 0;
  std::vector<std::size_t> group;  // by logical id
  std::vector<std::size_t> rank;
  std::unique_ptr<SharedSite> site;
};

DrawnSite DrawSite(Random& random, Host& host, const Places& process_of, std::uint64_t id) {
  const std::size_t num_devices = process_of.size();
  std::vector<std::size_t> sizes;
  for (std::size_t size = 2; size <= num_devices; ++size) {
    if (num_devices % size == 0) {
      sizes.push_back(size);
    }
  }
  DrawnSite drawn;
  drawn.group_size = sizes[Below(random, sizes.size())];
  drawn.num_groups = num_devices / drawn.group_size;
  drawn.op = DrawOp(random, drawn.group_size, 6 * host.segment().shape().window_bytes);
  std::vector<std::int64_t> ids(num_devices);
  std::iota(ids.begin(), ids.end(), std::int64_t{0});
  std::shuffle(ids.begin(), ids.end(), random);
  Groups groups(drawn.num_groups);
  drawn.group.resize(num_devices);
  drawn.rank.resize(num_devices);
  for (std::size_t i = 0; i < num_devices; ++i) {
    drawn.group[ids[i]] = i / drawn.group_size;
    drawn.rank[ids[i]] = i % drawn.group_size;
    groups[i / drawn.group_size].push_back(ids[i]);
  }
  drawn.site = std::make_unique<SharedSite>(host, id, groups, process_of, drawn.op.make);
  return drawn;
}

/// One of the parts of a program that run beside each other: its sites in a loop.
struct Part {
  std::vector<DrawnSite> sites;
  std::vector<std::size_t> order;  // of the calls
  // By call and group.
  std::vector<std::vector<std::unique_ptr<CallData>>> data;
};

Part DrawPart(Random& random, Host& host, const Places& process_of, std::uint64_t first_id) {
  Part part;
  const std::size_t num_sites = 1 + Below(random, 3);
  for (std::size_t s = 0; s < num_sites; ++s) {
    part.sites.push_back(DrawSite(random, host, process_of, first_id + s));
  }
  const std::size_t num_calls = 1 + Below(random, 12);
  for (std::size_t i = 0; i < num_calls; ++i) {
    part.order.push_back(Below(random, num_sites));
    part.data.emplace_back();
    for (std::size_t g = 0; g < part.sites[part.order[i]].num_groups; ++g) {
      const DrawnSite& drawn = part.sites[part.order[i]];
      part.data[i].push_back(std::make_unique<CallData>(drawn.op, drawn.group_size, random()));
    }
  }
  return part;
}

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

/// Ends at the first call that fails; `wanted` is the only error there may be, empty: none.
Program RunPart(const Part& part, std::size_t device, std::int64_t run, std::uint64_t seed,
                const std::string& wanted, std::atomic<std::size_t>& num_failed) {
  Random random(seed);
  for (std::size_t i = 0; i < part.order.size(); ++i) {
    Delay(random);
    const DrawnSite& drawn = part.sites[part.order[i]];
    const CallData& data = *part.data[i][drawn.group[device]];
    const std::size_t rank = drawn.rank[device];
    const CallResult result =
        co_await drawn.site->Begin(device, run, data.operands(rank), data.results(rank));
    if (!result.ok) {
      Check(!wanted.empty() && result.error == wanted, result.error);
      num_failed.fetch_add(1);
      co_return;
    }
    Check(data.Problem(rank).empty(), [&] { return data.Problem(rank); });
  }
}

/// One host, and some programs one after the other; returns how many parts have failed.
std::size_t RunHost(Context& context, std::uint64_t seed, bool fails) {
  Random random(seed);
  const std::size_t num_processes = 2 + Below(random, 3);
  Places process_of;
  for (std::size_t p = 0; p < num_processes; ++p) {
    process_of.insert(process_of.end(), 1 + Below(random, 3), p);
  }
  if (Below(random, 2) == 0) {
    std::shuffle(process_of.begin(), process_of.end(), random);
  }
  const std::size_t num_parts = 1 + Below(random, 3);
  // Half of them for each call that a process may have open: the others may be left ahead.
  Host host(num_processes, {.num_lanes = num_parts * 6 + Below(random, 4),
                            .window_bytes = std::size_t{16384} << Below(random, 3)});
  std::atomic<std::size_t> num_failed{0};
  const std::size_t num_programs = 1 + Below(random, 4);
  for (std::size_t r = 0; r < num_programs; ++r) {
    std::vector<Part> parts;
    for (std::size_t i = 0; i < num_parts; ++i) {
      parts.push_back(DrawPart(random, host, process_of, 100 * i));
    }
    std::string wanted;
    if (fails) {
      wanted.append("program ").append(std::to_string(r));
    }
    const std::int64_t run = FreshRuns();
    const std::size_t patience_us = Below(random, 3000);
    RunThreads(context, process_of.size() + (fails ? 1 : 0), [&](std::size_t device) {
      if (device == process_of.size()) {
        std::this_thread::sleep_for(std::chrono::microseconds(patience_us));
        host.segment().Fail(wanted);
        return;
      }
      Random mine(seed * 64 + device);
      std::vector<std::size_t> order(parts.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::shuffle(order.begin(), order.end(), mine);
      for (const std::size_t i : order) {
        RunPart(parts[i], device, run, mine(), wanted, num_failed).Start();
      }
    });
    if (fails) {
      host.Attach();
    }
  }
  return num_failed.load();
}

void RunHosts(Context& context, double seconds, bool fails) {
  const std::int64_t end_ns = NowNs() + static_cast<std::int64_t>(seconds * 1e9);
  std::uint64_t seed = 1;
  std::size_t num_failed = 0;
  for (; NowNs() < end_ns && context.failures() == 0; ++seed) {
    num_failed += RunHost(context, seed, fails);
    context.Expect(context.failures() == 0, "seed " + std::to_string(seed));
  }
  context.Expect((num_failed > 0) == fails, std::to_string(num_failed) + " parts failed");
  std::printf("     %llu hosts\n", static_cast<unsigned long long>(seed - 1));
}

void ProgramsDrawnByChance(Context& context) {
  RunHosts(context, StressSeconds(), /*fails=*/false);
}

/// At any moment, and in the next segment all is well.
void JobsThatFail(Context& context) { RunHosts(context, StressSeconds() / 3, /*fails=*/true); }

const Suite suite("processes_stress", {{"ProgramsDrawnByChance", ProgramsDrawnByChance},
                                       {"JobsThatFail", JobsThatFail}});

}  // namespace
}  // namespace jaxcoll::testing::processes_stress_test

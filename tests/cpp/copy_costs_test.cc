// What copies between processes cost is measured by all of them at once.
#include "host/copy_costs.h"

#include <cmath>    // std::isfinite, std::isinf
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t
#include <thread>   // std::jthread
#include <vector>   // std::vector

#include "core/clock.h"
#include "processes.h"
#include "testing.h"

namespace jaxcoll::testing::copy_costs_test {
namespace {

constexpr std::size_t kWindowBytes = std::size_t{300} * 1024;
constexpr std::int64_t kLimitNs = 20'000'000'000;  // against hanging

std::vector<CopyCostsBySize> MeasureIn(const Host& host, std::size_t num_present) {
  std::vector<CopyCostsBySize> costs(num_present);
  std::vector<std::jthread> threads;
  for (std::size_t p = 0; p < num_present; ++p) {
    threads.emplace_back([&, p] { costs[p] = MeasureCopies(*host.job(p).session()); });
  }
  threads.clear();
  return costs;
}

void AllMeasure(Context& context) {
  for (const std::size_t num_processes : {2, 3, 4}) {
    const Host host(num_processes, {.window_bytes = kWindowBytes});
    for (const auto& [cache_bytes, cached, large] : MeasureIn(host, num_processes)) {
      context.Expect(cache_bytes > 0, "caches hold something");
      for (const CopyCosts& costs : {cached, large}) {
        context.Expect(costs.leaving > 0 && costs.taking > 0 && costs.reading > 0,
                       "copies take time");
        context.Expect(std::isfinite(costs.reading), "memory can be read");
      }
    }
  }
}

void NobodyWaitsForOneThatDoesNotCome(Context& context) {
  const Host host(3, {.window_bytes = kWindowBytes});
  const std::int64_t begin_ns = NowNs();
  for (const auto& [cache_bytes, cached, large] : MeasureIn(host, 2)) {
    context.Expect(std::isinf(cached.reading) && std::isinf(large.reading), "windows are left");
  }
  context.Expect(NowNs() - begin_ns < kLimitNs, "in a moment");
  // It comes when the others are gone.
  context.Expect(std::isinf(MeasureCopies(*host.job(2).session()).large.reading), "it goes, too");
}

void TinyWindows(Context& context) {
  const Host host(2, {.window_bytes = 4096});
  context.Expect(std::isinf(MeasureIn(host, 1)[0].cached.reading), "nothing to measure");
}

void LargeCallsHaveCostsOfTheirOwn(Context& context) {
  const CopyCostsBySize costs{
      .cache_bytes = 1000, .cached = {.leaving = 1}, .large = {.leaving = 2}};
  context.Expect(costs.Of(0) == costs.cached && costs.Of(999) == costs.cached, "what caches hold");
  context.Expect(costs.Of(1000) == costs.large, "what they do not");
}

const Suite suite("copy_costs",
                  {{"AllMeasure", AllMeasure},
                   {"LargeCallsHaveCostsOfTheirOwn", LargeCallsHaveCostsOfTheirOwn},
                   {"NobodyWaitsForOneThatDoesNotCome", NobodyWaitsForOneThatDoesNotCome},
                   {"TinyWindows", TinyWindows}});

}  // namespace
}  // namespace jaxcoll::testing::copy_costs_test

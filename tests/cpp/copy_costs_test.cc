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
    for (const CopyCostsBySize& measured : MeasureIn(host, num_processes)) {
      for (const CopyCosts& costs : measured.each) {
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
  for (const CopyCostsBySize& measured : MeasureIn(host, 2)) {
    context.Expect(measured == CopyCostsBySize{}, "windows are left");
  }
  context.Expect(NowNs() - begin_ns < kLimitNs, "in a moment");
  // It comes when the others are gone.
  context.Expect(MeasureCopies(*host.job(2).session()) == CopyCostsBySize{}, "it goes, too");
}

void TinyWindows(Context& context) {
  const Host host(2, {.window_bytes = 4096});
  context.Expect(MeasureIn(host, 1)[0] == CopyCostsBySize{}, "nothing to measure");
}

void EachSizeHasCostsOfItsOwn(Context& context) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  const CopyCostsBySize costs{.each = {{{.leaving = 1}, {.leaving = 4}, {.leaving = 16}}}};
  context.Expect(std::isinf(costs.each[0].reading), "what was not measured is not read");
  for (const std::size_t bytes : {std::size_t{0}, kMiB, 2 * kMiB - 1}) {
    context.Expect(costs.Of(bytes).leaving == 1, "that of 1 MiB");
  }
  for (const std::size_t bytes : {2 * kMiB, 4 * kMiB, 8 * kMiB - 1}) {
    context.Expect(costs.Of(bytes).leaving == 4, "that of 4 MiB");
  }
  for (const std::size_t bytes : {8 * kMiB, 16 * kMiB, 1024 * kMiB}) {
    context.Expect(costs.Of(bytes).leaving == 16, "that of 16 MiB");
  }
}

const Suite suite("copy_costs",
                  {{"AllMeasure", AllMeasure},
                   {"EachSizeHasCostsOfItsOwn", EachSizeHasCostsOfItsOwn},
                   {"NobodyWaitsForOneThatDoesNotCome", NobodyWaitsForOneThatDoesNotCome},
                   {"TinyWindows", TinyWindows}});

}  // namespace
}  // namespace jaxcoll::testing::copy_costs_test

#include "core/quick_clock.h"

#include "core/clock.h"

#if defined(__x86_64__)

#include <cpuid.h>  // __get_cpuid

#include <atomic>  // std::atomic

namespace jaxcoll {
namespace {

// For so long ticks are counted: whatever goes wrong with them, times are off by no more.
constexpr std::int64_t kFreshNs = 20'000;
// So far apart are the looks that tell how long a tick takes.
constexpr std::int64_t kMeasureNs = 1'000'000;
// Between the clock and the ticks of one look: else the thread has lost its core in between.
constexpr std::uint64_t kMaxGapTicks = 1000;
// Of a tick's length, which is kept a thousandth too short: a time is early rather than late.
constexpr unsigned kFractionBits = 32;

bool AreTicksSteady() {
  constexpr unsigned kPowerManagement = 0x80000007;
  constexpr unsigned kInvariantTsc = 1U << 8;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(kPowerManagement, &a, &b, &c, &d) != 0 && (d & kInvariantTsc) != 0;
}

// Nanoseconds << kFractionBits. 0: not known yet.
std::atomic<std::uint64_t> tick_ns{0};

struct Look {
  std::uint64_t ticks = 0;
  std::int64_t ns = 0;
};

// One thread's.
struct QuickClock {
  Look first;  // ns 0: none
  Look last;
  std::uint64_t fresh_ticks = 0;  // after `last`
  std::uint64_t tick = 0;         // tick_ns

  std::int64_t LookAgain();
};

void Measure(const Look& first, const Look& last) {
  static const bool are_steady = AreTicksSteady();
  const std::int64_t ns = last.ns - first.ns;
  if (are_steady && last.ticks > first.ticks) {
    const double tick = static_cast<double>(ns) / static_cast<double>(last.ticks - first.ticks);
    tick_ns.store(static_cast<std::uint64_t>(
                      0.999 * tick * static_cast<double>(std::uint64_t{1} << kFractionBits)),
                  std::memory_order_relaxed);
  }
}

std::int64_t QuickClock::LookAgain() {
  const std::uint64_t before = __builtin_ia32_rdtsc();
  const std::int64_t now_ns = NowNs();
  const Look look{.ticks = __builtin_ia32_rdtsc(), .ns = now_ns};
  fresh_ticks = 0;
  if (look.ticks - before > kMaxGapTicks) {
    return now_ns;
  }
  if (first.ns == 0) {
    first = look;
  }
  tick = tick_ns.load(std::memory_order_relaxed);
  if (tick == 0 && look.ns - first.ns >= kMeasureNs) {
    Measure(first, look);
    tick = tick_ns.load(std::memory_order_relaxed);
  }
  if (tick != 0) {
    last = look;
    fresh_ticks = (static_cast<std::uint64_t>(kFreshNs) << kFractionBits) / tick;
  }
  return now_ns;
}

thread_local constinit QuickClock quick_clock;

}  // namespace

std::int64_t QuickNowNs() {
  QuickClock& clock = quick_clock;
  const std::uint64_t ticks = __builtin_ia32_rdtsc() - clock.last.ticks;
  if (ticks < clock.fresh_ticks) {
    return clock.last.ns + static_cast<std::int64_t>(ticks * clock.tick >> kFractionBits);
  }
  return clock.LookAgain();
}

}  // namespace jaxcoll

#else

namespace jaxcoll {

std::int64_t QuickNowNs() { return NowNs(); }

}  // namespace jaxcoll

#endif

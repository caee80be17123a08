// tests/cpp/quick_clock_test.cc: a clock that counts ticks between looks at the real one.
#include "core/quick_clock.h"

#include <atomic>   // std::atomic
#include <chrono>   // std::chrono::nanoseconds
#include <cstdint>  // std::int64_t
#include <string>   // std::to_string
#include <thread>   // std::thread
#include <vector>   // std::vector

#include "core/clock.h"
#include "testing.h"

namespace jaxcoll::testing::quick_clock_test {
namespace {

// Of the length of a tick, which are counted for 20 us at most, and of a look itself.
constexpr std::int64_t kSlackNs = 1'000;
// Beyond what it takes to measure ticks.
constexpr std::int64_t kFollowedNs = 30'000'000;

// How many times are not between two looks at the real clock, or go back.
int CountWrong() {
  int num_wrong = 0;
  std::int64_t last_ns = 0;
  const std::int64_t begun_ns = NowNs();
  for (std::int64_t before_ns = begun_ns; before_ns < begun_ns + kFollowedNs;) {
    const std::int64_t now_ns = QuickNowNs();
    const std::int64_t after_ns = NowNs();
    num_wrong += now_ns < before_ns - kSlackNs || now_ns > after_ns + kSlackNs ? 1 : 0;
    num_wrong += now_ns < last_ns ? 1 : 0;
    last_ns = now_ns;
    before_ns = after_ns;
  }
  return num_wrong;
}

void ItIsTheTime(Context& context) {
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&num_wrong] { num_wrong += CountWrong(); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  context.Expect(num_wrong == 0, std::to_string(num_wrong) + " times are wrong");
}

void ItIsTheTimeForThoseWhoSeldomAsk(Context& context) {
  for (int i = 0; i < 20; ++i) {
    const std::int64_t nap_ns = i % 4 == 0 ? 2'000'000 : 30'000;
    const std::int64_t before_ns = QuickNowNs();
    std::this_thread::sleep_for(std::chrono::nanoseconds(nap_ns));
    context.Expect(QuickNowNs() >= before_ns + nap_ns - kSlackNs, "a nap");
  }
}

const Suite suite("quick_clock",
                  {{"ItIsTheTime", ItIsTheTime},
                   {"ItIsTheTimeForThoseWhoSeldomAsk", ItIsTheTimeForThoseWhoSeldomAsk}});

}  // namespace
}  // namespace jaxcoll::testing::quick_clock_test

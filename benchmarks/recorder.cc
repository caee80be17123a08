// benchmarks/recorder.cc: what it costs a call to be recorded, in ns: one JSON object a line.
//
// All that the engine does for the recorder in a call of one device: the entry, its number, its
// five moments, and two looks at the clock. On entries that no cache has any more, as in a program
// that computes between its calls, and on warm ones.
#include <algorithm>  // std::nth_element
#include <cstddef>    // std::size_t
#include <cstdint>    // std::int64_t
#include <cstdio>     // std::printf
#include <vector>     // std::vector

#include "core/clock.h"
#include "host/recorder.h"

namespace jaxcoll {
namespace {

void RecordOne(std::int64_t device, std::int64_t run) {
  const std::int64_t now_ns = NowNs();
  Recorder::Entry& entry = Recorder::Get().Begin(
      device,
      {.site = 7, .group = 9, .rank = device, .run = run, .iteration = 0, .now_ns = now_ns});
  entry.Set(Moment::kOpened, now_ns);
  entry.execution.store(run, std::memory_order_relaxed);
  const std::int64_t end_ns = NowNs();
  entry.Set(Moment::kMet, end_ns);
  entry.Set(Moment::kMoved, end_ns);
  entry.Set(Moment::kResumed, end_ns);
}

double Median(std::vector<double> times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

// Of calls one after the other.
double Warm() {
  constexpr int kCalls = 20'000;
  std::vector<double> times;
  for (int round = 0; round < 50; ++round) {
    const std::int64_t begin_ns = NowNs();
    for (int i = 0; i < kCalls; ++i) {
      RecordOne(1, i);
    }
    times.push_back(static_cast<double>(NowNs() - begin_ns) / kCalls);
  }
  return Median(std::move(times));
}

// Of calls one after the other, before which other memory has gone through the caches.
double Cold(int num_calls) {
  std::vector<char> other(std::size_t{64} << 20);
  std::vector<double> times;
  for (int round = 0; round < 200; ++round) {
    for (std::size_t i = 0; i < other.size(); i += 64) {
      ++other[i];
    }
    const std::int64_t begin_ns = NowNs();
    for (int i = 0; i < num_calls; ++i) {
      RecordOne(1, i);
    }
    times.push_back(static_cast<double>(NowNs() - begin_ns) / num_calls);
  }
  return Median(std::move(times));
}

}  // namespace
}  // namespace jaxcoll

int main() {
  std::printf("{\"entries\": \"warm\", \"ns\": %.1f}\n", jaxcoll::Warm());
  for (const int num_calls : {1, 8, 64}) {
    std::printf("{\"entries\": \"cold, %d in a row\", \"ns\": %.1f}\n", num_calls,
                jaxcoll::Cold(num_calls));
  }
}

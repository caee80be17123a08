#include "host/copy_trials.h"

#include <algorithm>  // std::min
#include <bit>        // std::bit_floor
#include <limits>     // std::numeric_limits

namespace jaxcoll {
namespace {

// The ways, of which each is tried only where the one before it was better than none.
constexpr std::size_t kPlain = 0;
constexpr std::size_t kStreamBoth = 2;

// Trials begin with these calls, then with the powers of two, then every so many calls: those that
// try what is slower are few in short runs, and hardly any in long ones.
constexpr std::uint64_t kFirst = 8;
constexpr std::uint64_t kSecond = 256;
constexpr std::uint64_t kPeriod = 4096;
// In a row, of one way: what an earlier one left in the caches goes with the first of them, while
// the lanes go round.
constexpr std::uint64_t kCalls = 6;
constexpr std::uint64_t kTimedCalls = 3;

// How many calls ago the last trials began.
std::uint64_t SinceTrials(std::uint64_t call) {
  return call - (call >= kPeriod   ? call / kPeriod * kPeriod
                 : call >= kSecond ? std::bit_floor(call)
                                   : kFirst);
}

// What is less by chance is not worth a change.
bool IsClearlyLess(std::int64_t ns, std::int64_t than_ns) { return ns < than_ns / 10 * 9; }

}  // namespace

CopyTrials::CopyTrials(std::size_t bytes_moved)
    // What the next operation finds in a cache is not taken past it.
    : num_ways_(bytes_moved < CacheBytes() ? kStreamBoth : kStreamBoth + 1) {}

void CopyTrials::Begin(std::uint64_t call) {
  const std::uint64_t since = call < kFirst ? num_ways_ * kCalls : SinceTrials(call);
  const std::uint64_t tried = since / kCalls;
  const bool is_trial = tried < num_ways_ && !(tried == kStreamBoth && chosen_ == kPlain);
  if (since == 0) {
    least_ns_.fill(std::numeric_limits<std::int64_t>::max());
  }
  way_ = is_trial ? tried : chosen_;
  is_timed_ = is_trial && since % kCalls >= kCalls - kTimedCalls;
  is_last_ = is_trial && since % kCalls == kCalls - 1;
  took_ns_ = 0;
  copies_ = {.leave = way_ == kPlain ? nullptr : GetStreamCopy(),
             .take = way_ == kStreamBoth ? GetStreamCopy() : nullptr};
}

void CopyTrials::End() {
  if (!is_timed_) {
    return;
  }
  least_ns_[way_] = std::min(least_ns_[way_], took_ns_);
  if (is_last_ && (way_ == kPlain || IsClearlyLess(least_ns_[way_], least_ns_[chosen_]))) {
    chosen_ = way_;
  }
}

}  // namespace jaxcoll

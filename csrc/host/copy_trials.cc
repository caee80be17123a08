#include "host/copy_trials.h"

#include <algorithm>  // std::min
#include <limits>     // std::numeric_limits

namespace jaxcoll {
namespace {

// The ways, of which each is tried only where the one before it was better than none.
constexpr std::size_t kPlain = 0;
constexpr std::size_t kStreamBoth = 2;

// Until memory has been touched, and programs are under way.
constexpr std::int64_t kFirst = 8;
// In a row, of one way: what an earlier one left in the caches goes with the first of them, while
// the lanes go round. Of what the last ones take the least counts.
constexpr std::int64_t kCalls = 6;
constexpr std::int64_t kTimedCalls = 3;
// As many are timed of so many others.
constexpr std::int64_t kOthers = 32;
// Trials come again after that many calls: after the least where what calls take has changed, or
// twice as many each time that they don't change the way; and after the most in any case. So they
// are hardly any of a long run's calls.
constexpr std::int64_t kLeastPause = 64;
constexpr std::int64_t kMostPause = 4096;

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

bool IsMuchLess(std::int64_t ns, std::int64_t than_ns) { return ns < than_ns / 5 * 4; }

}  // namespace

CopyTrials::CopyTrials(std::size_t bytes_moved, bool takes)
    // What the next operation finds in a cache is not taken past it.
    : num_ways_(bytes_moved < CacheBytes() ? kStreamBoth : kStreamBoth + 1),
      takes_(takes),
      since_(-kFirst - 1),
      pause_(kLeastPause) {}

void CopyTrials::Begin() {
  if (++since_ == 0) {
    chosen_before_ = chosen_;
    least_ns_.fill(kNever);
  }
  const auto tried = static_cast<std::size_t>(since_ / kCalls);
  is_trial_ = since_ >= 0 && tried < num_ways_ && !(tried == kStreamBoth && chosen_ == kPlain);
  way_ = is_trial_ ? tried : chosen_;
  const std::int64_t of = is_trial_ ? kCalls : kOthers;
  is_timed_ = since_ >= 0 && since_ % of >= of - kTimedCalls;
  is_last_ = is_timed_ && since_ % of == of - 1;
  took_ns_ = 0;
  copies_ = {.leave = way_ == kPlain ? nullptr : GetStreamCopy(),
             .take = way_ == kStreamBoth ? GetStreamCopy() : nullptr};
}

void CopyTrials::End() {
  if (!is_timed_) {
    return;
  }
  if (is_trial_) {
    EndTrial();
    return;
  }
  recent_ns_ = std::min(recent_ns_, took_ns_);
  if (is_last_) {
    if (since_ >= kMostPause || (since_ >= pause_ && HasChanged())) {
      since_ = -1;
    }
    recent_ns_ = kNever;
  }
}

void CopyTrials::EndTrial() {
  least_ns_[way_] = std::min(least_ns_[way_], took_ns_);
  if (!is_last_) {
    return;
  }
  if (way_ == kPlain || IsBetter(least_ns_[way_], least_ns_[chosen_])) {
    chosen_ = way_;
  }
  if (way_ + 1 == num_ways_ || (way_ != kPlain && chosen_ == kPlain)) {  // the last one
    pause_ = chosen_ != chosen_before_ ? kLeastPause : std::min(2 * pause_, kMostPause);
  }
  recent_ns_ = kNever;
}

// What is less by chance is not worth a change.
bool CopyTrials::IsBetter(std::int64_t ns, std::int64_t than_ns) const {
  return ns < (takes_ ? than_ns / 10 * 9 : than_ns / 2);
}

bool CopyTrials::HasChanged() const {
  return IsMuchLess(recent_ns_, least_ns_[chosen_]) || IsMuchLess(least_ns_[chosen_], recent_ns_);
}

}  // namespace jaxcoll

// host/copy_trials.h: how a call's data goes into windows and out of them, by what was quickest.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t

#include "core/clock.h"
#include "core/pooled.h"
#include "host/route.h"

namespace jaxcoll {

/// Between cores that are far from each other, as of two last-level caches, copies past the caches
/// take down to 0.4 of the time: whoever writes to a window again waits for each line that another
/// core has read. Between near ones they take twice as long. Which it is, the system may change
/// while a program runs. So the calls of a site try the ways, now and then and a few calls in a
/// row, and keep to the quickest one.
///
/// All processes try the same way in the same call, since how one leaves is how the other takes;
/// each chooses by itself.
class CopyTrials : public Pooled {
 public:
  /// Of calls that move so many bytes in all.
  explicit CopyTrials(std::size_t bytes_moved);

  /// Begins the call of that number, the same on all processes.
  void Begin(std::uint64_t call);
  [[nodiscard]] const WindowCopies& copies() const { return copies_; }

  /// Does what the call does; its time counts in a trial. What it waits for others does not.
  template <typename F>
  bool Run(const F& f) {
    if (!is_timed_) {
      return f();
    }
    const std::int64_t begin_ns = NowNs();
    const bool ok = f();
    took_ns_ += NowNs() - begin_ns;
    return ok;
  }

  /// Ends the call.
  void End();

 private:
  static constexpr std::size_t kMostWays = 3;

  const std::size_t num_ways_;
  std::size_t chosen_ = 0;
  std::size_t way_ = 0;  // of this call
  bool is_timed_ = false;
  bool is_last_ = false;  // of the trials of its way
  std::int64_t took_ns_ = 0;
  std::array<std::int64_t, kMostWays> least_ns_{};
  WindowCopies copies_;
};

}  // namespace jaxcoll

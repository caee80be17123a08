// host/copy_trials.h: how a call's data goes into windows and out of them, by what was quickest.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t

#include "core/pooled.h"
#include "host/route.h"

namespace jaxcoll {

/// Between cores that are far from each other, as of two last-level caches, copies past the caches
/// take about half the time: whoever writes to a window again waits for each line that another
/// core has read. Between near ones they take twice as long. Which it is, the system may change
/// while a program runs. So the first calls of a site try the ways, a few calls in a row each, and
/// keep to the quickest one; calls do so again where what they take has changed, and else seldom.
///
/// All processes try the same way in the same call at first; later each when it sees a change. Most
/// of what tells the ways apart is what a process itself leaves.
class CopyTrials : public Pooled {
 public:
  /// Of calls that move so many bytes in all. Whether this process `takes` what others leave: if
  /// not, it sees half of what its way takes, and chooses another one only where that half is
  /// much quicker.
  CopyTrials(std::size_t bytes_moved, bool takes);

  /// Begins the next call.
  void Begin();
  [[nodiscard]] const WindowCopies& copies() const { return copies_; }

  /// Whether what the call takes counts, but for its waits: Count it, in parts.
  [[nodiscard]] bool is_timed() const { return is_timed_; }
  void Count(std::int64_t ns) { took_ns_ += ns; }

  /// Ends the call.
  void End();

 private:
  static constexpr std::size_t kMostWays = 3;

  void EndTrial();
  [[nodiscard]] bool IsBetter(std::int64_t ns, std::int64_t than_ns) const;
  [[nodiscard]] bool HasChanged() const;

  const std::size_t num_ways_;
  const bool takes_;
  std::size_t chosen_ = 0;
  std::size_t chosen_before_ = 0;
  std::int64_t since_;  // calls, since the last trials began
  std::int64_t pause_;  // of calls, before a change makes calls try again
  std::array<std::int64_t, kMostWays> least_ns_{};  // in the last trials
  std::int64_t recent_ns_ = 0;                      // the least of the last few that were timed

  // Of the call in progress.
  std::size_t way_ = 0;
  bool is_trial_ = false;
  bool is_timed_ = false;
  bool is_last_ = false;  // of a few calls that are timed
  std::int64_t took_ns_ = 0;
  WindowCopies copies_;
};

}  // namespace jaxcoll

// host/watchdog.h: ends waits that are over, and spreads a failure through its run.
#pragma once

#include <array>               // std::array
#include <atomic>              // std::atomic
#include <condition_variable>  // std::condition_variable
#include <cstdint>             // std::int64_t, std::uint64_t
#include <deque>               // std::deque
#include <limits>              // std::numeric_limits
#include <memory>              // std::shared_ptr
#include <mutex>               // std::mutex
#include <string>              // std::string
#include <unordered_set>       // std::unordered_set
#include <vector>              // std::vector

#include "core/status.h"
#include "host/call_site.h"
#include "host/device_stalemate.h"
#include "host/threads.h"

namespace jaxcoll {

/// One thread that looks at all call sites several times per deadline. One instance, never
/// destroyed; it does not keep the process alive. All methods may be called from any thread, but
/// Add and Remove not under a meeting's lock.
class Watchdog {
 public:
  static Watchdog& Get();

  void Add(CallSite& site);
  /// Returns only when the watchdog does not look at the site.
  void Remove(CallSite& site);

  /// How long a rank may wait for the others; < 0: for ever. Takes effect on waits in progress.
  void SetTimeout(std::int64_t timeout_ns);
  [[nodiscard]] std::int64_t timeout_ns() const {
    return timeout_ns_.load(std::memory_order_relaxed);
  }

  /// How long ranks wait beyond that for one that compiles; < 0: for ever.
  void SetCompileTimeout(std::int64_t timeout_ns) {
    compile_timeout_ns_.store(timeout_ns, std::memory_order_relaxed);
  }
  [[nodiscard]] std::int64_t compile_timeout_ns() const {
    return compile_timeout_ns_.load(std::memory_order_relaxed);
  }

  /// Marks a run as failed; the first cause stays. Ranks that arrive later get the cause; the ranks
  /// that wait in the run's other meetings get it at the next look, which this asks for.
  void FailRun(std::int64_t run, std::shared_ptr<const Status> cause);

  /// The program of the run is executed in a thread of Python's, beyond its calls that are resumed
  /// elsewhere: JAX raises its failure where it was started, so that the user is told.
  void NoteInline(std::int64_t run) {
    InlineRun(run).store(run, std::memory_order_relaxed);
    if (IsMainThread()) {
      main_run_.store(run, std::memory_order_relaxed);
    }
  }
  [[nodiscard]] bool IsInline(std::int64_t run) {
    return InlineRun(run).load(std::memory_order_relaxed) == run;
  }
  /// Whether it is the last one that the main thread ran in itself.
  [[nodiscard]] bool IsOfMainThread(std::int64_t run) const {
    return main_run_.load(std::memory_order_relaxed) == run;
  }

  /// Why the run failed, or null. Costs one load while no run has failed.
  std::shared_ptr<const Status> FailureOf(std::int64_t run) {
    return any_failed_.load(std::memory_order_acquire) ? FindFailureOf(run) : nullptr;
  }

  /// Runs that have failed so far.
  [[nodiscard]] std::uint64_t num_failures() const {
    return num_failures_.load(std::memory_order_acquire);
  }

  /// Why those beyond the first `num_known` failed, of the latest, but those that were told.
  std::vector<std::string> FailuresSince(std::uint64_t num_known);

  /// The failures so far are dealt with: ranks of those runs that come late still get the cause,
  /// and fail nothing else.
  void SettleFailures();
  /// Whether the run's failure was settled.
  bool IsSettled(std::int64_t run);

  /// A callback of the user's has raised: the program of one device ended there.
  void NoteCallbackError(std::string text);
  /// What the latest such error says if it may be why a device does not come to a call that was
  /// opened at `opened_ns`; else "".
  std::string CallbackErrorFor(std::int64_t opened_ns);

 private:
  // A RunId is unique enough among the latest launches, not for ever: forget old failures.
  static constexpr std::size_t kRememberedRuns = 256;
  static constexpr std::size_t kInlineRuns = 64;  // of many threads, the later of two may hide one
  static constexpr std::int64_t kNoRun = std::numeric_limits<std::int64_t>::min();

  struct FailedRun {
    std::int64_t run;
    std::shared_ptr<const Status> cause;
    bool is_settled = false;
    bool is_told = false;
  };

  Watchdog();
  void Loop();
  std::shared_ptr<const Status> FindFailureOf(std::int64_t run);
  /// Fills in the devices of ranks that have not been at a call, but at another one of its run.
  void Locate(std::vector<CallSite::UnderWay>& calls) const;  // requires sites_mutex_
  void LookNow();
  std::atomic<std::int64_t>& InlineRun(std::int64_t run) {
    return inline_runs_[static_cast<std::uint64_t>(run) % kInlineRuns];
  }

  std::array<std::atomic<std::int64_t>, kInlineRuns> inline_runs_;
  std::atomic<std::int64_t> main_run_{kNoRun};
  std::atomic<std::int64_t> timeout_ns_;
  std::atomic<std::int64_t> compile_timeout_ns_;
  std::atomic<std::uint64_t> num_failures_{0};

  std::mutex sites_mutex_;  // guards sites_; taken before any meeting's lock
  std::condition_variable wake_;
  std::unordered_set<CallSite*> sites_;
  std::atomic<bool> look_{false};
  DeviceStalemate stalemate_;  // of the thread's looks

  std::mutex failed_mutex_;  // guards failed_; taken last
  std::deque<FailedRun> failed_;
  std::atomic<bool> any_failed_{false};

  std::mutex callback_mutex_;  // guards the next two; taken last
  std::string callback_error_;
  std::int64_t callback_error_ns_ = 0;
};

}  // namespace jaxcoll

#include "host/watchdog.h"

#include <pthread.h>  // pthread_setname_np

#include <algorithm>  // std::any_of, std::clamp, std::min
#include <chrono>     // std::chrono::nanoseconds
#include <set>        // std::set
#include <thread>     // std::thread
#include <utility>    // std::move

#include "core/clock.h"
#include "host/job.h"
#include "host/stalemate.h"

namespace jaxcoll {
namespace {

constexpr std::int64_t kDefaultTimeoutNs = 300'000'000'000;
constexpr std::int64_t kDefaultCompileTimeoutNs = 3600'000'000'000;
// Looks per deadline, and the bounds on the time between two: a deadline is met within a tenth, and
// an idle process is woken twice a second at most.
constexpr std::int64_t kLooksPerTimeout = 10;
constexpr std::int64_t kMinPeriodNs = 5'000'000;
constexpr std::int64_t kMaxPeriodNs = 500'000'000;
// A call that is opened so long after a callback has raised is of a later program.
constexpr std::int64_t kCallbackErrorNs = 60'000'000'000;
}  // namespace

Watchdog& Watchdog::Get() {
  static Watchdog* const watchdog = new Watchdog();  // leaked, as its thread is
  return *watchdog;
}

Watchdog::Watchdog()
    : timeout_ns_(kDefaultTimeoutNs), compile_timeout_ns_(kDefaultCompileTimeoutNs) {
  for (std::atomic<std::int64_t>& run : inline_runs_) {
    run.store(kNoRun, std::memory_order_relaxed);
  }
  std::thread([this] { Loop(); }).detach();
}

void Watchdog::Add(CallSite& site) {
  const std::lock_guard<std::mutex> lock(sites_mutex_);
  sites_.insert(&site);
  if (sites_.size() == 1) {
    wake_.notify_one();
  }
}

void Watchdog::Remove(CallSite& site) {
  const std::lock_guard<std::mutex> lock(sites_mutex_);
  sites_.erase(&site);
}

void Watchdog::SetTimeout(std::int64_t timeout_ns) {
  timeout_ns_.store(timeout_ns, std::memory_order_relaxed);
  LookNow();
}

void Watchdog::FailRun(std::int64_t run, std::shared_ptr<const Status> cause) {
  const bool is_told = IsPythonThread() || IsInline(run);
  {
    const std::lock_guard<std::mutex> lock(failed_mutex_);
    for (FailedRun& failed : failed_) {
      if (failed.run == run) {
        failed.is_told = failed.is_told || is_told;
        return;
      }
    }
    if (failed_.size() == kRememberedRuns) {
      failed_.pop_front();
    }
    failed_.push_back({.run = run, .cause = std::move(cause), .is_told = is_told});
    num_failures_.fetch_add(1, std::memory_order_release);
    any_failed_.store(true, std::memory_order_release);
  }
  LookNow();
}

void Watchdog::LookNow() {
  look_.store(true, std::memory_order_release);
  wake_.notify_one();
}

std::shared_ptr<const Status> Watchdog::FindFailureOf(std::int64_t run) {
  const std::lock_guard<std::mutex> lock(failed_mutex_);
  for (const FailedRun& failed : failed_) {
    if (failed.run == run) {
      return failed.cause;
    }
  }
  return nullptr;
}

std::vector<std::string> Watchdog::FailuresSince(std::uint64_t num_known) {
  const std::lock_guard<std::mutex> lock(failed_mutex_);
  const std::uint64_t num_new = num_failures() - num_known;
  std::vector<std::string> texts;
  for (std::size_t i = failed_.size() - std::min<std::size_t>(num_new, failed_.size());
       i < failed_.size(); ++i) {
    if (!failed_[i].is_told) {
      texts.push_back(failed_[i].cause->message);
    }
  }
  return texts;
}

void Watchdog::SettleFailures() {
  const std::lock_guard<std::mutex> lock(failed_mutex_);
  for (FailedRun& failed : failed_) {
    failed.is_settled = true;
  }
}

bool Watchdog::IsSettled(std::int64_t run) {
  const std::lock_guard<std::mutex> lock(failed_mutex_);
  return std::any_of(failed_.begin(), failed_.end(), [run](const FailedRun& failed) {
    return failed.run == run && failed.is_settled;
  });
}

void Watchdog::NoteCallbackError(std::string text) {
  const std::lock_guard<std::mutex> lock(callback_mutex_);
  callback_error_ = std::move(text);
  callback_error_ns_ = NowNs();
}

std::string Watchdog::CallbackErrorFor(std::int64_t opened_ns) {
  const std::lock_guard<std::mutex> lock(callback_mutex_);
  return opened_ns - callback_error_ns_ < kCallbackErrorNs ? callback_error_ : "";
}

void Watchdog::Locate(std::vector<CallSite::UnderWay>& calls) const {
  for (CallSite::UnderWay& call : calls) {
    for (CallSite::Place& place : call.missing) {
      for (auto site = sites_.begin(); place.device < 0 && site != sites_.end(); ++site) {
        place.device = (*site)->DeviceIn(call.call.key.run, place.logical_id);
      }
    }
  }
}

void Watchdog::Loop() {
  pthread_setname_np(pthread_self(), "jaxcoll-watch");
  std::unique_lock<std::mutex> lock(sites_mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return !sites_.empty(); });
    const std::int64_t timeout_ns = timeout_ns_.load(std::memory_order_relaxed);
    const std::int64_t longest_ns =
        stalemate_.is_suspected() ? DeviceStalemate::kPeriodNs : kMaxPeriodNs;
    const std::int64_t period_ns =
        timeout_ns < 0 ? longest_ns
                       : std::clamp(timeout_ns / kLooksPerTimeout, kMinPeriodNs, longest_ns);
    wake_.wait_for(lock, std::chrono::nanoseconds(period_ns),
                   [this] { return look_.load(std::memory_order_acquire); });
    look_.store(false, std::memory_order_relaxed);
    const std::int64_t now_ns = NowNs();
    std::vector<CallSite::UnderWay> calls;
    std::set<Job*> jobs;
    for (CallSite* site : sites_) {
      site->AddUnderWay(now_ns, calls);
      if (site->job() != nullptr) {
        jobs.insert(site->job());
      }
    }
    for (Job* job : jobs) {
      if (const std::shared_ptr<Session> session = job->session(); session != nullptr) {
        FailForDifferentLeft(*session, now_ns);
      }
    }
    Locate(calls);
    for (const CallSite::UnderWay& call : calls) {
      call.site->Check(call, calls, now_ns, timeout_ns_.load(std::memory_order_relaxed));
    }
    stalemate_.End(calls, now_ns);
  }
}

}  // namespace jaxcoll

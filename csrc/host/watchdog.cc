#include "host/watchdog.h"

#include <pthread.h>  // pthread_setname_np

#include <algorithm>  // std::any_of, std::clamp
#include <chrono>     // std::chrono::nanoseconds
#include <thread>     // std::thread
#include <utility>    // std::move

#include "core/clock.h"
#include "host/call_site.h"

namespace jaxcoll {
namespace {

constexpr std::int64_t kDefaultTimeoutNs = 300'000'000'000;
constexpr std::int64_t kDefaultCompileTimeoutNs = 3600'000'000'000;
// Looks per deadline, and the bounds on the time between two: a deadline is met within a tenth, and
// an idle process is woken twice a second at most.
constexpr std::int64_t kLooksPerTimeout = 10;
constexpr std::int64_t kMinPeriodNs = 5'000'000;
constexpr std::int64_t kMaxPeriodNs = 500'000'000;

}  // namespace

Watchdog& Watchdog::Get() {
  static Watchdog* const watchdog = new Watchdog();  // leaked, as its thread is
  return *watchdog;
}

Watchdog::Watchdog()
    : timeout_ns_(kDefaultTimeoutNs), compile_timeout_ns_(kDefaultCompileTimeoutNs) {
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
  {
    const std::lock_guard<std::mutex> lock(failed_mutex_);
    for (const FailedRun& failed : failed_) {
      if (failed.run == run) {
        return;
      }
    }
    if (failed_.size() == kRememberedRuns) {
      failed_.pop_front();
    }
    failed_.push_back({.run = run, .cause = std::move(cause)});
    num_failures_.fetch_add(1, std::memory_order_release);
    any_failed_.store(true, std::memory_order_release);
  }
  LookNow();
}

void Watchdog::LookNow() {
  look_.store(true, std::memory_order_release);
  wake_.notify_one();
}

std::shared_ptr<const Status> Watchdog::FailureOf(std::int64_t run) {
  if (!any_failed_.load(std::memory_order_acquire)) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(failed_mutex_);
  for (const FailedRun& failed : failed_) {
    if (failed.run == run) {
      return failed.cause;
    }
  }
  return nullptr;
}

std::string Watchdog::LastFailure() {
  const std::lock_guard<std::mutex> lock(failed_mutex_);
  return failed_.empty() ? "" : failed_.back().cause->message;
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

void Watchdog::Loop() {
  pthread_setname_np(pthread_self(), "jaxcoll-watch");
  std::unique_lock<std::mutex> lock(sites_mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return !sites_.empty(); });
    const std::int64_t timeout_ns = timeout_ns_.load(std::memory_order_relaxed);
    const std::int64_t period_ns =
        timeout_ns < 0 ? kMaxPeriodNs
                       : std::clamp(timeout_ns / kLooksPerTimeout, kMinPeriodNs, kMaxPeriodNs);
    wake_.wait_for(lock, std::chrono::nanoseconds(period_ns),
                   [this] { return look_.load(std::memory_order_acquire); });
    look_.store(false, std::memory_order_relaxed);
    const std::int64_t now_ns = NowNs();
    for (CallSite* site : sites_) {
      site->Check(now_ns, timeout_ns_.load(std::memory_order_relaxed));
    }
  }
}

}  // namespace jaxcoll

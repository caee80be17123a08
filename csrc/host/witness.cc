#include "host/witness.h"

#include <algorithm>  // std::max
#include <chrono>     // std::chrono::nanoseconds

#include "host/watchdog.h"

namespace jaxcoll {
namespace {

// The look may have to wait for Python, or for a file system: no error is held back for longer.
constexpr std::chrono::nanoseconds kPatience{1'000'000'000};

}  // namespace

Witness& Witness::Get() {
  static Witness* const witness = new Witness();  // leaked: programs may fail at the very end
  return *witness;
}

void Witness::AwaitLook() {
  const std::uint64_t num_failures = Watchdog::Get().num_failures();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_over = [&] { return num_looked_at_ >= num_failures || !looks_ || is_deaf_; };
  if (is_over()) {
    return;
  }
  num_wanted_ = std::max(num_wanted_, num_failures);
  wanted_.notify_one();
  ++num_held_;
  is_deaf_ = !looked_.wait_for(lock, kPatience, is_over) || is_deaf_;
  --num_held_;
}

bool Witness::IsAnyoneHeld() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_held_ > 0;
}

bool Witness::AwaitFailure(std::int64_t limit_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  looks_ = true;
  wanted_.wait_for(lock, std::chrono::nanoseconds(limit_ns),
                   [this] { return is_stopped_ || num_wanted_ > num_looked_at_; });
  return !is_stopped_;
}

void Witness::NoteLook(std::uint64_t num_failures) {
  const std::lock_guard<std::mutex> lock(mutex_);
  num_looked_at_ = std::max(num_looked_at_, num_failures);
  is_deaf_ = false;
  looked_.notify_all();
}

void Witness::Stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_stopped_ = true;
  wanted_.notify_one();
}

void Witness::End() {
  const std::lock_guard<std::mutex> lock(mutex_);
  looks_ = false;
  looked_.notify_all();
}

}  // namespace jaxcoll

#include "cuda/local_meeting.h"

#include <chrono>  // std::chrono

#include "core/clock.h"

namespace jaxcoll::cuda {
namespace {

// How long an interruption goes unnoticed.
constexpr auto kLookForInterruptionEvery = std::chrono::milliseconds(20);

}  // namespace

Status LocalMeeting::Arrive(int device, const Status& status, const Terms& terms) {
  if (is_done()) {
    return status;
  }
  const std::int64_t begun_ns = NowNs();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto fail = [&](const Status& cause) {
    if (failure_.ok()) {
      failure_ = cause;
    }
    changed_.notify_all();
  };
  missing_.erase(device);
  if (!status.ok()) {
    fail(status);
  }
  while (failure_.ok() && !missing_.empty()) {
    changed_.wait_for(lock, kLookForInterruptionEvery);
    if (!failure_.ok() || missing_.empty()) {
      break;
    }
    if (Status interruption = terms.interruption(); !interruption.ok()) {
      fail(interruption);
    } else if (terms.timeout_ns >= 0 && NowNs() - begun_ns >= terms.timeout_ns) {
      fail(terms.late(missing_));
    }
  }
  if (failure_.ok()) {
    is_done_.store(true, std::memory_order_release);
    changed_.notify_all();
  }
  return failure_;
}

}  // namespace jaxcoll::cuda

// cuda/local_meeting.h: where the devices of this process wait for each other, once, up to a limit.
#pragma once

#include <atomic>              // std::atomic
#include <condition_variable>  // std::condition_variable
#include <cstdint>             // std::int64_t
#include <functional>          // std::function
#include <mutex>               // std::mutex
#include <set>                 // std::set
#include <utility>             // std::move

#include "core/status.h"

namespace jaxcoll::cuda {

/// Devices are CUDA's numbers.
class LocalMeeting {
 public:
  struct Terms {
    std::int64_t timeout_ns = -1;  ///< < 0: none
    /// Why there is nothing to wait for any more, or ok.
    std::function<Status()> interruption;
    /// What to say when these devices have not come in time.
    std::function<Status(const std::set<int>& missing)> late;
  };

  explicit LocalMeeting(std::set<int> devices) : missing_(std::move(devices)) {}

  /// Waits until all devices have come; returns what the first one that failed came with, if any.
  /// Whoever comes after the meeting does not wait.
  Status Arrive(int device, const Status& status, const Terms& terms);

  /// Whether all have come, and none has failed.
  [[nodiscard]] bool is_done() const { return is_done_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> is_done_{false};
  std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  std::set<int> missing_;
  Status failure_;
};

}  // namespace jaxcoll::cuda

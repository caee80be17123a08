// cuda/communicator.h: one rank's communicator of NCCL, which never holds up who calls it.
//
// It is a non-blocking one: NCCL works on threads of its own, and who has called asks until it has
// done so. So nobody is inside NCCL for long, even where another rank does not come, and the
// communicator can be aborted when nobody is: NCCL allows one thread at a time.
#pragma once

#include <atomic>    // std::atomic
#include <cstddef>   // std::size_t
#include <mutex>     // std::mutex, std::unique_lock
#include <optional>  // std::optional

#include "core/status.h"
#include "cuda/libraries.h"

namespace jaxcoll::cuda {

class Communicator {
 public:
  /// Begins to make it, on the current device, inside a group of NCCL's. It is made when State says
  /// so. Nobody else uses it before.
  Status Begin(const Libraries& libraries, const NcclId& id, std::size_t num_ranks,
               std::size_t rank);

  /// Runs `put` (-> Status), which calls NCCL's functions with `handle()`, as one group. Returns
  /// when NCCL has put it on the streams: with an error after GiveUp.
  template <typename Put>
  Status InGroup(const Libraries& libraries, const Put& put) const {
    Status status;
    {
      const std::unique_lock<std::mutex> inside = Enter();
      if (!inside) {
        return GivenUp();
      }
      if (const int result = libraries.nccl.group_start(); result != kNcclSuccess) {
        return libraries.OfNccl("ncclGroupStart", result, handle_);
      }
      status = put();
      // Also after an error: a group that stays open would take the thread's next calls.
      if (const int result = libraries.nccl.group_end(); !HasTaken(result) && status.ok()) {
        status = libraries.OfNccl("ncclGroupEnd", result, handle_);
      }
    }
    return status.ok() ? Await(libraries) : status;
  }

  [[nodiscard]] NcclComm handle() const { return handle_; }

  /// What NCCL says: success, in progress, or an error. Nothing while another thread is inside
  /// NCCL, and after GiveUp.
  [[nodiscard]] std::optional<int> State(const Libraries& libraries) const;

  /// Ends the waits for NCCL; nobody enters it any more.
  void GiveUp() { is_given_up_.store(true); }
  /// After GiveUp, on the communicator's device: ends what is under way, unless a thread is inside
  /// NCCL. Returns whether it is ended.
  bool TryAbort(const Libraries& libraries);

 private:
  [[nodiscard]] static Status GivenUp() { return Internal("the group's communicators have ended"); }
  /// Locks `mutex_`, unless the communicator is given up.
  [[nodiscard]] std::unique_lock<std::mutex> Enter() const;
  [[nodiscard]] Status Await(const Libraries& libraries) const;

  NcclComm handle_ = nullptr;
  mutable std::mutex mutex_;  // who holds it may be inside NCCL
  std::atomic<bool> is_given_up_{false};
};

}  // namespace jaxcoll::cuda

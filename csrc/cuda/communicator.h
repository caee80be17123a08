// cuda/communicator.h: one rank's communicator of NCCL, which nobody waits in for ever.
//
// NCCL allows one thread at a time, and a communicator may only be aborted when none is inside. But
// one that calls can wait there for another rank: to connect to it, or for a stream that is full.
// Where NCCL can revoke a communicator (2.29), that frees who waits, as its sources say; but not
// who waits for a proxy, as between hosts. Else ours are non-blocking ones: NCCL works on threads
// of its own, and who has called asks until it has done so. A call takes some 70 microseconds
// longer then, for the start of a thread.
#pragma once

#include <atomic>    // std::atomic
#include <chrono>    // std::chrono
#include <cstddef>   // std::size_t
#include <mutex>     // std::mutex, std::unique_lock
#include <optional>  // std::optional

#include "core/status.h"
#include "cuda/libraries.h"

namespace jaxcoll::cuda {

class Communicator {
 public:
  /// Begins to make it, on the current device, inside a group of NCCL's that the caller has
  /// entered. It is made when that has ended and State says so. Nobody else uses it before.
  Status Begin(const Libraries& libraries, const NcclId& id, std::size_t num_ranks,
               std::size_t rank, bool is_on_one_host);
  /// From now on who waits inside NCCL can be freed, where the communicator is a blocking one.
  void SetMade() { is_made_.store(true); }

  /// While it is held, the caller may call NCCL, and nobody else does. Nothing after GiveUp.
  [[nodiscard]] std::unique_lock<std::mutex> Enter() const;

  /// Runs `put` (-> Status), which calls NCCL's functions with `handle()`, as one group. Returns
  /// when NCCL has put it on the streams: with an error after GiveUp.
  template <typename Put>
  Status InGroup(const Libraries& libraries, const Put& put) const {
    Status status;
    int ended = kNcclSuccess;
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
      ended = libraries.nccl.group_end();
      if (!HasTaken(ended) && status.ok()) {
        status = libraries.OfNccl("ncclGroupEnd", ended, handle_);
      }
    }
    // Not by what the communicator was to be: NCCL_COMM_BLOCKING has the last word.
    return status.ok() && ended == kNcclInProgress ? Await(libraries) : status;
  }

  [[nodiscard]] NcclComm handle() const { return handle_; }

  /// What NCCL says: success, in progress, or an error. Nothing while another thread is inside
  /// NCCL, and after GiveUp.
  [[nodiscard]] std::optional<int> State(const Libraries& libraries) const;

  /// Ends the waits for NCCL; nobody enters it any more.
  void GiveUp() { is_given_up_.store(true); }
  [[nodiscard]] bool is_given_up() const { return is_given_up_.load(); }
  /// After GiveUp, on the communicator's device, from one thread at a time: ends what is under way.
  /// Where a thread stays inside NCCL, this has it come out at most, and is to be called again.
  /// Returns whether all is ended.
  bool TryAbort(const Libraries& libraries);

 private:
  [[nodiscard]] static Status GivenUp() { return Internal("the group's communicators have ended"); }
  [[nodiscard]] Status Await(const Libraries& libraries) const;

  NcclComm handle_ = nullptr;
  mutable std::mutex mutex_;  // who holds it may be inside NCCL
  std::atomic<bool> is_made_{false};
  std::atomic<bool> is_given_up_{false};
  bool is_blocking_ = false;
  // Of who aborts.
  std::optional<std::chrono::steady_clock::time_point> first_try_;
  bool is_revoked_ = false;
};

}  // namespace jaxcoll::cuda

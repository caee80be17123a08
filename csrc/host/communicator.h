// host/communicator.h: collectives that a thread calls and waits for, as XLA makes its own calls.
//
// XLA's collectives carry no name of the call site. So which call meets which is told by what they
// do: the n-th all_reduce of 1,024 float32 of a group meets the n-th on its other ranks. XLA runs
// the collectives of a program in one order on all of them.
#pragma once

#include <atomic>              // std::atomic
#include <condition_variable>  // std::condition_variable
#include <cstddef>             // std::size_t
#include <cstdint>             // std::int64_t, std::uint8_t, std::uint64_t
#include <map>                 // std::map
#include <memory>              // std::unique_ptr
#include <mutex>               // std::mutex
#include <string>              // std::string
#include <unordered_map>       // std::unordered_map
#include <utility>             // std::pair
#include <vector>              // std::vector

#include "core/status.h"
#include "core/types.h"
#include "host/call_site.h"

namespace jaxcoll {

/// What a call does; the same on all its ranks.
struct Operation {
  enum class Kind : std::uint8_t {
    kAllReduce,
    kAllGather,
    kReduceScatter,
    kShift,  ///< rank r's block goes to rank r + `from`, modulo their number
    kSend,   ///< rank `from`'s block goes to rank `to`; only these two call
  };

  Kind kind;
  DType dtype = DType::kU8;
  ReduceOp op = ReduceOp::kSum;
  std::size_t count = 0;  ///< elements of a rank's operand; of its result for kReduceScatter
  std::size_t from = 0, to = 0;

  friend bool operator==(const Operation&, const Operation&) = default;
};

/// The ranks that call together.
class Clique {
 public:
  /// `devices` and `processes` are those of its ranks. With `job`, some may be in other processes,
  /// and the clique fails with the job.
  Clique(std::vector<std::int64_t> devices, std::vector<std::int64_t> processes, Job* job);
  Clique(const Clique&) = delete;
  Clique& operator=(const Clique&) = delete;
  ~Clique();

  [[nodiscard]] const std::vector<std::int64_t>& devices() const { return devices_; }
  [[nodiscard]] const Job* job() const { return job_; }

  /// For errors: calls of this kind and count are made for `origin`, among others.
  void Describe(Operation::Kind kind, std::size_t count, const std::string& origin);

  /// Where the ranks meet for an operation. Null, and `problem`, where the engine can't do it.
  CallSite* Site(const Operation& operation, std::string& problem);

 private:
  struct Hash {
    std::size_t operator()(const Operation& operation) const;
  };

  [[nodiscard]] std::string Text(const Operation& operation, const std::string& origin) const;
  [[nodiscard]] std::string Json(const Operation& operation) const;

  const std::vector<std::int64_t> devices_;
  const std::vector<std::int64_t> processes_;
  Job* const job_;    // null: all ranks are here
  std::mutex mutex_;  // guards the next two
  std::unordered_map<Operation, CallSite*, Hash> sites_;
  std::map<std::pair<Operation::Kind, std::size_t>, std::vector<std::string>> origins_;
};

/// A call that may still be under way. Its buffers stay until it was waited for.
class PendingCall final : private WaiterFactory {
 public:
  PendingCall() = default;
  PendingCall(const PendingCall&) = delete;
  PendingCall& operator=(const PendingCall&) = delete;

  /// Rank `rank` of those that meet at `site`, on device `device`, calls. `send` or `receive` may
  /// be null where the operation has no operand or result for it. kReturns: Wait will be called.
  void Begin(CallSite& site, std::size_t rank, std::int64_t device, std::int64_t run,
             const void* send, void* receive, Patience patience);
  /// Returns when the call has ended.
  Status Wait();

 private:
  Waiter Make() override;
  [[nodiscard]] Patience patience() const override { return patience_; }
  static void Resume(const Waiter& waiter, const Status* status);

  Patience patience_ = Patience::kNone;
  Meeting* meeting_ = nullptr;
  std::mutex mutex_;  // guards the next three
  std::condition_variable ended_;
  bool is_pending_ = false;
  Status status_;
};

/// One rank of a clique. One thread at a time calls, as a program on a device does; where two do,
/// all calls fail.
class Communicator {
 public:
  Communicator(Clique& clique, std::size_t rank) : clique_(clique), rank_(rank) {}
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] std::size_t rank() const { return rank_; }
  [[nodiscard]] std::size_t size() const { return clique_.devices().size(); }

  /// Calls and waits.
  Status Call(const Operation& operation, const void* send, void* receive);

  /// Calls; `call` is to be waited for, unless this fails.
  Status Begin(const Operation& operation, const void* send, void* receive, PendingCall& call);

  /// After a failure every call fails with its cause, because ranks may stand at different places
  /// of their programs. This begins anew; no call is under way on any rank of the job.
  static void Reset();

  /// Calls begun so far, of all communicators.
  [[nodiscard]] static std::uint64_t NumCalls();

 private:
  Status Begin(const Operation& operation, const void* send, void* receive, PendingCall& call,
               Patience patience);
  /// Fails all calls of all ranks, which could otherwise wait for this one.
  [[nodiscard]] Status RefuseTwo() const;

  Clique& clique_;
  const std::size_t rank_;
  std::atomic<bool> is_calling_{false};
};

}  // namespace jaxcoll

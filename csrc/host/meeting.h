// host/meeting.h: where the ranks of one group meet for one call.
//
//   open ----- last rank arrives -----> moving ----- last chunk is done -----> done
//     \------- deadline, or the run failed elsewhere -----> failed
//
// A rank that arrives leaves its buffers and, unless it can go on at once, a Waiter that resumes
// its program. The last rank moves the data, with runners helping where there is much of it;
// whoever finishes the last chunk has the others resumed. Only an open meeting can fail: once data
// moves, every rank waits for the movers, because buffers are read and written in place. A rank
// that arrives at a failed meeting gets its error, and no buffer is touched.
//
// Work that starts early is done by the ranks as they come, one for each core, each as far as the
// ranks that are there allow; the last one has runners help as well. Such a meeting may fail while
// chunks run: no other one is begun, and the ranks get their error when those have ended.
//
// Where ranks of other processes take part, the last rank of this one begins the exchange with them
// instead, which can fail as well; a runner goes on with it where it does not end at once.
//
// A meeting serves one call after the other. It is opened anew by the first rank that comes after a
// call is done or failed, while other ranks, helpers and the last rank itself may still be on their
// way out: none of them looks at more than its own Rank, the chunk counters and the count of calls.
#pragma once

#include <atomic>              // std::atomic
#include <condition_variable>  // std::condition_variable_any
#include <cstddef>             // std::size_t
#include <cstdint>             // std::int64_t, std::uint64_t
#include <memory>              // std::shared_ptr, std::unique_ptr
#include <mutex>               // std::unique_lock
#include <vector>              // std::vector

#include "core/footprint.h"
#include "core/pooled.h"
#include "core/small_array.h"
#include "core/spin_lock.h"
#include "core/status.h"
#include "host/recorder.h"
#include "host/runners.h"
#include "host/work.h"

namespace jaxcoll {

/// Which execution of the call site: the run of the program and the how-manieth time in it.
struct Key {
  std::int64_t run = 0;
  std::int64_t iteration = 0;
  friend bool operator==(const Key&, const Key&) = default;
};

/// How to resume a program that waits: two pointers of the layer above and what to do with them.
/// `status` is null for success, and only valid during the call.
struct Waiter {
  void* context = nullptr;
  void* future = nullptr;
  void (*resume)(const Waiter& waiter, const Status* status) = nullptr;
  bool is_brief = false;  ///< it only wakes a thread: any other may call it, under any lock of ours
};

/// What the thread of a rank that comes is ready to do.
enum class Patience {
  kNone,    ///< it has other work
  kWaits,   ///< it has none: it may wait in Arrive
  kReturns  ///< it goes on, and waits in Continue later
};

/// Makes the Waiter of a rank that has to wait. Called at most once.
class WaiterFactory {
 public:
  virtual Waiter Make() = 0;
  /// Whether the thread may stay in Arrive for a moment, though not until the call ends.
  [[nodiscard]] virtual bool may_stay() const { return false; }
  [[nodiscard]] virtual Patience patience() const { return Patience::kNone; }

 protected:
  ~WaiterFactory() = default;
};

/// What became of an arrival.
enum class Answer {
  kReady,   ///< the result is there: go on
  kWaits,   ///< the Waiter will be resumed, perhaps already was
  kFailed,  ///< Arrival::failure says why; no buffer was touched unless an exchange had begun
};

struct Arrival {
  Answer answer;
  std::shared_ptr<const Status> failure;  // kFailed only
};

class CallSite;
class Exchange;

class Meeting : public Pooled {
 public:
  /// For the `num_ranks` ranks of this process; null `exchange`: there are no others. `site`
  /// outlives the meeting. All memory is allocated here.
  Meeting(CallSite& site, std::size_t num_ranks, std::unique_ptr<Exchange> exchange);
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  ~Meeting();

  /// Where rank `rank` leaves its buffer pointers before it arrives. They count once it is let in.
  void SetOperand(std::size_t rank, std::size_t i, const void* data) {
    ranks_[rank].operands[i] = data;
  }
  void SetResult(std::size_t rank, std::size_t i, void* data) { ranks_[rank].results[i] = data; }

  /// What a call of rank `rank` touches.
  void AddTo(Footprint& footprint, std::size_t rank) const;

  /// Rank `rank` comes for the call `key`. After kWaits the caller must touch nothing of the site.
  Arrival Arrive(const Key& key, std::size_t rank, std::int64_t now_ns, Recorder::Entry& entry,
                 WaiterFactory& factory);

  /// After kWaits, a thread that has said that it returns: where the call's exchange was left to
  /// it, goes on with it to the end.
  void Continue();

  /// See Exchange::ShowLeft.
  void ShowLeft(std::int64_t now_ns);

  /// A call that ranks of this process are in; `arrived[r]` tells whether rank r has come.
  struct Call {
    Key key;
    std::int64_t opened_ns = 0;
    std::uint64_t epoch = 0;   ///< of the job
    bool is_complete = false;  ///< all have come: it ends, or waits for other processes
    std::vector<bool> arrived;
  };
  /// Fills `call` and returns true where there is one.
  bool IsUnderWay(Call& call);

  /// Fails the call `key` and its run if it is still open, and has the ranks that wait resumed with
  /// `failure`.
  /// Returns false where it is no longer open.
  bool Fail(const Key& key, const std::shared_ptr<const Status>& failure);

  /// Why the other processes fail the open call, or null.
  [[nodiscard]] std::shared_ptr<const Status> JobFailure();

 private:
  enum class State { kDone, kOpen, kMoving, kFailing, kFailed };  // kFailing: chunks still run

  /// A program that goes on after it has waited in a call.
  struct GoingOn {
    Pace* pace = nullptr;  // null: none
    std::int64_t run = 0;
    std::int64_t since_ns = 0;
    std::int64_t long_ns = 0;  // until its next call, so that threads had better stay in this one
  };
  static thread_local GoingOn going_on;  // in this thread

  /// Resumes one rank's program on a runner.
  class Resumption final : public Task {
   public:
    void Run() override;

    Waiter waiter;
    GoingOn next;
    Recorder::Entry* entry = nullptr;
    std::shared_ptr<const Status> failure;  // null: success
  };

  /// Has a runner work on the chunks of the call in progress.
  class Help final : public Task {
   public:
    void Run() override;

    Meeting* meeting = nullptr;
    std::atomic<bool> queued{false};
  };

  /// Has a runner go on with the exchange.
  class Continuation final : public Task {
   public:
    explicit Continuation(Meeting& meeting) : meeting_(meeting) {}
    void Run() override;

   private:
    Meeting& meeting_;
  };

  struct Rank : Pooled {
    SmallArray<const void*, 2> operands;
    SmallArray<void*, 2> results;
    Resumption resumption;
    bool arrived = false;
    bool waits = false;
  };

  /// Has the meeting open for a call, unless another call is open or moves; `lock` is of mutex_. A
  /// call whose run has failed gives way: it only waits for the watchdog to tell its ranks.
  bool Open(const Key& key, std::int64_t now_ns, std::unique_lock<SpinLock>& lock);
  void FailOpenCall(std::shared_ptr<const Status> failure);  // requires mutex_
  void EndFailedCall();                                      // requires mutex_
  /// The part of a rank that has to wait: stays for a moment, or leaves a Waiter. `lock` is of
  /// mutex_; `num_done_before` calls had ended when the rank came.
  Arrival Wait(Rank& me, std::uint64_t num_done_before, Recorder::Entry& entry,
               WaiterFactory& factory, std::unique_lock<SpinLock>& lock);
  /// The last rank's part where other processes take part.
  Arrival BeginExchange(Rank& me, Recorder::Entry& entry, WaiterFactory& factory);
  /// Runs chunks until none is ready to begin; true for the thread that finished the last one.
  bool RunChunks();
  bool TakeChunk(std::size_t& chunk);
  [[nodiscard]] bool AreChunksReady() const;
  /// Where all chunks are begun, waits a moment for those that still run.
  void LookForEnd() const;
  /// Makes the chunks ready that the ranks that have come allow; requires mutex_.
  void AddReadyChunks();
  /// Has up to `count` runners help.
  void CallHelpers(std::size_t count);
  /// The part of a rank that runs chunks, until the call has ended or the rank has to wait.
  /// `num_done_before` calls had ended when it came.
  Arrival TakePart(Rank& me, std::uint64_t num_done_before, Recorder::Entry& entry,
                   WaiterFactory& factory);
  [[nodiscard]] Buffers buffers() {
    return {operands_.data(), results_.data(), num_ranks_, arrivals_.data(), counters_.data()};
  }
  /// Data is in place, or `failure` is not null: closes the call and has all ranks resumed that
  /// wait. Returns the time.
  std::int64_t Finish(std::shared_ptr<const Status> failure = nullptr);
  void Collect(TaskList& resumptions);  // of the ranks that wait; requires mutex_

  // What each call touches comes first, as in Exchange.
  CallSite& site_;
  const std::size_t num_ranks_;
  const std::unique_ptr<Exchange> exchange_;
  const std::size_t num_chunks_;
  const std::size_t num_helpers_;
  const bool starts_early_;
  const std::int64_t first_execution_;

  SpinLock mutex_;  // guards the next twelve
  State state_ = State::kDone;
  Key key_;
  std::int64_t opened_ns_ = 0;
  std::uint64_t epoch_ = 0;
  std::int64_t execution_ = 0;  // see CallRecord
  std::int64_t met_ns_ = 0;
  std::int64_t long_ns_ = 0;  // see GoingOn
  std::size_t num_arrived_ = 0;
  std::uint64_t num_done_ = 0;   // calls
  std::size_t num_staying_ = 0;  // ranks
  std::shared_ptr<const Status> failure_;
  SmallArray<Rank, 1> ranks_;

  SmallArray<const void*, 4> operands_;
  SmallArray<void*, 4> results_;

  // Of the call in progress. A helper that comes late for one call is as good a helper for the
  // next: whoever takes a chunk sees the buffers of the call that it belongs to.
  std::atomic<std::uint64_t> chunks_{0};        // ready ones << 32 | the next one to take
  std::atomic<std::size_t> num_unfinished_{0};  // chunks
  std::atomic<bool> is_left_{false};  // the exchange: to the thread that will come to Continue

  // Of work that starts early; mutex_ guards the first two.
  std::size_t num_at_work_ = 0;        // ranks that run chunks, perhaps of the call before
  std::vector<std::size_t> arrivals_;  // ranks
  std::vector<std::atomic<int>> counters_;

  std::vector<Help> helpers_;
  Continuation continuation_;
  std::condition_variable_any ended_;  // a call that failed, or that ranks stay for
};

}  // namespace jaxcoll

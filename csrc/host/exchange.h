// host/exchange.h: one call across processes, from the moment that this process's ranks have come.
//
// The call goes through its route's steps, (phase, round) in a fixed order that is the same for all
// processes. A step may run once those whose data it reads have left them, and those that read what
// it overwrites have done so; both mean that they have completed some number of steps, which they
// publish. Nobody waits for anything else, and no step needs a later one: so there is no deadlock.
//
// A process may so end a call to which others have yet to come: what they read lies in its lane,
// which is not taken up again before that. It is ahead of them by some calls, since lanes are also
// needed for calls that they have come to.
#pragma once

#include <atomic>   // std::atomic
#include <cstddef>  // std::byte, std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <memory>   // std::shared_ptr, std::unique_ptr
#include <string>   // std::string
#include <vector>   // std::vector

#include "core/footprint.h"
#include "core/pooled.h"
#include "core/small_array.h"
#include "core/status.h"
#include "host/copy_trials.h"
#include "host/diagnosis.h"
#include "host/job.h"
#include "host/membership.h"
#include "host/route.h"
#include "host/segment.h"
#include "host/work.h"

namespace jaxcoll {

/// One of a route's steps.
struct Step {
  std::size_t number = 0;  ///< in their order
  std::size_t phase = 0;
  std::size_t turn = 0;  ///< how many times all phases came before
};

/// The order of a route's steps: round r's phases follow each other at a distance that lets the
/// next round be left while this one is read.
class Steps {
 public:
  Steps(std::size_t num_phases, std::size_t num_rounds)
      : num_phases_(num_phases),
        num_rounds_(num_rounds),
        count_((num_rounds + num_phases - 1) * num_phases) {}

  [[nodiscard]] std::size_t count() const { return count_; }
  /// Goes on to the next one; of one round, past those that have nothing to do.
  void Next(Step& step) const {
    if (num_rounds_ == 1) {
      step.number += num_phases_ + 1;
      ++step.phase;
      ++step.turn;
      return;
    }
    ++step.number;
    if (++step.phase == num_phases_) {
      step.phase = 0;
      ++step.turn;
    }
  }
  /// At least num_rounds where the step has nothing to do.
  [[nodiscard]] std::size_t round(const Step& step) const {
    return step.turn < step.phase ? num_rounds_ : step.turn - step.phase;
  }
  [[nodiscard]] bool is_idle(const Step& step) const { return round(step) >= num_rounds_; }
  [[nodiscard]] bool is_end(const Step& step) const { return step.number >= count_; }

  /// How many steps those whose data `step` reads must have completed before it may run.
  [[nodiscard]] std::size_t NeedsLeft(const Step& step) const {
    return step.phase > 0 ? End(step.phase - 1, round(step)) : 0;
  }
  /// The same of those that read in the next phase what it overwrites.
  [[nodiscard]] std::size_t NeedsRead(const Step& step) const {
    const bool overwrites = step.phase + 1 < num_phases_ && round(step) >= kRoundsInWindow;
    return overwrites ? End(step.phase + 1, round(step) - kRoundsInWindow) : 0;
  }

 private:
  [[nodiscard]] std::size_t End(std::size_t phase, std::size_t round) const {
    return (round + phase) * num_phases_ + phase + 1;
  }

  std::size_t num_phases_;
  std::size_t num_rounds_;
  std::size_t count_;
};

/// What an exchange does for errors: names.
class CallNames {
 public:
  /// The op, its axes, shapes and dtypes, and the user's source line.
  [[nodiscard]] virtual std::string Text() const = 0;
  /// How long a rank may wait; < 0: for ever.
  [[nodiscard]] virtual std::int64_t timeout_ns() const = 0;
  /// How long one that compiles is waited for beyond that; < 0: for ever.
  [[nodiscard]] virtual std::int64_t compile_timeout_ns() const = 0;

 protected:
  ~CallNames() = default;
};

/// The exchanges of one group at one call site, one after the other.
class Exchange : public Pooled {
 public:
  /// `session` is the job's as it is now. All memory is allocated here.
  Exchange(Job& job, Session& session, std::uint64_t group, std::uint64_t site,
           const Membership& members, std::unique_ptr<const Route> route, std::size_t bytes_moved,
           const CallNames& names);
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange();

  /// What a call touches.
  void AddTo(Footprint& footprint) const;

  enum class Progress { kDone, kWaits, kFailed };

  /// Takes note of the job's session as it is now; before each call, and not during one.
  void Prepare();
  /// Whether the prepared call can't be made, or ended so: the job has failed.
  [[nodiscard]] bool HasFailed() const { return segment_->failed(); }
  /// Why, or null.
  [[nodiscard]] std::shared_ptr<const Status> Failure() const;

  /// Says where this process's buffers stand, of all calls; before the first one.
  void Bind(const Buffers& local) { local_ = local; }

  /// Begins the next call and goes as far as it can at once, or, with `spins`, without giving up
  /// the core for long. Its buffers stay until it has ended.
  Progress Begin(bool spins);
  /// Whether this process has left all that the others need to end the call.
  [[nodiscard]] bool IsLeft() const {
    return lane_ >= 0 && step_.number > 0 && route_->num_rounds() == 1 && route_->num_phases() == 2;
  }
  /// Goes on to the end.
  Progress Finish();

  /// The number of the call that has begun, and of the next one: the same on all processes, which
  /// count attachments and occurrences alike.
  [[nodiscard]] std::int64_t execution() const { return Execution(name_.occurrence); }
  [[nodiscard]] std::int64_t NextExecution() const {
    return Execution(turn_.occurrences->load(std::memory_order_relaxed) + 1);
  }

  /// Says of calls that this process has ended, and others have not come to, that it did.
  void ShowLeft(std::int64_t now_ns) const;

  /// Fails the job as it was when the call was prepared: this process can't take part.
  void Fail(const Status& cause) const;

 private:
  struct Peer : Pooled {
    std::size_t seat = 0;
    std::size_t process = 0;
    unsigned reads = 0;          // phases in which this process reads what the peer has left
    unsigned is_read = 0;        // phases in which the peer reads what this one has left
    bool is_watched = false;     // this process looks at its lane
    bool watches = false;        // it looks at this process's
    bool is_ahead = false;       // it may end the call before others have come to it
    const Lane* lane = nullptr;  // of this call; null: not found yet
    std::size_t lane_number = 0;
    std::size_t begin = 0;   // of the call in its window
    std::size_t needed = 0;  // steps, by the step that waits
    std::size_t progress = 0;
    std::size_t rounds_taken = 0;
  };

  /// Whether `process` looks at the lane of `other`, at some step of a call.
  [[nodiscard]] bool Watches(std::size_t process, std::size_t other) const;
  /// Whether `process` may end a call while others that watch it have yet to come.
  [[nodiscard]] bool GoesAhead(std::size_t process) const;
  /// Whether this process waits for nobody, so that it may be many calls ahead, and not only as
  /// many as a ring has processes.
  [[nodiscard]] bool IsRoot() const;

  [[nodiscard]] std::int64_t Execution(std::uint64_t occurrence) const {
    return static_cast<std::int64_t>(epoch_ << CallName::kOccurrenceBits | occurrence);
  }

  bool OpenLane();
  [[nodiscard]] Lane& lane() const;
  bool Find(Peer& peer) const;
  /// Whether the peer has done what the next step needs of it.
  bool HasReached(Peer& peer) const;
  /// Asks for what the others leave, where it is likely to be: often they have left it.
  void PrefetchPeers() const;
  bool AllHaveReached();
  /// Whether the next step may run, or the call, at its end, be left.
  bool CanGoOn();
  /// Notes what the next step needs of whom, if anything.
  void Need();
  /// Takes what has come of a round, of a route that takes one by one. False: it can't be read.
  bool TakeWhatCame(std::size_t round);
  /// Runs a part of a step, f(processes).
  template <typename F>
  bool Timed(const F& f);
  /// Notes where the peer's window is.
  void Locate(const Peer& peer);
  void Publish();
  void Ring(const Peer& peer) const;
  /// Runs the steps that may run; true where the call is over.
  bool Advance();
  /// Asks for the next call's memory, when this one needs nothing that is there: requests queue.
  void PrefetchOnce();
  /// After the last step.
  bool End();
  [[gnu::noinline]] void FailFor(const char* why) const;
  /// How long to look for the others without sleeping.
  [[nodiscard]] std::int64_t SpinNs() const;
  /// Goes on until it has looked for the others for so long since it has last done something.
  Progress Spin(std::int64_t limit_ns);
  void Sleep();
  /// Fails the job where there is no hope, or none any more.
  void Look(std::int64_t now_ns, std::int64_t since_ns);
  /// The calls of processes that will wait for one another for ever, or nothing.
  [[nodiscard]] std::string WrongCalls(std::int64_t now_ns, std::int64_t waited_ns);
  /// The seats of those for whom it waits.
  std::vector<std::size_t> Missing();
  /// Has those that still run say what they do; waits for that, not for long.
  void AskForStacks(const std::vector<std::size_t>& seats) const;
  /// By rank: whether it has not come to the call, of those whose processes are waited for; where
  /// they have all come, all of these. `there` gets what is known of each process's.
  [[nodiscard]] std::vector<bool> Absent(std::vector<RanksThere>& there);
  [[nodiscard]] std::string WaitText(std::int64_t waited_ns, const std::string& why);

  // What each call touches comes first, and what it seldom does last: so it has fewer cache lines.
  Job& job_;
  std::shared_ptr<Session> session_;
  const Segment* segment_ = nullptr;  // its
  std::uint64_t epoch_ = 0;           // of the job when session_ was taken
  Session::Turn turn_;                // of the last call
  const std::uint64_t group_;
  const std::uint64_t site_;
  const std::uint64_t hash_;  // of both, see CallName
  const Membership& members_;
  const std::unique_ptr<const Route> route_;
  std::unique_ptr<CopyTrials> trials_;  // null: of a route that leaves little
  const Steps steps_;
  const bool takes_one_by_one_;      // the route
  const bool is_ahead_;              // as Peer::is_ahead
  const std::size_t turning_bytes_;  // of a window, of calls that go round in it; else 0
  const std::size_t turning_span_;   // of a window, in which these go round
  bool fits_ = true;                 // the session, what the route was made for
  Buffers local_{};
  SmallArray<std::size_t, 3> watchers_;  // seats of those that look at this process's lane

  // Of the call in progress.
  bool has_ended_ = false;       // all others' lanes
  bool has_prefetched_ = false;  // the next call's memory
  bool is_shown_ = false;        // in the lane, as one that waits
  int lane_ = -1;
  std::size_t begin_ = 0;  // of the call in this process's window
  CallName name_;
  std::uint64_t tag_ = 0;
  Step step_;
  std::uint64_t num_moves_ = 0;   // steps that it has run, and what it has taken one by one
  bool has_noted_needs_ = false;  // of step_, see Need
  bool has_needs_ = false;        // of step_, once noted
  SmallArray<Peer, 1> peers_;
  SmallArray<std::byte*, 4> windows_;  // by process

  std::vector<std::int64_t> pids_;  // by process
  std::int64_t excused_ns_ = 0;     // when somebody who was waited for had a reason
  std::int64_t next_look_ns_ = 0;   // for a stalemate: when it has waited for so long
  const CallNames& names_;
  const std::size_t window_bytes_;
  const std::vector<std::int64_t> processes_;  // by seat
  const bool can_read_peers_;
  const CopyCostsBySize copy_costs_;
};

}  // namespace jaxcoll

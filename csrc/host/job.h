// host/job.h: this process's place among those of the host that share a segment.
#pragma once

#include <atomic>         // std::atomic
#include <cstddef>        // std::size_t
#include <cstdint>        // std::int64_t, std::uint64_t
#include <deque>          // std::deque
#include <functional>     // std::function
#include <memory>         // std::shared_ptr, std::unique_ptr
#include <mutex>          // std::mutex
#include <set>            // std::set
#include <span>           // std::span
#include <string>         // std::string
#include <string_view>    // std::string_view
#include <unordered_map>  // std::unordered_map
#include <utility>        // std::move
#include <vector>         // std::vector

#include "core/spin_lock.h"
#include "core/status.h"
#include "host/black_box.h"
#include "host/copy_costs.h"
#include "host/segment.h"

namespace jaxcoll {

/// What another process is doing.
struct Whereabouts {
  std::string_view state;  ///< "running", "stopped", "leaving", "ended", "gone", "not there yet"
  std::string_view gone;   ///< why it can't come any more, or empty
};

/// The time between two attachments: a segment, and what this process keeps of its calls there.
/// All methods may be called from any thread.
class Session {
 public:
  /// Sits down in `segment`, whose seats are those of `processes`, as process `mine`.
  static Status Begin(std::shared_ptr<const Segment> segment, std::vector<std::int64_t> processes,
                      std::int64_t mine, std::shared_ptr<Session>& session);

  [[nodiscard]] const Segment& segment() const { return *segment_; }
  [[nodiscard]] std::size_t seat() const { return seat_; }
  [[nodiscard]] std::int64_t process() const { return processes_[seat_]; }
  /// By seat.
  [[nodiscard]] const std::vector<std::int64_t>& processes() const { return processes_; }
  /// -1 where the process is on another host.
  [[nodiscard]] int SeatOf(std::int64_t process) const;
  /// More processes than cores: whoever waits must give up the core.
  [[nodiscard]] bool is_crowded() const { return is_crowded_; }

  /// How many times this process has come to a site in a group. Lives as long as the session.
  std::atomic<std::uint64_t>& Occurrences(std::uint64_t group, std::uint64_t site);
  /// Whether this process has begun that call, however long ago.
  [[nodiscard]] bool HasBegun(const CallName& name);

  /// A call's place among those of this process.
  struct Turn {
    std::atomic<std::uint64_t>* occurrences = nullptr;  ///< of its site in its group
    std::uint64_t ticket = 0;                           ///< 0: it has not come yet
    std::uint64_t occurrence = 0;                       ///< how many have come there, with it
  };
  /// A lane that nobody looks at any more, or -1 where there is none. It is the caller's until
  /// LeaveLane.
  /// A call comes with its first try. Whoever tries first gets one first: calls that all processes
  /// begin in one order so never hold all lanes that an earlier one waits for.
  int TakeLane(Turn& turn);
  /// Takes `bytes` of the window of `lane`, which the caller has; returns where they begin: behind
  /// those of the lane's last call, at the end of the window's first `span` from its begin again.
  /// What a core writes again has so left the caches of those that have read it, see
  /// kRoundsInWindow.
  std::size_t TakeBytes(int lane, std::size_t bytes, std::size_t span);
  /// The call `tag` in `lane` is over for this process; those at the seats `lookers` may still look
  /// at it. False, `is_ahead`: some of these may not even have come to the call, and too many calls
  /// have been left so that have not ended.
  bool LeaveLane(int lane, std::uint64_t tag, std::span<const std::size_t> lookers, bool is_ahead);
  /// Whether one more call may be left that others have not ended.
  [[nodiscard]] bool MayGoAhead();
  /// Whether the process at `seat` has ended the call `tag`, which is in `lane` here.
  [[nodiscard]] bool HasEnded(std::size_t seat, int lane, std::uint64_t tag) const {
    return last_ended_[seat].theirs.load(std::memory_order_acquire) == tag ||
           segment_->ended(seat, seat_, static_cast<std::size_t>(lane))
                   .load(std::memory_order_seq_cst) == tag;
  }
  /// This process has ended the call `tag`, for which it looked at a lane of `seat`.
  void NoteEnded(std::size_t seat, std::uint64_t tag) {
    last_ended_[seat].mine.store(tag, std::memory_order_release);
  }
  /// Writes into this process's `lane` what it has ended so, and reads that in a lane of `seat`.
  void TellEnded(Lane& lane) const;
  void HearEnded(std::size_t seat, const Lane& lane);
  /// The seats of those that have not ended calls left here, whose lanes they keep so.
  [[nodiscard]] std::vector<std::size_t> Laggards();
  /// Shows the calls of `site` that others have not ended for a while as what this process waits
  /// in.
  void ShowLeft(std::uint64_t site, std::int64_t now_ns, const std::function<std::string()>& text);
  /// The groups of all such calls.
  [[nodiscard]] std::set<std::uint64_t> GroupsLeft();

  /// Where to look first for the lane of another process's next call: processes go round among few
  /// lanes. A hint, by what was found before.
  [[nodiscard]] std::size_t LikelyLane(std::size_t seat) const {
    return next_lane_[At(seat, last_lane_[seat].load(std::memory_order_relaxed))].load(
        std::memory_order_relaxed);
  }
  void FoundAt(std::size_t seat, std::size_t lane) {
    const std::size_t last = last_lane_[seat].load(std::memory_order_relaxed);
    last_lane_[seat].store(lane, std::memory_order_relaxed);
    next_lane_[At(seat, last)].store(lane, std::memory_order_relaxed);
  }

  /// Whether this process may read the memory of all others (host/peer_memory.h): asks for the
  /// nonce that stands in each.
  [[nodiscard]] bool Probe() const;
  /// What all processes have agreed on after that, before the first call: whether they may, and
  /// what copies cost.
  void LetPeersBeRead(bool allowed, const CopyCostsBySize& costs) {
    can_read_peers_ = allowed;
    copy_costs_ = costs;
  }
  [[nodiscard]] bool can_read_peers() const { return can_read_peers_; }
  [[nodiscard]] const CopyCostsBySize& copy_costs() const { return copy_costs_; }

  /// What the process at `seat` tells about itself, which others may not be let read: then null.
  /// To be called before the first call.
  void Observe(std::size_t seat, std::shared_ptr<const BlackBox> box) {
    boxes_[seat] = std::move(box);
  }
  [[nodiscard]] const BlackBox* box(std::size_t seat) const { return boxes_[seat].get(); }

  /// Whether another process has stood in a call for a while.
  [[nodiscard]] bool IsWaiting(std::size_t seat) const;

  /// Asks the system about another process.
  [[nodiscard]] Whereabouts WhereIs(std::size_t seat, std::int64_t now_ns) const;

  /// Whether another process has a reason not to come to calls for now, see BlackBox::IsExcused.
  [[nodiscard]] bool IsAnyoneExcused(std::int64_t now_ns, std::int64_t compile_timeout_ns) const;

  /// This process is about to exit: others need not wait for calls that it has not begun.
  void Leave() const;
  /// This process waits for all to attach anew, since then, and so makes no more calls here; with 0
  /// it does not.
  void NoteReset(std::int64_t since_ns) const;

 private:
  struct Left {
    int lane;
    std::uint64_t tag;
    bool is_ahead;   // and not known to have ended
    bool has_ended;  // as far as it is known
    std::vector<std::size_t> lookers;
  };
  /// Tags of the calls ended last, see Lane::has_ended.
  struct LastEnded {
    std::atomic<std::uint64_t> mine, theirs;
  };

  Session() = default;

  /// Whether all have ended the call; requires lanes_lock_.
  [[nodiscard]] bool HasEnded(const Left& left) const;
  /// The same, and takes note of it.
  bool SeeEnded(Left& left);
  void DropOldest();  ///< of these
  /// As MayGoAhead; requires lanes_lock_.
  bool HasRoomAhead();
  /// Whether a process stands in other calls, or in callbacks, after which it may come to more.
  [[nodiscard]] bool HasWork(std::size_t seat) const;
  /// The one that was left i-th, i <= num_left_.
  [[nodiscard]] Left& left(std::size_t i) {
    const std::size_t at = first_left_ + i;
    return left_[at < left_.size() ? at : at - left_.size()];  // % would divide
  }
  [[nodiscard]] std::size_t At(std::size_t seat, std::size_t lane) const {
    return seat * left_.size() + lane;
  }

  std::shared_ptr<const Segment> segment_;
  std::size_t seat_ = 0;
  std::vector<std::int64_t> processes_;
  bool is_crowded_ = false;
  bool can_read_peers_ = false;
  CopyCostsBySize copy_costs_;
  std::vector<std::shared_ptr<const BlackBox>> boxes_;  // by seat
  std::uint64_t probe_ = 0;                             // what others find here

  std::mutex occurrences_mutex_;
  // One after the other, as sites are made: those of eight calls of a program are in one line.
  std::deque<std::atomic<std::uint64_t>> counts_;
  std::unordered_map<std::uint64_t, std::unordered_map<std::uint64_t, std::atomic<std::uint64_t>*>>
      occurrences_;  // by group and site

  // Lanes go round among as few as possible, which so stay in this core's cache, with small calls'
  // part of their windows: the one that was left first is the next, if nobody reads it; else a
  // fresh one. Those that calls needed that went ahead become fresh ones again.
  SpinLock lanes_lock_;  // guards the next seven, and what calls add to their count
  std::uint64_t last_ticket_ = 0, next_served_ = 1;
  std::vector<int> fresh_;
  std::vector<Left> left_;  // a ring of num_lanes
  std::size_t first_left_ = 0, num_left_ = 0, num_ahead_ = 0;

  std::vector<LastEnded> last_ended_;  // by seat

  std::vector<std::size_t> next_begin_;  // by lane, of whoever has it

  // Hints: the lane found last by seat, and the one that was found after each.
  std::vector<std::atomic<std::size_t>> last_lane_, next_lane_;
};

/// Where call sites find the session. One for each process, Get(), never destroyed; tests have
/// several. All methods may be called from any thread.
class Job {
 public:
  static Job& Get();

  /// Null: this process shares nothing.
  [[nodiscard]] std::shared_ptr<Session> session() const;
  /// Why calls between processes fail until all attach anew, or null.
  [[nodiscard]] std::shared_ptr<const Status> Failure() const;
  /// Counts the attachments.
  [[nodiscard]] std::uint64_t epoch() const { return epoch_.load(std::memory_order_acquire); }
  void Attach(std::shared_ptr<Session> session);

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Session> session_;
  std::atomic<std::uint64_t> epoch_{0};
};

}  // namespace jaxcoll

#include "host/job.h"

#include <signal.h>  // kill, NOLINT(modernize-deprecated-headers)
#include <unistd.h>  // getpid, sysconf

#include <algorithm>  // std::all_of, std::find, std::max, std::min
#include <cerrno>     // errno
#include <ctime>      // nanosleep, timespec
#include <optional>   // std::optional
#include <utility>    // std::move

#include "core/clock.h"
#include "host/peer_memory.h"
#include "host/process_stat.h"
#include "host/threads.h"
#include "host/watchdog.h"

namespace jaxcoll {
namespace {

// A process that is about to exit may still have steps in flight that reach a call.
constexpr std::int64_t kLeavingNs = 5'000'000'000;
// The same of one that waits in reset(), which has awaited the steps whose results are held.
constexpr std::int64_t kResettingNs = 1'000'000'000;
// Of a process that is about to exit: a step that nobody has awaited. So many looks, since one may
// fall between two kernels.
bool IsComputing(std::int64_t pid) {
  constexpr int kLooks = 10;
  const timespec nap{.tv_sec = 0, .tv_nsec = 1'000'000};
  for (int i = 0; i < kLooks && pid != getpid(); ++i) {
    if (IsAnyThreadBusy(pid)) {
      return true;
    }
    nanosleep(&nap, nullptr);
  }
  return false;
}

// So many lanes, and half of them, may hold calls to which others have not come: the rest is for
// calls that these have come to, in an order of their own. The further ahead, the fewer turns
// processes take that share cores: a broadcast of 256 B, 4 processes on 2 cores, takes 0.86 of what
// it does with 8.
constexpr std::size_t kMostAhead = 16;
constexpr std::size_t kLanesPerAhead = 2;

// Calls that nobody is ahead of go round about so many lanes. While more do, each call gives one
// back.
constexpr std::size_t kFewLanes = 4;

std::optional<ProcessStat> StatOf(std::int64_t pid) {
  return ReadProcessStat("/proc/" + std::to_string(pid));
}

}  // namespace

Status Session::Begin(std::shared_ptr<const Segment> segment, std::vector<std::int64_t> processes,
                      std::int64_t mine, std::shared_ptr<Session>& session) {
  std::shared_ptr<Session> made(new Session());
  made->segment_ = std::move(segment);
  const SegmentShape& shape = made->segment_->shape();
  made->processes_ = std::move(processes);
  const int seat = made->SeatOf(mine);
  if (seat < 0 || made->processes_.size() != shape.num_seats) {
    return InvalidArgument("process " + std::to_string(mine) + " has none of the " +
                           std::to_string(shape.num_seats) + " seats");
  }
  made->seat_ = static_cast<std::size_t>(seat);
  made->is_crowded_ =
      static_cast<std::int64_t>(shape.num_seats) > std::max(1L, sysconf(_SC_NPROCESSORS_ONLN));
  made->boxes_.resize(shape.num_seats);
  made->left_.resize(shape.num_lanes);
  made->last_ended_ = std::vector<LastEnded>(shape.num_seats);
  made->next_begin_.resize(shape.num_lanes);
  made->last_lane_ = std::vector<std::atomic<std::size_t>>(shape.num_seats);
  made->next_lane_ = std::vector<std::atomic<std::size_t>>(shape.num_seats * shape.num_lanes);
  for (std::size_t lane = shape.num_lanes; lane > 0; --lane) {
    made->fresh_.push_back(static_cast<int>(lane - 1));
  }
  Seat& sat = made->segment_->seat(made->seat_);
  sat.start_ticks.store(StatOf(getpid()).value_or(ProcessStat{}).start_ticks,
                        std::memory_order_relaxed);
  made->probe_ = made->segment_->nonce();
  sat.probe.store(&made->probe_, std::memory_order_relaxed);
  sat.pid.store(getpid(), std::memory_order_release);
  session = std::move(made);
  return {};
}

int Session::SeatOf(std::int64_t process) const {
  const auto found = std::find(processes_.begin(), processes_.end(), process);
  return found == processes_.end() ? -1 : static_cast<int>(found - processes_.begin());
}

std::atomic<std::uint64_t>& Session::Occurrences(std::uint64_t group, std::uint64_t site) {
  const std::lock_guard<std::mutex> lock(occurrences_mutex_);
  std::atomic<std::uint64_t>*& count = occurrences_[group][site];
  if (count == nullptr) {
    count = &counts_.emplace_back(0);
  }
  return *count;
}

bool Session::HasBegun(const CallName& name) {
  const std::lock_guard<std::mutex> lock(occurrences_mutex_);
  const auto sites = occurrences_.find(name.group);
  if (sites == occurrences_.end()) {
    return false;
  }
  const auto count = sites->second.find(name.site);
  return count != sites->second.end() &&
         count->second->load(std::memory_order_relaxed) >= name.occurrence;
}

void Session::TellEnded(Lane& lane) const {
  const std::size_t count = std::min(lane.has_ended.size(), last_ended_.size() - 1);
  for (std::size_t i = 0, seat = seat_; i < count; ++i) {
    seat = seat + 1 < last_ended_.size() ? seat + 1 : 0;
    lane.has_ended[i].store(last_ended_[seat].mine.load(std::memory_order_acquire),
                            std::memory_order_relaxed);
  }
}

void Session::HearEnded(std::size_t seat, const Lane& lane) {
  const std::size_t i = (seat < seat_ ? seat_ : seat_ + last_ended_.size()) - seat - 1;
  if (i < lane.has_ended.size()) {
    last_ended_[seat].theirs.store(lane.has_ended[i].load(std::memory_order_relaxed),
                                   std::memory_order_release);
  }
}

bool Session::HasEnded(const Left& left) const {
  return left.has_ended ||
         std::all_of(left.lookers.begin(), left.lookers.end(),
                     [&](std::size_t seat) { return HasEnded(seat, left.lane, left.tag); });
}

bool Session::SeeEnded(Left& left) {
  left.has_ended = HasEnded(left);
  if (left.has_ended && left.is_ahead) {
    left.is_ahead = false;
    --num_ahead_;
  }
  return left.has_ended;
}

void Session::DropOldest() {
  first_left_ = first_left_ + 1 < left_.size() ? first_left_ + 1 : 0;
  --num_left_;
}

int Session::TakeLane(Turn& turn) {
  const std::lock_guard<SpinLock> lock(lanes_lock_);
  if (turn.ticket == 0) {
    turn.ticket = ++last_ticket_;
    turn.occurrence = turn.occurrences->load(std::memory_order_relaxed) + 1;
    turn.occurrences->store(turn.occurrence, std::memory_order_relaxed);
  }
  if (turn.ticket != next_served_) {
    return -1;
  }
  // The oldest alone, unless there is nothing else.
  const std::size_t num_looks = fresh_.empty() ? num_left_ : std::min<std::size_t>(1, num_left_);
  for (std::size_t i = 0; i < num_looks; ++i) {
    Left& found = left(i);
    if (SeeEnded(found)) {
      const int lane = found.lane;
      if (i > 0) {
        std::swap(found, left(0));
      }
      DropOldest();
      if (num_left_ > kFewLanes && SeeEnded(left(0))) {  // more go round than there need to
        fresh_.push_back(left(0).lane);
        DropOldest();
      }
      ++next_served_;
      return lane;
    }
  }
  if (fresh_.empty()) {
    return -1;
  }
  const int lane = fresh_.back();
  fresh_.pop_back();
  ++next_served_;
  return lane;
}

std::size_t Session::TakeBytes(int lane, std::size_t bytes, std::size_t span) {
  std::size_t& next = next_begin_[static_cast<std::size_t>(lane)];
  const std::size_t begin = next + bytes <= span ? next : 0;
  next = begin + bytes;
  return begin;
}

bool Session::HasRoomAhead() {
  const std::size_t most = std::min(left_.size() / kLanesPerAhead, kMostAhead);
  if (num_ahead_ < most) {
    return true;
  }
  // Others end calls in their order, mostly: the rest needs no look where one has not ended.
  for (std::size_t i = 0; i < num_left_; ++i) {
    if (!SeeEnded(left(i)) && left(i).is_ahead) {
      break;
    }
  }
  return num_ahead_ < most;
}

bool Session::MayGoAhead() {
  const std::lock_guard<SpinLock> lock(lanes_lock_);
  return HasRoomAhead();
}

bool Session::LeaveLane(int lane, std::uint64_t tag, std::span<const std::size_t> lookers,
                        bool is_ahead) {
  const std::lock_guard<SpinLock> lock(lanes_lock_);
  Left& last = left(num_left_);
  last.lane = lane;
  last.tag = tag;
  last.lookers.resize(lookers.size());
  for (std::size_t i = 0; i < lookers.size(); ++i) {  // of one or two, as a rule
    last.lookers[i] = lookers[i];
  }
  last.is_ahead = false;
  last.has_ended = false;
  if (is_ahead && !HasRoomAhead() && !SeeEnded(last)) {
    return false;
  }
  last.is_ahead = is_ahead && !last.has_ended;
  ++num_left_;
  num_ahead_ += last.is_ahead ? 1 : 0;
  return true;
}

std::vector<std::size_t> Session::Laggards() {
  const std::lock_guard<SpinLock> lock(lanes_lock_);
  std::vector<std::size_t> seats;
  for (std::size_t i = 0; i < num_left_; ++i) {
    for (const std::size_t seat : left(i).lookers) {
      if (!HasEnded(seat, left(i).lane, left(i).tag) &&
          std::find(seats.begin(), seats.end(), seat) == seats.end()) {
        seats.push_back(seat);
      }
    }
  }
  return seats;
}

void Session::ShowLeft(std::uint64_t site, std::int64_t now_ns,
                       const std::function<std::string()>& text) {
  const std::lock_guard<SpinLock> lock(lanes_lock_);
  for (std::size_t i = 0; i < num_left_; ++i) {
    if (!left(i).is_ahead) {
      continue;
    }
    Lane& lane = segment_->lane(seat_, static_cast<std::size_t>(left(i).lane));
    if (lane.site.load(std::memory_order_relaxed) != site) {
      continue;
    }
    if (lane.waits_since_ns.load(std::memory_order_relaxed) == 0 && !HasEnded(left(i))) {
      lane.text.Set(text());
      lane.members.Clear();
      for (const std::size_t seat : left(i).lookers) {
        lane.members.Add(seat);
      }
      lane.waits_since_ns.store(-now_ns, std::memory_order_release);
    }
  }
}

std::set<std::uint64_t> Session::GroupsLeft() {
  const std::lock_guard<SpinLock> lock(lanes_lock_);
  std::set<std::uint64_t> groups;
  for (std::size_t i = 0; i < num_left_; ++i) {
    if (left(i).is_ahead && !HasEnded(left(i))) {
      const Lane& lane = segment_->lane(seat_, static_cast<std::size_t>(left(i).lane));
      groups.insert(lane.group.load(std::memory_order_relaxed));
    }
  }
  return groups;
}

bool Session::Probe() const {
  for (std::size_t i = 0; i < segment_->shape().num_seats; ++i) {
    const Seat& other = segment_->seat(i);
    std::uint64_t found = 0;
    const PeerRows rows{.rows = 1, .bytes = sizeof(found), .from_step = 0, .to_step = 0};
    if (!ReadPeer(other.pid.load(std::memory_order_acquire), reinterpret_cast<std::byte*>(&found),
                  reinterpret_cast<const std::byte*>(other.probe.load()), rows) ||
        found != segment_->nonce()) {
      return false;
    }
  }
  return true;
}

Whereabouts Session::WhereIs(std::size_t seat, std::int64_t now_ns) const {
  const Seat& other = segment_->seat(seat);
  const std::int64_t pid = other.pid.load(std::memory_order_acquire);
  if (pid == 0) {
    return {.state = "not there yet", .gone = ""};
  }
  const std::optional<ProcessStat> stat = StatOf(pid);
  const char letter = stat.value_or(ProcessStat{}).state;
  const std::int64_t known_ticks = other.start_ticks.load(std::memory_order_relaxed);
  const bool is_known = stat.has_value() && known_ticks != 0;
  // Too many open files here say nothing about a process there.
  const bool is_gone = is_known ? letter == 'Z' || letter == 'X' || stat->start_ticks != known_ticks
                                : kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
  const std::int64_t since_ns = other.leaves_since_ns.load(std::memory_order_acquire);
  if (is_gone && since_ns == 0) {
    return {.state = "gone", .gone = "the process is gone"};
  }
  if (since_ns != 0) {
    const bool may_come = !is_gone && (now_ns - since_ns <= kLeavingNs || IsComputing(pid));
    return {.state = is_gone ? "ended" : "leaving",
            .gone = may_come ? "" : "the process has come to its end without this call"};
  }
  if (letter == 'T' || letter == 't') {
    return {.state = "stopped", .gone = ""};
  }
  const std::int64_t resets_ns = other.resets_since_ns.load(std::memory_order_acquire);
  const bool resets =
      resets_ns != 0 && now_ns - resets_ns > kResettingNs && !IsComputing(pid) && !HasWork(seat);
  return {.state = "running",
          .gone = resets ? "the process has called jaxcoll.reset() without this call" : ""};
}

bool Session::HasWork(std::size_t seat) const {
  return IsWaiting(seat) || (boxes_[seat] != nullptr &&
                             boxes_[seat]->header().callbacks.load(std::memory_order_relaxed) > 0);
}

bool Session::IsWaiting(std::size_t seat) const {
  for (std::size_t i = 0; i < segment_->shape().num_lanes; ++i) {
    if (segment_->lane(seat, i).waits_since_ns.load(std::memory_order_acquire) > 0) {
      return true;
    }
  }
  return false;
}

bool Session::IsAnyoneExcused(std::int64_t now_ns, std::int64_t compile_timeout_ns) const {
  for (std::size_t seat = 0; seat < boxes_.size(); ++seat) {
    if (boxes_[seat] != nullptr && boxes_[seat]->IsExcused(now_ns, compile_timeout_ns) &&
        WhereIs(seat, now_ns).state == "running") {
      return true;
    }
  }
  return false;
}

void Session::NoteReset(std::int64_t since_ns) const {
  segment_->seat(seat_).resets_since_ns.store(since_ns, std::memory_order_release);
}

void Session::Leave() const {
  if (segment_->seat(seat_).pid.load(std::memory_order_relaxed) != getpid()) {
    return;  // a forked child, whose end is not the process's
  }
  segment_->seat(seat_).leaves_since_ns.store(NowNs(), std::memory_order_release);
}

Job& Job::Get() {
  static Job* const job = new Job();  // leaked: call sites may use it at exit
  return *job;
}

std::shared_ptr<Session> Job::session() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return session_;
}

std::shared_ptr<const Status> Job::Failure() const {
  const std::shared_ptr<Session> now = session();
  if (now == nullptr || !now->segment().failed()) {
    return nullptr;
  }
  return std::make_shared<const Status>(Internal(now->segment().failure()));
}

void Job::Attach(std::shared_ptr<Session> session) {
  Watchdog::Get().SettleFailures();  // ranks that come late with one must not fail the new session
  const std::lock_guard<std::mutex> lock(mutex_);
  session_ = std::move(session);
  epoch_.fetch_add(1, std::memory_order_release);
}

}  // namespace jaxcoll

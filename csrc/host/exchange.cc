#include "host/exchange.h"

#include <linux/futex.h>  // FUTEX_WAIT
#include <sched.h>        // sched_yield
#include <sys/syscall.h>  // SYS_futex
#include <unistd.h>       // syscall

#include <algorithm>  // std::any_of, std::max, std::min
#include <ctime>      // nanosleep, timespec
#include <utility>    // std::move

#include "core/align.h"
#include "core/clock.h"
#include "core/relax.h"

namespace jaxcoll {
namespace {

// Looks at the others before the core is offered to whoever wants it. Where processes share cores
// that may be who is waited for.
constexpr int kBusyLooks = 200;
constexpr int kCrowdedLooks = 1;
// How long to look for the others before a handler's program waits in a future, and a runner
// sleeps. Where processes share cores, the others may have to take their turns first, which is not
// worth two threads' wakes.
constexpr std::int64_t kSpinNs = 200'000;
constexpr std::int64_t kCrowdedSpinNs = 1'000'000;
// Of a window: what is asked for before it is read. Processors see to the rest.
constexpr std::size_t kSmallBytes = 4 * kCacheLine;
// A sleeper looks after the others this often.
constexpr std::int64_t kNapNs = 50'000'000;
// Of a window. A call that uses less begins where the window does, where lines are near; and one
// that uses more than half of it, which has turns of its own.
constexpr std::size_t kLeastTurningBytes = std::size_t{8} * 1024;
// Of a window, in parts: how far a root's calls go round, which lie in many lanes before others
// have come to the first; and those of processes that share cores, and their caches. Calls that
// take more than half of that begin where the window does.
constexpr std::size_t kRootSpans = 8;
constexpr std::size_t kCrowdedSpans = 4;

void PrefetchSmall(const std::byte* window) {
  for (std::size_t at = 0; at < kSmallBytes; at += kCacheLine) {
    __builtin_prefetch(window + at);
  }
}

std::size_t TurningBytes(const Route& route, std::size_t window_bytes) {
  const std::size_t used = std::min(route.num_rounds(), kRoundsInWindow) * route.round_bytes();
  return kLeastTurningBytes <= used && used <= window_bytes / 2 ? RoundedUp(used, kCacheLine) : 0;
}

std::size_t TurningSpan(std::size_t window_bytes, bool is_root, bool is_crowded) {
  return window_bytes / (is_root ? kRootSpans : is_crowded ? kCrowdedSpans : 1);
}

}  // namespace

Exchange::Exchange(Job& job, Session& session, std::uint64_t group, std::uint64_t site,
                   const Membership& members, std::unique_ptr<const Route> route,
                   std::size_t bytes_moved, const CallNames& names)
    : job_(job),
      turn_{.occurrences = &session.Occurrences(group, site)},
      group_(group),
      site_(site),
      hash_(CallName::HashOf(group, site)),
      members_(members),
      route_(std::move(route)),
      steps_(route_->num_phases(), route_->num_rounds()),
      takes_one_by_one_(route_->takes_one_by_one()),
      is_ahead_(GoesAhead(members.mine())),
      turning_bytes_(TurningBytes(*route_, session.segment().shape().window_bytes)),
      turning_span_(
          TurningSpan(session.segment().shape().window_bytes, IsRoot(), session.is_crowded())),
      peers_(members.num_processes() - 1),
      windows_(members.num_processes()),
      pids_(members.num_processes()),
      names_(names),
      window_bytes_(session.segment().shape().window_bytes),
      processes_(session.processes()),
      can_read_peers_(session.can_read_peers()),
      copy_costs_(session.copy_costs()) {
  const std::size_t mine = members.mine();
  std::vector<std::size_t> watchers;
  for (std::size_t process = 0, i = 0; process < members.num_processes(); ++process) {
    if (process == mine) {
      continue;
    }
    Peer& peer = peers_[i++];
    peer.process = process;
    peer.seat = members.seat(process);
    for (std::size_t phase = 1; phase < route_->num_phases(); ++phase) {
      peer.reads |= route_->Reads(phase, mine, process) ? 1U << phase : 0;
      peer.is_read |= route_->Reads(phase, process, mine) ? 1U << phase : 0;
    }
    peer.is_watched = Watches(mine, process);
    peer.watches = Watches(process, mine);
    peer.is_ahead = GoesAhead(process);
    if (peer.watches) {
      watchers.push_back(peer.seat);
    }
  }
  watchers_.Assign(watchers);
  if (route_->round_bytes() >= kLeastStreamBytes) {
    const bool takes =
        std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.reads != 0; });
    trials_ = std::make_unique<CopyTrials>(bytes_moved, takes);
  }
}

bool Exchange::Watches(std::size_t process, std::size_t other) const {
  for (std::size_t phase = 1; phase < route_->num_phases(); ++phase) {
    const bool overwrites = route_->num_rounds() > kRoundsInWindow;
    if (route_->Reads(phase, process, other) ||
        (overwrites && route_->Reads(phase, other, process))) {
      return true;
    }
  }
  return false;
}

bool Exchange::GoesAhead(std::size_t process) const {
  for (std::size_t other = 0; other < members_.num_processes(); ++other) {
    if (other != process && Watches(other, process) && !Watches(process, other)) {
      return true;
    }
  }
  return false;
}

bool Exchange::IsRoot() const {
  const std::size_t mine = members_.mine();
  for (std::size_t other = 0; other < members_.num_processes(); ++other) {
    if (other != mine && Watches(mine, other)) {
      return false;
    }
  }
  return GoesAhead(mine);
}

Exchange::~Exchange() = default;

void Exchange::AddTo(Footprint& footprint) const {
  footprint.Add(turn_.occurrences, sizeof(*turn_.occurrences));
  footprint.Add(route_.get());
  footprint.Add(this, sizeof(*this));
  if (peers_.size() > 1) {  // else it lies within
    footprint.Add(peers_.data(), peers_.size() * sizeof(Peer));
  }
  if (trials_ != nullptr) {
    footprint.Add(trials_.get(), sizeof(*trials_));
  }
}

Lane& Exchange::lane() const {
  return segment_->lane(session_->seat(), static_cast<std::size_t>(lane_));
}

void Exchange::Prepare() {
  if (const std::uint64_t epoch = job_.epoch(); session_ == nullptr || epoch != epoch_) {
    epoch_ = epoch;
    session_ = job_.session();
    segment_ = &session_->segment();
    turn_.occurrences = &session_->Occurrences(group_, site_);
    fits_ = segment_->shape().window_bytes == window_bytes_ &&
            session_->processes() == processes_ && session_->can_read_peers() == can_read_peers_ &&
            session_->copy_costs() == copy_costs_ && steps_.count() <= Lane::kMaxProgress;
    for (std::size_t process = 0; process < members_.num_processes(); ++process) {
      const Seat& seat = segment_->seat(members_.seat(process));
      pids_[process] = seat.pid.load(std::memory_order_acquire);
    }
  }
}

std::shared_ptr<const Status> Exchange::Failure() const {
  if (!HasFailed()) {
    return nullptr;
  }
  return std::make_shared<const Status>(Internal(segment_->failure()));
}

void Exchange::Fail(const Status& cause) const { segment_->Fail(cause.message); }

void Exchange::FailFor(const char* why) const { segment_->Fail(names_.Text() + ": " + why); }

// ---- Steps ------------------------------------------------------------------------------------

// All of a small call in one piece: that thirty functions call each other takes 5 to 13% of it.
[[gnu::flatten]] Exchange::Progress Exchange::Begin(bool spins) {
  turn_.ticket = 0;
  lane_ = -1;
  step_ = {};
  has_noted_needs_ = false;
  has_ended_ = false;
  has_prefetched_ = false;
  is_shown_ = false;
  for (Peer& peer : peers_) {
    peer.lane = nullptr;
    peer.needed = 0;
    peer.progress = 0;
    peer.rounds_taken = 0;
  }
  if (!fits_) {
    FailFor("it does not fit the job's shared memory");
    return Progress::kFailed;
  }
  if (spins) {
    return Spin(SpinNs());
  }
  if (OpenLane() && Advance()) {
    return Progress::kDone;
  }
  return HasFailed() ? Progress::kFailed : Progress::kWaits;
}

bool Exchange::OpenLane() {
  lane_ = session_->TakeLane(turn_);
  name_ = {
      .group = group_, .site = site_, .occurrence = turn_.occurrence & CallName::kMaxOccurrence};
  tag_ = CallName::Tag(hash_, name_.occurrence);
  if (lane_ < 0) {
    return false;
  }
  Seat& seat = segment_->seat(session_->seat());
  const auto used = static_cast<std::uint32_t>(lane_ + 1);
  std::uint32_t known = seat.num_used_lanes.load(std::memory_order_relaxed);
  while (known < used && !seat.num_used_lanes.compare_exchange_weak(known, used)) {
  }
  begin_ = turning_bytes_ > 0 ? session_->TakeBytes(lane_, turning_bytes_, turning_span_) : 0;
  windows_[members_.mine()] =
      segment_->window(session_->seat(), static_cast<std::size_t>(lane_)) + begin_;
  if (trials_ != nullptr) {
    trials_->Begin();
  }
  return true;
}

bool Exchange::Find(Peer& peer) const {
  const Segment& segment = *segment_;
  const std::size_t num_lanes = segment.seat(peer.seat).num_used_lanes.load();
  std::size_t at = session_->LikelyLane(peer.seat);
  for (std::size_t i = 0; i < num_lanes; ++i, ++at) {
    at = at < num_lanes ? at : 0;
    const Lane& lane = segment.lane(peer.seat, at);
    if (lane.word.load(std::memory_order_seq_cst) >> Lane::kProgressBits == tag_ &&
        lane.name() == name_) {
      peer.lane = &lane;
      peer.lane_number = at;
      peer.begin = lane.begin();
      if (peer.reads != 0) {
        PrefetchSmall(segment.window(peer.seat, at) + peer.begin);
      }
      session_->FoundAt(peer.seat, at);
      session_->HearEnded(peer.seat, lane);
      return true;
    }
  }
  return false;
}

bool Exchange::HasReached(Peer& peer) const {
  if (steps_.is_end(step_)) {
    return !peer.watches || session_->HasEnded(peer.seat, lane_, tag_);
  }
  if (peer.progress >= peer.needed) {
    return true;
  }
  if (peer.lane == nullptr && !Find(peer)) {
    return false;
  }
  const std::uint64_t word = peer.lane->word.load(std::memory_order_seq_cst);
  // It keeps the lane until this process has ended the call.
  if (word >> Lane::kProgressBits == tag_) {
    peer.progress = static_cast<std::size_t>(word & Lane::kMaxProgress);
  }
  return peer.progress >= peer.needed;
}

void Exchange::PrefetchPeers() const {
  for (const Peer& peer : peers_) {
    if (peer.reads != 0) {
      PrefetchSmall(segment_->window(peer.seat, session_->LikelyLane(peer.seat)));
    }
  }
}

bool Exchange::AllHaveReached() {
  bool all = true;
  for (Peer& peer : peers_) {
    all = HasReached(peer) && all;
  }
  return all;
}

bool Exchange::CanGoOn() {
  return AllHaveReached() || (steps_.is_end(step_) && session_->MayGoAhead());
}

void Exchange::Need() {
  has_noted_needs_ = true;
  if (step_.number == 0) {  // nobody comes before a call's first step
    has_needs_ = false;
    return;
  }
  const std::size_t left = steps_.NeedsLeft(step_);
  const std::size_t read = steps_.NeedsRead(step_);
  has_needs_ = left > 0 || read > 0;
  if (!has_needs_) {  // what is noted of earlier ones was reached
    return;
  }
  for (Peer& peer : peers_) {
    peer.needed = (peer.reads >> step_.phase & 1) != 0 ? left : 0;
    if ((peer.is_read >> (step_.phase + 1) & 1) != 0) {
      peer.needed = std::max(peer.needed, read);
    }
  }
}

void Exchange::Locate(const Peer& peer) {
  windows_[peer.process] = segment_->window(peer.seat, peer.lane_number) + peer.begin;
}

bool Exchange::TakeWhatCame(std::size_t round) {
  for (Peer& peer : peers_) {
    if (peer.rounds_taken <= round && peer.needed > 0 && peer.progress >= peer.needed) {
      Locate(peer);
      if (!Timed([&](const Processes& others) {
            return route_->Take(round, peer.process, local_, others);
          })) {
        return false;
      }
      peer.rounds_taken = round + 1;
      ++num_moves_;
    }
  }
  return true;
}

template <typename F>
bool Exchange::Timed(const F& f) {
  if (trials_ == nullptr) {
    return f({windows_.data(), pids_.data()});
  }
  const std::int64_t begin_ns = trials_->is_timed() ? NowNs() : 0;
  const bool ok = f({windows_.data(), pids_.data(), trials_->copies()});
  if (trials_->is_timed()) {
    trials_->Count(NowNs() - begin_ns);
  }
  return ok;
}

void Exchange::Publish() {
  Lane& mine = lane();
  if (step_.number == 0) {
    // All of the line at once: whoever looks at it meanwhile takes it off this core. And whoever
    // reads what follows finds the word changed, and drops it.
    mine.word.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    mine.SetName(name_, begin_);
    mine.waits_since_ns.store(0, std::memory_order_relaxed);
    session_->TellEnded(mine);
  }
  const std::uint64_t word = tag_ << Lane::kProgressBits | (step_.number + 1);
  if (watchers_.size() == 0) {
    mine.word.store(word, std::memory_order_release);
    return;
  }
  // In one order with a sleeper's count and its last look: one of us sees the other.
  mine.word.store(word, std::memory_order_seq_cst);
  for (const Peer& peer : peers_) {
    if (peer.watches) {
      Ring(peer);
    }
  }
}

void Exchange::Ring(const Peer& peer) const {
  if (segment_->seat(peer.seat).sleepers.load(std::memory_order_seq_cst) != 0) {
    segment_->Ring(peer.seat);
  }
}

bool Exchange::Advance() {
  for (; !steps_.is_end(step_); steps_.Next(step_), has_noted_needs_ = false) {
    if (steps_.is_idle(step_)) {
      continue;
    }
    const std::size_t phase = step_.phase;
    const std::size_t round = steps_.round(step_);
    const bool takes = phase == 1 && takes_one_by_one_;
    if (!has_noted_needs_) {
      Need();
    }
    const bool all_have = !has_needs_ || AllHaveReached();
    if (HasFailed()) {
      return false;
    }
    bool can_read = !takes || TakeWhatCame(round);
    if (can_read && !all_have) {
      PrefetchOnce();  // while the others' data is on its way
      return false;
    }
    if (phase > 0 && round == 0 && !takes) {  // the first that reads
      for (const Peer& peer : peers_) {
        Locate(peer);
      }
    }
    if (can_read && !takes) {
      can_read =
          Timed([&](const Processes& others) { return route_->Run(phase, round, local_, others); });
    }
    if (!can_read) {
      FailFor("another process's memory can't be read any more");
      return false;
    }
    ++num_moves_;
    if (step_.number + 1 < steps_.count()) {  // nobody waits for the last one
      Publish();
    }
    if (step_.number == 0 && turning_bytes_ == 0) {
      PrefetchPeers();  // together with the look at whether it is there, not after it
    }
    if (phase == 0) {
      route_->Meanwhile(round, local_);
    }
  }
  return End();
}

void Exchange::PrefetchOnce() {
  if (!has_prefetched_) {
    has_prefetched_ = true;
    PrefetchNext(this + 1);
  }
}

bool Exchange::End() {
  PrefetchOnce();
  if (!has_ended_) {
    for (const Peer& peer : peers_) {
      if (!peer.is_watched) {
        continue;
      }
      auto& ended = segment_->ended(session_->seat(), peer.seat, peer.lane_number);
      if (peer.is_ahead) {  // it may wait for that: as in Publish
        ended.store(tag_, std::memory_order_seq_cst);
        Ring(peer);
      } else {
        ended.store(tag_, std::memory_order_release);
      }
      session_->NoteEnded(peer.seat, tag_);
    }
    has_ended_ = true;
    if (trials_ != nullptr) {
      trials_->End();
    }
  }
  if (HasFailed()) {
    return false;  // what was read in another process may be something else by now
  }
  if (is_shown_) {
    lane().waits_since_ns.store(0, std::memory_order_relaxed);
  }
  return session_->LeaveLane(lane_, tag_, {watchers_.data(), watchers_.size()}, is_ahead_);
}

void Exchange::ShowLeft(std::int64_t now_ns) const {
  if (is_ahead_) {
    session_->ShowLeft(site_, now_ns, [this] { return names_.Text(); });
  }
}

// ---- Waiting ----------------------------------------------------------------------------------

std::int64_t Exchange::SpinNs() const { return session_->is_crowded() ? kCrowdedSpinNs : kSpinNs; }

Exchange::Progress Exchange::Spin(std::int64_t limit_ns) {
  const int busy_looks = session_->is_crowded() ? kCrowdedLooks : kBusyLooks;
  std::int64_t until_ns = 0;
  std::uint64_t num_moves = num_moves_;
  for (int looks = 0;; ++looks) {
    if ((lane_ >= 0 || OpenLane()) && Advance()) {
      return Progress::kDone;
    }
    if (num_moves_ != num_moves) {  // which may have taken longer than the limit
      num_moves = num_moves_;
      until_ns = 0;
      looks = 0;
    }
    if (looks < busy_looks) {
      Relax();
      continue;
    }
    if (HasFailed()) {
      return Progress::kFailed;
    }
    const std::int64_t now_ns = NowNs();
    if (until_ns == 0) {
      until_ns = now_ns + limit_ns;
    } else if (now_ns > until_ns) {
      return Progress::kWaits;
    }
    sched_yield();
  }
}

void Exchange::Sleep() {
  const timespec nap{.tv_sec = 0, .tv_nsec = kNapNs};
  if (lane_ < 0) {  // nobody rings for a lane
    nanosleep(&nap, nullptr);
    return;
  }
  Seat& seat = segment_->seat(session_->seat());
  seat.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t bell = seat.bell.load(std::memory_order_seq_cst);
  if (!CanGoOn() && !HasFailed()) {
    syscall(SYS_futex, &seat.bell, FUTEX_WAIT, bell, &nap, nullptr, 0);
  }
  seat.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

Exchange::Progress Exchange::Finish() {
  std::int64_t since_ns = NowNs();
  excused_ns_ = 0;
  next_look_ns_ = 0;
  bool is_named = false;
  std::int64_t spin_ns = SpinNs();
  for (;;) {
    // While others are at work the next step takes less than to sleep and to be woken.
    const std::size_t step = step_.number;
    if (const Progress progress = Spin(spin_ns); progress != Progress::kWaits) {
      return progress;
    }
    if (step_.number != step) {
      since_ns = NowNs();
      next_look_ns_ = 0;
      spin_ns = SpinNs();
      if (is_named) {
        lane().waits_since_ns.store(since_ns, std::memory_order_release);
      }
      continue;
    }
    if (lane_ >= 0) {
      if (!is_named) {  // not in every call: others read it only where one waits for long
        lane().text.Set(names_.Text());
        is_named = true;
      }
      lane().members.Clear();
      for (Peer& peer : peers_) {
        if (!HasReached(peer)) {
          lane().members.Add(peer.seat);
        }
      }
      lane().waits_since_ns.store(since_ns, std::memory_order_release);
      is_shown_ = true;
    }
    Sleep();
    const bool goes_on = lane_ >= 0 && CanGoOn();
    spin_ns = goes_on ? SpinNs() : 0;
    if (!goes_on) {
      Look(NowNs(), since_ns);
    }
  }
}

}  // namespace jaxcoll

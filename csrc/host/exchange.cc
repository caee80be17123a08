#include "host/exchange.h"

#include <linux/futex.h>  // FUTEX_WAIT
#include <sched.h>        // sched_yield
#include <sys/syscall.h>  // SYS_futex
#include <unistd.h>       // syscall

#include <algorithm>    // std::find, std::max
#include <ctime>        // nanosleep, timespec
#include <optional>     // std::nullopt
#include <string_view>  // std::string_view
#include <utility>      // std::move

#include "core/clock.h"
#include "host/stalemate.h"

namespace jaxcoll {
namespace {

// Looks at the others before the core is offered to whoever wants it.
constexpr int kBusyLooks = 200;
constexpr int kCrowdedLooks = 5;
// How long a handler may look for the others before its program waits in a future. Where processes
// share cores, the others may have to take their turns first, which is not worth two threads'
// wakes.
constexpr std::int64_t kSpinNs = 200'000;
constexpr std::int64_t kCrowdedSpinNs = 1'000'000;
// A sleeper looks after the others this often.
constexpr std::int64_t kNapNs = 50'000'000;
// Calls of one group that all have stood for this long and don't match never will.
constexpr std::int64_t kMismatchNs = 1'000'000'000;
// The same of calls of different groups, to which a process may come in any order.
constexpr std::int64_t kStalemateNs = 10'000'000'000;

// How long to wait for what missing processes do, and of how many of them errors show the stack.
constexpr std::int64_t kStackPatienceNs = 1'000'000'000;
constexpr std::size_t kMostStacks = 4;

void Relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Exchange::Exchange(Job& job, Session& session, std::uint64_t group, std::uint64_t site,
                   const Membership& members, std::unique_ptr<const Route> route,
                   const CallNames& names)
    : job_(job),
      occurrences_(&session.Occurrences(group, site)),
      group_(group),
      site_(site),
      members_(members),
      route_(std::move(route)),
      names_(names),
      steps_(route_->num_phases(), route_->num_rounds()),
      window_bytes_(session.segment().shape().window_bytes),
      processes_(session.processes()),
      can_read_peers_(session.can_read_peers()),
      reads_copies_(session.reads_copies()),
      peers_(members.num_processes() - 1),
      windows_(members.num_processes()),
      pids_(members.num_processes()),
      is_ahead_(GoesAhead(members.mine())) {
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
}

bool Exchange::Watches(std::size_t process, std::size_t other) const {
  for (std::size_t phase = 1; phase < route_->num_phases(); ++phase) {
    const bool overwrites = route_->num_rounds() > 2;
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

Exchange::~Exchange() = default;

void Exchange::AddTo(Footprint& footprint) const {
  footprint.Add(this, sizeof(*this));
  footprint.Add(occurrences_, sizeof(*occurrences_));
  footprint.Add(&members_, sizeof(members_));
  footprint.Add(route_.get());
}

Lane& Exchange::lane() const {
  return session_->segment().lane(session_->seat(), static_cast<std::size_t>(lane_));
}

void Exchange::Prepare() {
  if (const std::uint64_t epoch = job_.epoch(); session_ == nullptr || epoch != epoch_) {
    epoch_ = epoch;
    session_ = job_.session();
    occurrences_ = &session_->Occurrences(group_, site_);
    fits_ = session_->segment().shape().window_bytes == window_bytes_ &&
            session_->processes() == processes_ && session_->can_read_peers() == can_read_peers_ &&
            session_->reads_copies() == reads_copies_ && steps_.count() <= Lane::kMaxProgress;
    for (std::size_t process = 0; process < members_.num_processes(); ++process) {
      const Seat& seat = session_->segment().seat(members_.seat(process));
      pids_[process] = seat.pid.load(std::memory_order_acquire);
    }
  }
}

std::shared_ptr<const Status> Exchange::Failure() const {
  if (!session_->segment().failed()) {
    return nullptr;
  }
  return std::make_shared<const Status>(Internal(session_->segment().failure()));
}

void Exchange::Fail(const Status& cause) const { session_->segment().Fail(cause.message); }

// ---- Steps ------------------------------------------------------------------------------------

Exchange::Progress Exchange::Begin(const Buffers& local, bool spins) {
  local_ = local;
  ticket_ = 0;
  lane_ = -1;
  step_ = 0;
  has_ended_ = false;
  for (Peer& peer : peers_) {
    peer.lane = nullptr;
    peer.needed = 0;
    peer.progress = 0;
    peer.rounds_taken = 0;
  }
  if (!fits_) {
    session_->segment().Fail(names_.Text() + ": it does not fit the job's shared memory");
    return Progress::kFailed;
  }
  name_ = {.group = group_,
           .site = site_,
           .occurrence = occurrences_->fetch_add(1, std::memory_order_relaxed) + 1};
  tag_ = name_.tag();
  if (spins) {
    return Spin(session_->is_crowded() ? kCrowdedSpinNs : kSpinNs);
  }
  if (OpenLane() && Advance()) {
    return Progress::kDone;
  }
  return session_->segment().failed() ? Progress::kFailed : Progress::kWaits;
}

bool Exchange::OpenLane() {
  lane_ = session_->TakeLane(ticket_);
  if (lane_ < 0) {
    return false;
  }
  Lane& mine = lane();
  // Whoever reads what follows meanwhile finds the word changed, and drops it.
  mine.word.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  mine.group.store(name_.group, std::memory_order_relaxed);
  mine.site.store(name_.site, std::memory_order_relaxed);
  mine.occurrence.store(name_.occurrence, std::memory_order_relaxed);
  mine.waits_since_ns.store(0, std::memory_order_relaxed);
  Seat& seat = session_->segment().seat(session_->seat());
  const auto used = static_cast<std::uint32_t>(lane_ + 1);
  std::uint32_t known = seat.num_used_lanes.load(std::memory_order_relaxed);
  while (known < used && !seat.num_used_lanes.compare_exchange_weak(known, used)) {
  }
  windows_[members_.mine()] =
      session_->segment().window(session_->seat(), static_cast<std::size_t>(lane_));
  return true;
}

bool Exchange::Find(Peer& peer) const {
  const Segment& segment = session_->segment();
  const std::size_t num_lanes = segment.seat(peer.seat).num_used_lanes.load();
  std::size_t at = session_->LikelyLane(peer.seat);
  for (std::size_t i = 0; i < num_lanes; ++i, ++at) {
    at = at < num_lanes ? at : 0;
    const Lane& lane = segment.lane(peer.seat, at);
    if (lane.word.load(std::memory_order_seq_cst) >> Lane::kProgressBits == tag_ &&
        lane.name() == name_) {
      peer.lane = &lane;
      peer.lane_number = at;
      session_->FoundAt(peer.seat, at);
      return true;
    }
  }
  return false;
}

bool Exchange::HasReached(Peer& peer) const {
  if (step_ == steps_.count()) {
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

bool Exchange::AllHaveReached() {
  bool all = true;
  for (Peer& peer : peers_) {
    all = HasReached(peer) && all;
  }
  return all;
}

void Exchange::Need(std::size_t step) {
  const std::size_t left = steps_.NeedsLeft(step);
  const std::size_t read = steps_.NeedsRead(step);
  const std::size_t phase = steps_.phase(step);
  for (Peer& peer : peers_) {
    peer.needed = (peer.reads >> phase & 1) != 0 ? left : 0;
    if ((peer.is_read >> (phase + 1) & 1) != 0) {
      peer.needed = std::max(peer.needed, read);
    }
  }
}

void Exchange::Locate(const Peer& peer) {
  windows_[peer.process] = session_->segment().window(peer.seat, peer.lane_number);
}

bool Exchange::TakeWhatCame(std::size_t round) {
  for (Peer& peer : peers_) {
    if (peer.rounds_taken <= round && peer.needed > 0 && peer.progress >= peer.needed) {
      Locate(peer);
      if (!route_->Take(round, peer.process, local_, {windows_.data(), pids_.data()})) {
        return false;
      }
      peer.rounds_taken = round + 1;
    }
  }
  return true;
}

void Exchange::Publish() {
  const std::uint64_t word = tag_ << Lane::kProgressBits | (step_ + 1);
  if (watchers_.size() == 0) {
    lane().word.store(word, std::memory_order_release);
    return;
  }
  // In one order with a sleeper's count and its last look: one of us sees the other.
  lane().word.store(word, std::memory_order_seq_cst);
  for (const Peer& peer : peers_) {
    if (peer.watches) {
      Ring(peer);
    }
  }
}

void Exchange::Ring(const Peer& peer) const {
  if (session_->segment().seat(peer.seat).sleepers.load(std::memory_order_seq_cst) != 0) {
    session_->segment().Ring(peer.seat);
  }
}

bool Exchange::Advance() {
  for (; step_ < steps_.count(); ++step_) {
    if (steps_.is_idle(step_)) {
      continue;
    }
    const std::size_t phase = steps_.phase(step_);
    const std::size_t round = steps_.round(step_);
    const bool takes = phase == 1 && route_->takes_one_by_one();
    Need(step_);
    const bool all_have = AllHaveReached();
    if (session_->segment().failed()) {
      return false;
    }
    bool can_read = !takes || TakeWhatCame(round);
    if (can_read && !all_have) {
      return false;
    }
    if (phase > 0 && round == 0) {  // the first that reads
      for (const Peer& peer : peers_) {
        Locate(peer);
      }
    }
    if (can_read && !takes) {
      can_read = route_->Run(phase, round, local_, {windows_.data(), pids_.data()});
    }
    if (!can_read) {
      session_->segment().Fail(names_.Text() + ": another process's memory can't be read any more");
      return false;
    }
    if (step_ + 1 < steps_.count()) {  // nobody waits for the last one
      Publish();
    }
    if (phase == 0) {
      route_->Meanwhile(round, local_);
    }
  }
  return End();
}

bool Exchange::End() {
  if (!has_ended_) {
    for (const Peer& peer : peers_) {
      if (!peer.is_watched) {
        continue;
      }
      auto& ended = session_->segment().ended(session_->seat(), peer.seat, peer.lane_number);
      if (peer.is_ahead) {  // it may wait for that: as in Publish
        ended.store(tag_, std::memory_order_seq_cst);
        Ring(peer);
      } else {
        ended.store(tag_, std::memory_order_release);
      }
    }
    has_ended_ = true;
  }
  if (session_->segment().failed()) {
    return false;  // what was read in another process may be something else by now
  }
  if (lane().waits_since_ns.load(std::memory_order_relaxed) != 0) {  // others have the line, too
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

Exchange::Progress Exchange::Spin(std::int64_t limit_ns) {
  const int busy_looks = session_->is_crowded() ? kCrowdedLooks : kBusyLooks;
  std::int64_t until_ns = 0;
  for (int looks = 0;; ++looks) {
    if ((lane_ >= 0 || OpenLane()) && Advance()) {
      return Progress::kDone;
    }
    if (looks < busy_looks) {
      Relax();
      continue;
    }
    if (session_->segment().failed()) {
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
  Seat& seat = session_->segment().seat(session_->seat());
  seat.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t bell = seat.bell.load(std::memory_order_seq_cst);
  if (!AllHaveReached() && !session_->segment().failed()) {
    syscall(SYS_futex, &seat.bell, FUTEX_WAIT, bell, &nap, nullptr, 0);
  }
  seat.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

Exchange::Progress Exchange::Finish() {
  std::int64_t since_ns = NowNs();
  excused_ns_ = 0;
  std::size_t step = step_;
  bool is_named = false;
  for (;;) {
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
    }
    Sleep();
    if (const Progress progress = Spin(0); progress != Progress::kWaits) {
      return progress;
    }
    const std::int64_t now_ns = NowNs();
    if (step_ != step) {
      step = step_;
      since_ns = now_ns;
    }
    Look(now_ns, since_ns);
  }
}

// ---- Failing ----------------------------------------------------------------------------------

void Exchange::Look(std::int64_t now_ns, std::int64_t since_ns) {
  // Those that wait for it may be whom this process waits for.
  if (session_->IsAnyoneExcused(now_ns, names_.compile_timeout_ns())) {
    excused_ns_ = now_ns;
  }
  const std::int64_t waited_ns = now_ns - std::max(since_ns, excused_ns_);
  std::vector<std::size_t> missing = Missing();
  for (const std::size_t seat : missing) {
    const std::string_view gone = session_->WhereIs(seat, now_ns).gone;
    // It may have done its part, and ended, since it was found missing.
    const std::vector<std::size_t> still = gone.empty() ? std::vector<std::size_t>{} : Missing();
    if (std::find(still.begin(), still.end(), seat) != still.end()) {
      session_->segment().Fail(WaitText(waited_ns, " (" + std::string(gone) + ")"));
      return;
    }
  }
  if (std::string calls = WrongCalls(now_ns, now_ns - since_ns); !calls.empty()) {
    session_->segment().Fail(
        "the processes called different collectives, or the same in another order: " + calls +
        DumpText());
    return;
  }
  const std::int64_t timeout_ns = names_.timeout_ns();
  if (timeout_ns < 0 || waited_ns < timeout_ns) {
    return;
  }
  AskForStacks(missing);  // and with it for what they do now; they may come meanwhile
  if (!Missing().empty() && !session_->IsAnyoneExcused(NowNs(), names_.compile_timeout_ns())) {
    session_->segment().Fail(
        WaitText(waited_ns, " (the limit is " + SecondsText(timeout_ns) + ")"));
  }
}

std::vector<std::size_t> Exchange::Missing() {
  if (lane_ < 0) {
    return session_->Laggards();
  }
  std::vector<std::size_t> missing;
  for (Peer& peer : peers_) {
    if (!HasReached(peer)) {
      missing.push_back(peer.seat);
    }
  }
  return missing;
}

void Exchange::AskForStacks(const std::vector<std::size_t>& seats) const {
  const std::int64_t until_ns = NowNs() + kStackPatienceNs;
  for (const std::size_t seat : seats) {
    const BlackBox* const box = session_->box(seat);
    if (box != nullptr && session_->WhereIs(seat, NowNs()).state == "running") {
      box->AskForStack(std::max<std::int64_t>(until_ns - NowNs(), 0));
    }
  }
}

std::string Exchange::WrongCalls(std::int64_t now_ns, std::int64_t waited_ns) const {
  if (waited_ns >= kMismatchNs) {
    if (Stalemate found = FindStalemate(*session_, group_, now_ns, kMismatchNs);
        !found.seats.empty()) {
      return found.text;
    }
  }
  if (waited_ns < kStalemateNs) {
    return "";
  }
  const Stalemate found = FindStalemate(*session_, std::nullopt, now_ns, kStalemateNs);
  if (found.seats.empty() || MayComeToMore(*session_, found.seats, names_.compile_timeout_ns())) {
    return "";
  }
  return FindStalemate(*session_, std::nullopt, NowNs(), kStalemateNs).text;  // they may have come
}

std::vector<bool> Exchange::Absent(std::vector<RanksThere>& there) {
  std::vector<bool> waited_for(members_.num_ranks());
  std::vector<bool> absent(members_.num_ranks());
  there.resize(members_.num_processes());
  for (Peer& peer : peers_) {
    if (lane_ < 0 || HasReached(peer)) {
      continue;
    }
    RanksThere& ranks = there[peer.process];
    if (const BlackBox* const box = session_->box(peer.seat); box != nullptr) {
      ranks = FindRanks(*box, name_.group, name_.site, execution());
    }
    // Whose process does not run takes no further part, though it has come.
    if (session_->WhereIs(peer.seat, NowNs()).state != "running") {
      ranks.in_call.clear();
    }
    for (std::size_t r = 0; r < members_.num_ranks(); ++r) {
      if (members_.process_of(r) == peer.process) {
        waited_for[r] = true;
        absent[r] = ranks.in_call.count(static_cast<std::int64_t>(r)) == 0;
      }
    }
  }
  const bool is_any_absent = std::find(absent.begin(), absent.end(), true) != absent.end();
  return is_any_absent ? absent : waited_for;
}

std::string Exchange::WaitText(std::int64_t waited_ns, const std::string& why) {
  std::string came;
  std::string missing;
  std::string doing;
  std::size_t num_shown = 0;
  std::vector<std::size_t> seats = {session_->seat()};
  std::vector<RanksThere> there;
  const std::vector<bool> absent = Absent(there);
  const auto add = [](std::string& list, const std::string& text) {
    list += (list.empty() ? "" : ", ") + text;
  };
  for (std::size_t process = 0, i = 0; process < members_.num_processes(); ++process) {
    Peer* const peer = process == members_.mine() ? nullptr : &peers_[i++];
    const bool is_waited_for = lane_ >= 0 && peer != nullptr && !HasReached(*peer);
    if (peer != nullptr && !is_waited_for && peer->lane == nullptr) {
      continue;
    }
    const std::size_t seat = members_.seat(process);
    const BlackBox* const box = session_->box(seat);
    std::string here;
    std::string late;
    for (std::size_t r = 0; r < members_.num_ranks(); ++r) {
      if (members_.process_of(r) != process) {
        continue;
      }
      add(absent[r] ? late : here, std::to_string(r));
      if (absent[r] && box != nullptr) {
        doing += "\n  rank " + std::to_string(r) + ": " +
                 LastCallOfRank(*box, there[process], static_cast<std::int64_t>(r), NowNs());
      }
    }
    if (!here.empty()) {
      add(came, "rank " + here + " (process " + std::to_string(session_->processes()[seat]) + ")");
    }
    if (!late.empty()) {
      add(missing, "rank " + late + " (" + ProcessText(*session_, seat) + ")");
      seats.push_back(seat);
      if (box != nullptr && ++num_shown <= kMostStacks) {
        doing += PythonText(*box, NowNs());
      }
    }
  }
  if (lane_ < 0) {
    for (const std::size_t seat : session_->Laggards()) {
      add(missing, ProcessText(*session_, seat));
    }
    missing =
        "a free lane" + (missing.empty() ? "" : ": an earlier call is not over for " + missing);
  }
  return names_.Text() + ": waited " + SecondsText(waited_ns) + " for " + missing +
         (step_ == steps_.count() ? " to read what this process left" : "") + "; arrived: " + came +
         "; execution " + std::to_string(name_.occurrence) + " of this call" + why + DumpText() +
         doing + ChainText(*session_, seats);
}

}  // namespace jaxcoll

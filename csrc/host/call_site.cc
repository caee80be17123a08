#include "host/call_site.h"

#include <algorithm>  // std::find, std::max, std::min, std::none_of
#include <array>      // std::array
#include <set>        // std::set
#include <utility>    // std::move

#include "core/clock.h"
#include "core/group_id.h"
#include "core/quick_clock.h"
#include "host/diagnosis.h"
#include "host/recorder.h"
#include "host/route.h"
#include "host/watchdog.h"
#include "host/witness.h"

namespace jaxcoll {
namespace {

// Paces outlive their call sites (a runner notes how a task went after the task's program may have
// ended and been freed), so they stand in a fixed table; sites that share one only share a hint.
constexpr std::size_t kNumPaces = 1024;

Pace& NextPace() {
  static auto* const paces = new std::array<Pace, kNumPaces>();
  static std::atomic<std::size_t> next{0};
  return (*paces)[next.fetch_add(1, std::memory_order_relaxed) % kNumPaces];
}

std::vector<std::size_t> SeatsOf(const Session& session,
                                 const std::vector<std::int64_t>& processes) {
  std::vector<std::size_t> seats;
  seats.reserve(processes.size());
  for (const std::int64_t process : processes) {
    seats.push_back(static_cast<std::size_t>(session.SeatOf(process)));
  }
  return seats;
}

// Whether the group has a member in this process.
bool IsHere(const Placement& placement, std::size_t group) {
  if (placement.job == nullptr) {
    return true;
  }
  const std::vector<std::int64_t>& processes = placement.processes[group];
  return std::find(processes.begin(), processes.end(), placement.job->session()->process()) !=
         processes.end();
}

// Null without a job.
std::shared_ptr<const Membership> MembershipIn(const Placement& placement, std::size_t group) {
  if (placement.job == nullptr) {
    return nullptr;
  }
  const std::shared_ptr<Session> session = placement.job->session();
  return MembershipOf(SeatsOf(*session, placement.processes[group]), session->seat());
}

}  // namespace

CallSite::MembersHere::MembersHere(const std::vector<std::vector<std::int64_t>>& groups,
                                   const Placement& placement) {
  const std::int64_t mine = placement.job == nullptr ? 0 : placement.job->session()->process();
  std::int64_t last = -1;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t r = 0; r < groups[g].size(); ++r) {
      if (placement.job == nullptr || placement.processes[g][r] == mine) {
        const std::int64_t id = groups[g][r];
        first = last < 0 ? id : std::min(first, id);
        last = std::max(last, id);
      }
    }
  }
  count = last < 0 ? 0 : static_cast<std::size_t>(last - first + 1);
}

CallSite::CallSite(std::uint64_t id, const std::vector<std::vector<std::int64_t>>& groups,
                   std::unique_ptr<const Work> work, const Placement& placement)
    : CallSite(id, groups, std::move(work), placement, MembersHere(groups, placement)) {}

CallSite::CallSite(std::uint64_t id, std::vector<std::vector<std::int64_t>> groups,
                   std::unique_ptr<const Work> work, const Placement& placement,
                   const MembersHere& here)
    : id_(id),
      work_(std::move(work)),
      is_of_one_device_(groups.size() == 1 && groups.front().size() == 1),
      first_member_(here.first),
      members_(here.count),
      pace_(&NextPace()),
      job_(placement.job),
      fails_with_job_(placement.job != nullptr && placement.fails_with_job),
      groups_(std::move(groups)) {
  std::size_t num_members = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (!IsHere(placement, g)) {
      memberships_.push_back(nullptr);
      meetings_.push_back(nullptr);
      continue;
    }
    const std::uint64_t group_id =
        GroupId(placement.job == nullptr ? groups_[g] : placement.devices[g]);
    memberships_.push_back(MembershipIn(placement, g));
    const Membership* const membership = memberships_.back().get();
    const std::size_t num_here =
        membership == nullptr ? groups_[g].size() : membership->my_ranks().size();
    num_members += num_here;
    std::unique_ptr<Exchange> exchange;
    if (membership != nullptr && membership->num_processes() > 1) {
      const std::shared_ptr<Session> session = placement.job->session();
      const CallNames& names = *this;
      std::size_t operand_bytes = 0;
      for (std::size_t i = 0; i < work_->num_operands(); ++i) {
        operand_bytes += work_->operand_bytes(i);
      }
      exchange = std::make_unique<Exchange>(
          *placement.job, *session, group_id, id_, *membership,
          work_->MakeRoute(*membership, {.window_bytes = session->segment().shape().window_bytes,
                                         .can_read_peers = session->can_read_peers(),
                                         .copy_costs = session->copy_costs().Of(operand_bytes)}),
          work_->bytes_moved(groups_[g].size()), names);
    }
    meetings_.push_back(std::make_unique<Meeting>(*this, num_here, std::move(exchange)));
    for (std::size_t r = 0; r < groups_[g].size(); ++r) {
      if (membership != nullptr && !membership->is_mine(r)) {
        continue;
      }
      Member& member = members_[At(groups_[g][r])];
      member.meeting = meetings_.back().get();
      member.group = group_id;
      member.group_rank = static_cast<std::int64_t>(r);
      member.home = placement.job == nullptr ? -1 : placement.devices[g][r];
      member.rank = membership == nullptr ? r : membership->position(r);
      member.footprint.Add(work_.get());
      member.meeting->AddTo(member.footprint, member.rank);
      only_member_ = groups_[g][r];
    }
  }
  if (num_members != 1) {
    only_member_ = -1;
  }
  // One in reserve for each device, so that every waiting program can find a thread at once.
  Runners::Get().Reserve(num_members + 1);
  Watchdog::Get().Add(*this);
}

std::string CallSite::Problem(const Placement& placement) {
  if (placement.job == nullptr) {
    return "";
  }
  const std::shared_ptr<Session> session = placement.job->session();
  if (session == nullptr) {
    return "this process shares no memory with others (jaxcoll.initialize() was not called)";
  }
  for (std::size_t g = 0; g < placement.processes.size(); ++g) {
    if (!IsHere(placement, g)) {
      continue;
    }
    for (const std::int64_t process : placement.processes[g]) {
      if (session->SeatOf(process) < 0) {
        return "process " + std::to_string(process) + " is not on this host";
      }
    }
    const Membership members(SeatsOf(*session, placement.processes[g]), session->seat());
    if (members.num_processes() > 1 &&
        MinWindowBytes(members) > session->segment().shape().window_bytes) {
      return "a group of " + std::to_string(members.num_ranks()) + " ranks, " +
             std::to_string(members.most_ranks()) + " in one process, does not fit the windows";
    }
  }
  return "";
}

CallSite::~CallSite() = default;

std::string CallSite::Text() const { return SiteText(id_); }

std::int64_t CallSite::timeout_ns() const { return Watchdog::Get().timeout_ns(); }

std::int64_t CallSite::compile_timeout_ns() const { return Watchdog::Get().compile_timeout_ns(); }

void CallSite::Unref() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    Watchdog::Get().Remove(*this);
    for (const auto& meeting : meetings_) {
      if (meeting != nullptr) {
        meeting->ShowLeft(NowNs());  // which nobody can name when this site is gone
      }
    }
    delete this;
  }
}

CallSite::Visit CallSite::Begin(std::int64_t logical_id, std::int64_t device, std::int64_t run) {
  Visit visit;
  if (At(logical_id) >= members_.size()) {
    return visit;
  }
  Member& member = members_[At(logical_id)];
  if (member.meeting == nullptr) {
    return visit;
  }
  member.device.store(device, std::memory_order_relaxed);
  if (member.iteration < 0 || member.run.load(std::memory_order_relaxed) != run) {
    member.run.store(run, std::memory_order_release);
    member.iteration = 0;
  } else {
    ++member.iteration;
  }
  visit.key = {.run = run, .iteration = member.iteration};
  visit.rank = member.rank;
  visit.now_ns = QuickNowNs();
  visit.meeting = member.meeting;
  visit.entry = &Recorder::Get().Begin(device, {.site = id_,
                                                .group = member.group,
                                                .rank = member.group_rank,
                                                .run = run,
                                                .iteration = member.iteration,
                                                .now_ns = visit.now_ns});
  return visit;
}

Arrival CallSite::Arrive(const Visit& visit, WaiterFactory& factory) {
  Arrival arrival =
      visit.meeting->Arrive(visit.key, visit.rank, visit.now_ns, *visit.entry, factory);
  if (arrival.answer == Answer::kFailed) {
    visit.entry->Set(Moment::kResumed, NowNs());
    Watchdog::Get().FailRun(visit.key.run, arrival.failure);
    FailJob(visit.key.run, *arrival.failure);
    Witness::Get().AwaitLook();
  }
  return arrival;
}

void CallSite::FailJob(std::int64_t run, const Status& cause) const {
  if (job_ != nullptr && !Watchdog::Get().IsSettled(run)) {
    job_->session()->segment().Fail(cause.message);
  }
}

void CallSite::AddUnderWay(std::int64_t now_ns, std::vector<UnderWay>& calls) {
  Meeting::Call call;
  for (std::size_t group = 0; group < meetings_.size(); ++group) {
    if (meetings_[group] == nullptr) {
      continue;
    }
    meetings_[group]->ShowLeft(now_ns);
    if (!meetings_[group]->IsUnderWay(call)) {
      continue;
    }
    UnderWay& added = calls.emplace_back(
        UnderWay{.site = this, .group = group, .call = call, .arrived = {}, .missing = {}});
    const Membership* const membership = memberships_[group].get();
    for (std::size_t i = 0; i < call.arrived.size(); ++i) {
      const std::size_t rank = membership == nullptr ? i : membership->my_ranks()[i];
      const std::int64_t logical_id = groups_[group][rank];
      const Member& member = members_[At(logical_id)];
      (call.arrived[i] ? added.arrived : added.missing)
          .push_back({.logical_id = logical_id,
                      .device = member.device.load(std::memory_order_relaxed),
                      .rank = rank});
    }
  }
}

std::int64_t CallSite::DeviceIn(std::int64_t run, std::int64_t logical_id) const {
  if (At(logical_id) >= members_.size()) {
    return -1;
  }
  const Member& member = members_[At(logical_id)];
  const bool was_here = member.run.load(std::memory_order_acquire) == run;
  return was_here ? member.device.load(std::memory_order_relaxed) : -1;
}

void CallSite::Check(const UnderWay& under_way, const std::vector<UnderWay>& all,
                     std::int64_t now_ns, std::int64_t timeout_ns) {
  const Meeting::Call& call = under_way.call;
  if (call.is_complete) {
    return;
  }
  Meeting& meeting = *meetings_[under_way.group];
  if (auto cause = Watchdog::Get().FailureOf(call.key.run); cause != nullptr) {
    meeting.Fail(call.key, cause);
    return;
  }
  auto cause = meeting.JobFailure();
  if (cause == nullptr && fails_with_job_) {
    cause = job_->Failure();
  }
  if (cause != nullptr) {
    meeting.Fail(call.key, cause);
    return;
  }
  if (timeout_ns < 0) {
    return;
  }
  if (IsAnyoneExcused(now_ns)) {
    excused_ns_ = now_ns;
  }
  const std::int64_t waited_ns = now_ns - std::max(call.opened_ns, excused_ns_);
  if (waited_ns >= timeout_ns) {
    std::string text = Describe(under_way, all, waited_ns, timeout_ns);  // asks what others do now
    if (!IsAnyoneExcused(NowNs())) {
      Fail(under_way, std::make_shared<const Status>(DeadlineExceeded(std::move(text))));
    }
  }
}

void CallSite::Fail(const UnderWay& call, const std::shared_ptr<const Status>& cause) {
  if (meetings_[call.group]->Fail(call.call.key, cause) && call.call.epoch == epoch()) {
    FailJob(call.call.key.run, *cause);
  }
}

bool CallSite::IsAnyoneExcused(std::int64_t now_ns) const {
  return BlackBox::Get().IsExcused(now_ns, compile_timeout_ns()) ||
         (job_ != nullptr && job_->session()->IsAnyoneExcused(now_ns, compile_timeout_ns()));
}

std::string CallSite::Describe(UnderWay call, const std::vector<UnderWay>& all,
                               std::int64_t waited_ns, std::int64_t timeout_ns) const {
  for (Place& place : call.missing) {
    if (place.device < 0) {
      place.device = members_[At(place.logical_id)].home;
    }
  }
  const BlackBox& box = BlackBox::Get();
  box.AskForStack();
  // Other processes of the job fail with this text, too.
  const std::shared_ptr<Session> session = job_ == nullptr ? nullptr : job_->session();
  const bool is_shared = session != nullptr && session->processes().size() > 1;
  const std::string process =
      is_shared ? "process " + std::to_string(session->process()) : "this process";
  const auto listed = [is_shared](const std::vector<Place>& places, const std::string& where) {
    std::string list;
    for (const Place& place : places) {
      list += (list.empty() ? "rank "
               : is_shared  ? ", rank "
                            : ", ") +
              std::to_string(place.rank) + (is_shared ? " (" + where + ", " : " (") +
              (place.device >= 0 ? "device " + std::to_string(place.device)
                                 : "partition " + std::to_string(place.logical_id)) +
              ")";
    }
    return list;
  };
  // Where those may be that have not been in a call of this run.
  std::set<std::int64_t> others = DevicesIn(box);
  for (const std::vector<Place>* places : {&call.arrived, &call.missing}) {
    for (const Place& place : *places) {
      others.erase(Recorder::DeviceInRecords(place.device));
    }
  }
  std::string doing;
  std::vector<std::int64_t> devices;
  for (const Place& place : call.missing) {
    doing += "\n  rank " + std::to_string(place.rank) + ": ";
    if (place.device < 0) {
      doing += others.empty() ? "no call yet" : "no call in this run yet";
    } else {
      doing += LastCallText(box, {place.device}, NowNs());
      devices.push_back(place.device);
    }
  }
  // For whom these wait in turn.
  for (std::size_t i = 0; i < devices.size(); ++i) {
    for (const UnderWay& other : all) {
      const auto is_there = [&](const Place& place) { return place.device == devices[i]; };
      if (std::none_of(other.arrived.begin(), other.arrived.end(), is_there)) {
        continue;
      }
      for (const Place& place : other.missing) {
        if (place.device >= 0 &&
            std::find(devices.begin(), devices.end(), place.device) == devices.end()) {
          devices.push_back(place.device);
          doing += "\n  device " + std::to_string(place.device) + ", for which device " +
                   std::to_string(devices[i]) +
                   " waits: " + LastCallText(box, {place.device}, NowNs());
        }
      }
    }
  }
  const std::size_t num_ranks = groups_[call.group].size();
  const std::string of_callback = Watchdog::Get().CallbackErrorFor(call.call.opened_ns);
  const std::string why =
      of_callback.empty() ? "" : "; a callback of " + process + " has raised " + of_callback;
  const std::string limit = timeout_ns < 0 ? "" : " (the limit is " + SecondsText(timeout_ns) + ")";
  const std::string execution =
      "execution " + std::to_string(call.call.key.iteration + 1) + " of this call in ";
  const std::string where = is_shared ? ProcessText(*session, session->seat()) : "";
  const std::string chain = session == nullptr ? "" : ChainText(*session, {session->seat()});
  return Text() + ": waited " + SecondsText(waited_ns) + limit + " for " +
         listed(call.missing, where) + " of " + std::to_string(num_ranks) +
         "; arrived: " + listed(call.arrived, process) + "; " +
         // Whose number means nothing elsewhere.
         (is_shared ? execution + "a run of its program"
                    : "run " + std::to_string(call.call.key.run) + ", " + execution + "it") +
         why + DumpText() + doing + PythonText(box, NowNs()) + chain;
}

}  // namespace jaxcoll

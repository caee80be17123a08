#include "cuda/clique.h"

#include <algorithm>  // std::find, std::find_if, std::min, std::sort
#include <chrono>     // std::chrono
#include <exception>  // std::exception
#include <utility>    // std::move

#include "core/clock.h"
#include "core/group_id.h"

namespace jaxcoll::cuda {
namespace {

// Nobody asks for a reason to wait no longer than this.
constexpr std::int64_t kNoExcuseNs = 100'000'000;
// How long a call is open before anybody asks whether others have ended, and how long it is open
// beside one that has: who has done its part of a call may end before the others.
constexpr std::int64_t kGoneNs = 500'000'000;

// As jaxcoll/diagnosis/records.py reads executions. Within a process meetings of the CPU engine
// have numbers of their own, which stay below this.
constexpr unsigned kOccurrenceBits = 40;
constexpr std::int64_t kFirstNumber = std::int64_t{1} << 22;

}  // namespace

Clique::Clique(Surroundings surroundings, std::vector<std::int64_t> devices,
               const std::vector<LocalDevice>& local, std::int64_t generation)
    : surroundings_(surroundings),
      devices_(std::move(devices)),
      generation_(generation),
      group_id_(GroupId(devices_)) {
  for (const LocalDevice& device : local) {
    const auto found = std::find(devices_.begin(), devices_.end(), device.id);
    if (found == devices_.end()) {
      continue;
    }
    auto seat = std::make_unique<Seat>();
    seat->ordinal = device.ordinal;
    seat->rank = static_cast<std::size_t>(found - devices_.begin());
    seat->num_ranks = devices_.size();
    seats_.push_back(std::move(seat));
  }
  std::sort(seats_.begin(), seats_.end(),
            [](const auto& a, const auto& b) { return a->ordinal < b->ordinal; });
}

Seat& Clique::SeatOf(int ordinal) const {
  return **std::find_if(seats_.begin(), seats_.end(),
                        [&](const auto& seat) { return seat->ordinal == ordinal; });
}

std::atomic<std::int64_t>& Clique::OccurrencesOf(int ordinal, std::uint64_t site) const {
  Seat& seat = SeatOf(ordinal);
  const std::lock_guard<std::mutex> lock(seat.occurrences_mutex);
  return seat.occurrences[site];
}

std::int64_t Clique::Execution(std::int64_t occurrence) const {
  return seats_.size() == devices_.size()
             ? -(((kFirstNumber + generation_) << kOccurrenceBits) + occurrence)
             : ((generation_ + 1) << kOccurrenceBits) + occurrence;
}

Status Clique::Join(int ordinal, Stream stream, const Limits& limits) {
  const std::int64_t timeout_ns = limits.first_timeout_ns;
  if (is_ready()) {
    return {};
  }
  if (Status failed = Failure(); !failed.ok()) {
    return failed;
  }
  if (const int error = libraries().runtime.stream_synchronize(stream); error != kCudaSuccess) {
    return libraries().OfRuntime("cudaStreamSynchronize", error);
  }
  std::unique_lock<std::mutex> lock(mutex_);
  joined_.insert(ordinal);
  const auto is_settled = [&] {
    const State state = state_.load();
    return state == State::kReady || state == State::kFailed;
  };
  if (joined_.size() == seats_.size() && state_.load() == State::kWaiting) {
    state_.store(State::kConnecting);
    lock.unlock();
    Status connected;
    try {
      connected = Connect(limits.timeout_ns);
    } catch (const std::exception& error) {  // such as no memory: the others wait for an end
      connected = Internal("no communicator of devices " + Listed(devices_) + ": " + error.what());
    }
    lock.lock();
    if (failure_.ok()) {
      failure_ = std::move(connected);
    }
    if (!failure_.ok()) {
      GiveUp();
    }
    state_.store(failure_.ok() ? State::kReady : State::kFailed);
    changed_.notify_all();
  } else if (timeout_ns >= 0 &&
             !changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), is_settled) &&
             state_.load() == State::kWaiting) {
    failure_ = DeadlineExceeded(MissingText() + " within " + SecondsText(timeout_ns));
    GiveUp();
    state_.store(State::kFailed);
    changed_.notify_all();
  } else {
    changed_.wait(lock, is_settled);  // where it is being connected, that has limits of its own
  }
  return failure_;
}

Status Clique::Failure() const {
  if (state_.load() != State::kFailed) {
    return {};
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

std::string Clique::TellableFailure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_shared() && !is_orderly_ ? failure_.message : "";
}

void Clique::Fail(const Status& cause, bool is_orderly) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.ok()) {
    return;
  }
  failure_ = cause;
  is_orderly_ = is_orderly;
  if (is_ready() && !is_orderly) {
    flag_.Raise();  // before anything that is aborted ends
  }
  GiveUp();
  if (state_.load() != State::kConnecting) {  // who connects looks at `failure_` then
    state_.store(State::kFailed);
  }
  changed_.notify_all();
}

void Clique::GiveUp() {
  for (const auto& seat : seats_) {
    seat->comm.GiveUp();
  }
}

void Clique::CloseCalls() {
  for (const auto& seat : seats_) {
    libraries().runtime.set_device(seat->ordinal);  // what this returns changes nothing here
    seat->watch.Close(libraries());
  }
}

bool Clique::TryAbort(std::size_t at) {
  if (state_.load() != State::kFailed) {
    return false;
  }
  CloseCalls();
  flag_.End();
  Seat& seat = *seats_[at];
  libraries().runtime.set_device(seat.ordinal);  // what this returns changes nothing here
  if (!seat.comm.TryAbort(libraries())) {
    return false;
  }
  num_ended_.fetch_add(1);
  return true;
}

bool Clique::Look(std::int64_t now_ns, const Limits& limits) {
  Status cause;
  for (const auto& seat : seats_) {
    if (!is_ready()) {
      return false;
    }
    // Else CUDA would make itself at home on device 0, which may be another process's.
    libraries().runtime.set_device(seat->ordinal);
    const int state = seat->comm.State(libraries()).value_or(kNcclSuccess);
    if (!HasTaken(state)) {
      cause = libraries().OfNccl("communication", state);
      cause.message = "devices " + Listed(devices_) + ", rank " + std::to_string(seat->rank) +
                      ": " + cause.message;
      break;
    }
    const auto call = seat->watch.Look(libraries(), now_ns);
    if (!call) {
      continue;
    }
    const std::int64_t limit_ns = call->is_first ? limits.first_timeout_ns : limits.timeout_ns;
    if (const std::string gone = GoneText(*seat, *call, now_ns, limits); !gone.empty()) {
      cause = Internal(WaitText(call->site, call->open_ns, {}, gone));
      break;
    }
    if (limit_ns < 0 || call->waited_ns < std::min(limit_ns, kNoExcuseNs)) {
      continue;
    }
    if (limits.is_anyone_excused != nullptr && limits.is_anyone_excused()) {
      seat->watch.Excuse(now_ns);
    } else if (call->waited_ns >= limit_ns) {
      cause = DeadlineExceeded(LateText(*seat, *call, limits));
      break;
    }
  }
  if (cause.ok()) {
    return false;
  }
  Fail(cause);
  CloseCalls();  // before anybody is told
  return true;
}

std::string Clique::MissingText() const {
  std::vector<std::int64_t> missing;
  for (const auto& seat : seats_) {
    if (joined_.count(seat->ordinal) == 0) {
      missing.push_back(devices_[seat->rank]);
    }
  }
  return "no communicator of devices " + Listed(devices_) + ": devices " + Listed(missing) +
         " have not begun a program with a collective over them";
}

std::string Clique::GoneText(Seat& seat, const LateCall& call, std::int64_t now_ns,
                             const Limits& limits) const {
  if (limits.gone == nullptr || !is_shared() || call.open_ns < kGoneNs ||
      now_ns - seat.gone_asked_ns < kGoneNs) {
    return "";
  }
  if (!seat.gone.empty() && seat.gone_call == call.number) {
    return seat.gone;
  }
  seat.gone = limits.gone(devices_, generation_);
  seat.gone_call = call.number;
  seat.gone_asked_ns = now_ns;
  return "";
}

std::string Clique::LateText(const Seat& seat, const LateCall& call, const Limits& limits) const {
  std::set<int> late;
  for (const auto& other : seats_) {
    if (other->num_calls.load(std::memory_order_relaxed) <
        seat.num_calls.load(std::memory_order_relaxed)) {
      late.insert(other->ordinal);
    }
  }
  const bool are_others = late.empty() && is_shared() && limits.absent != nullptr;
  return WaitText(call.site, call.waited_ns, late,
                  are_others ? limits.absent(devices_, group_id_, call.site, call.execution) : "");
}

// In the form of csrc/host's, which jaxcoll/diagnosis/errors.py reads.
std::string Clique::WaitText(std::uint64_t site, std::int64_t waited_ns, const std::set<int>& late,
                             const std::string& others) const {
  std::string of_arrived;
  std::string of_late;
  const std::string names = others.substr(0, others.find('\n'));
  std::string doing = others.substr(names.size());
  std::vector<std::int64_t> elsewhere = devices_;
  for (const auto& seat : seats_) {
    std::erase(elsewhere, devices_[seat->rank]);
    std::string& text = late.count(seat->ordinal) == 0 ? of_arrived : of_late;
    text += (text.empty() ? "" : ", ") + std::to_string(seat->rank) + " (device " +
            std::to_string(devices_[seat->rank]) + ")";
    if (late.count(seat->ordinal) > 0) {
      const std::string last = LastCallText(devices_[seat->rank]);
      doing += last.empty() ? "" : "\n  rank " + std::to_string(seat->rank) + ": " + last;
    }
  }
  return surroundings_.site_text(site) + ": waited " + SecondsText(waited_ns) +
         (!names.empty() ? " for " + names
          : late.empty() ? " for other processes, devices " + Listed(elsewhere)
                         : " for rank " + of_late) +
         "; arrived: " + of_arrived + DumpText() + doing;
}

}  // namespace jaxcoll::cuda

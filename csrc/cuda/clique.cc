#include "cuda/clique.h"

#include <algorithm>  // std::any_of, std::find, std::find_if, std::min, std::sort
#include <chrono>     // std::chrono
#include <optional>   // std::optional
#include <thread>     // std::this_thread
#include <utility>    // std::move

#include "core/clock.h"
#include "core/group_id.h"

namespace jaxcoll::cuda {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(1);
// Nobody asks for a reason to wait no longer than this.
constexpr std::int64_t kNoExcuseNs = 100'000'000;

// As jaxcoll/diagnosis/records.py reads executions. Within a process meetings of the CPU engine
// have numbers of their own, which stay below this.
constexpr unsigned kOccurrenceBits = 40;
constexpr std::int64_t kFirstNumber = std::int64_t{1} << 22;

std::string Listed(const std::vector<std::int64_t>& ids) {
  std::string text;
  for (const std::int64_t id : ids) {
    text += (text.empty() ? "" : ", ") + std::to_string(id);
  }
  return text;
}

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
    const Status connected = Connect(limits.timeout_ns);
    lock.lock();
    if (failure_.ok()) {
      failure_ = connected;
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

Status Clique::Connect(std::int64_t timeout_ns) {
  NcclId id{};
  const bool has_root =
      std::any_of(seats_.begin(), seats_.end(), [](const auto& seat) { return seat->rank == 0; });
  if (has_root) {
    if (const int result = libraries().nccl.get_unique_id(&id); result != kNcclSuccess) {
      return libraries().OfNccl("ncclGetUniqueId", result);
    }
  }
  if (seats_.size() < devices_.size()) {
    if (surroundings_.exchange_id == nullptr) {
      return Internal("devices " + Listed(devices_) + " are in several processes");
    }
    if (std::string problem = surroundings_.exchange_id(devices_, generation_, id);
        !problem.empty()) {
      return Internal("no communicator of devices " + Listed(devices_) + ": " + problem);
    }
  }
  int before = 0;
  if (const int error = libraries().runtime.get_device(&before); error != kCudaSuccess) {
    return libraries().OfRuntime("cudaGetDevice", error);
  }
  Status status = ConnectLocal(id, timeout_ns);
  if (const int error = libraries().runtime.set_device(before);
      error != kCudaSuccess && status.ok()) {
    status = libraries().OfRuntime("cudaSetDevice", error);
  }
  return status;
}

Status Clique::ConnectLocal(const NcclId& id, std::int64_t timeout_ns) {
  Status status = MakeTools();
  if (status.ok()) {
    status = BeginCommunicators(id);
  }
  if (status.ok()) {
    status = AwaitNccl(timeout_ns);
  }
  if (status.ok()) {
    status = WarmUp(timeout_ns);
  }
  return status.ok() ? ConnectPeers(timeout_ns) : status;
}

Status Clique::ConnectPeers(std::int64_t timeout_ns) {
  if (surroundings_.peer_image == nullptr || seats_.size() < devices_.size()) {
    return {};
  }
  std::vector<PeerMemory::Rank> ranks(seats_.size());
  std::vector<int> ordinals(seats_.size());
  for (const auto& seat : seats_) {
    ranks[seat->rank] = {.ordinal = seat->ordinal, .stream = seat->side_stream};
    ordinals[seat->rank] = seat->ordinal;
  }
  if (!PeerMemory::Problem(libraries(), ordinals).empty()) {
    return {};
  }
  Status status =
      peers_.Create(libraries(), surroundings_.peer_image, ranks, flag_.ended(), timeout_ns);
  if (!status.ok()) {
    status.message = "devices " + Listed(devices_) + ": " + status.message +
                     " (JAXCOLL_CUDA_PEERS=0 does without peer memory)";
    return status;
  }
  for (const auto& seat : seats_) {
    seat->peers = peers_.seat(seat->rank);
  }
  return {};
}

Status Clique::MakeTools() {
  const Runtime& runtime = libraries().runtime;
  if (Status status = flag_.Create(libraries()); !status.ok()) {
    return status;
  }
  for (const auto& seat : seats_) {
    if (const int error = runtime.set_device(seat->ordinal); error != kCudaSuccess) {
      return libraries().OfRuntime("cudaSetDevice", error);
    }
    if (surroundings_.traps) {
      if (Status status = seat->check.Create(libraries()); !status.ok()) {
        return status;
      }
    }
    if (Status status = seat->watch.Create(libraries()); !status.ok()) {
      return status;
    }
    if (const int error = runtime.stream_create_with_flags(&seat->side_stream, kStreamNonBlocking);
        error != kCudaSuccess) {
      return libraries().OfRuntime("cudaStreamCreateWithFlags", error);
    }
  }
  return {};
}

Status Clique::BeginCommunicators(const NcclId& id) {
  const Nccl& nccl = libraries().nccl;
  if (const int result = nccl.group_start(); result != kNcclSuccess) {
    return libraries().OfNccl("ncclGroupStart", result);
  }
  Status status;
  for (const auto& seat : seats_) {
    if (const int error = libraries().runtime.set_device(seat->ordinal); error != kCudaSuccess) {
      status = libraries().OfRuntime("cudaSetDevice", error);
      break;
    }
    status = seat->comm.Begin(libraries(), id, seat->num_ranks, seat->rank);
    if (!status.ok()) {
      break;
    }
  }
  // Also after an error: a group that stays open would take the thread's next calls.
  if (const int result = nccl.group_end(); !HasTaken(result) && status.ok()) {
    status = libraries().OfNccl("ncclCommInitRankConfig", result);
  }
  return status;
}

Status Clique::AwaitNccl(std::int64_t timeout_ns) const {
  const std::int64_t begun_ns = NowNs();
  for (const auto& seat : seats_) {
    for (;;) {
      const std::optional<int> state = seat->comm.State(libraries());
      if (!state) {
        return Internal("the group has ended");  // for a cause that is known
      }
      if (*state == kNcclSuccess) {
        break;
      }
      if (*state != kNcclInProgress) {
        return libraries().OfNccl("connecting", *state);
      }
      if (Status status = CheckWait(begun_ns, timeout_ns); !status.ok()) {
        return status;
      }
      std::this_thread::sleep_for(kLookEvery);
    }
  }
  return {};
}

Status Clique::WarmUp(std::int64_t timeout_ns) {
  const Runtime& runtime = libraries().runtime;
  const Nccl& nccl = libraries().nccl;
  std::vector<void*> words;  // not freed, which would wait for all that the device does
  for (const auto& seat : seats_) {
    if (const int error = runtime.set_device(seat->ordinal); error != kCudaSuccess) {
      return libraries().OfRuntime("cudaSetDevice", error);
    }
    if (const int error = runtime.malloc(&words.emplace_back(), sizeof(std::int32_t));
        error != kCudaSuccess) {
      return libraries().OfRuntime("cudaMalloc", error);
    }
  }
  if (const int result = nccl.group_start(); result != kNcclSuccess) {
    return libraries().OfNccl("ncclGroupStart", result);
  }
  int result = kNcclSuccess;
  for (std::size_t i = 0; i < seats_.size() && HasTaken(result); ++i) {
    result = nccl.all_reduce(words[i], words[i], 1, NcclType::kI32, NcclOp::kSum,
                             seats_[i]->comm.handle(), seats_[i]->side_stream);
  }
  if (const int ended = nccl.group_end(); HasTaken(result)) {
    result = ended;
  }
  if (!HasTaken(result)) {
    return libraries().OfNccl("ncclAllReduce", result);
  }
  const std::int64_t begun_ns = NowNs();
  if (Status status = AwaitNccl(timeout_ns); !status.ok()) {
    return status;
  }
  for (const auto& seat : seats_) {
    int error = runtime.stream_query(seat->side_stream);
    for (; error == kCudaErrorNotReady; error = runtime.stream_query(seat->side_stream)) {
      if (Status status = CheckWait(begun_ns, timeout_ns); !status.ok()) {
        return status;
      }
      std::this_thread::sleep_for(kLookEvery);
    }
    if (error != kCudaSuccess) {
      return libraries().OfRuntime("cudaStreamQuery", error);
    }
  }
  return {};
}

Status Clique::CheckWait(std::int64_t begun_ns, std::int64_t timeout_ns) const {
  if (timeout_ns < 0 || NowNs() - begun_ns < timeout_ns) {
    return {};
  }
  return DeadlineExceeded("no communicator of devices " + Listed(devices_) +
                          ": NCCL has not connected them within " + SecondsText(timeout_ns));
}

Status Clique::Failure() const {
  if (state_.load() != State::kFailed) {
    return {};
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Clique::Fail(const Status& cause, bool is_orderly) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.ok()) {
    return;
  }
  failure_ = cause;
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

bool Clique::TryAbort() {
  if (state_.load() != State::kFailed) {
    return false;
  }
  CloseCalls();
  flag_.End();
  bool is_ended = true;
  for (const auto& seat : seats_) {
    libraries().runtime.set_device(seat->ordinal);  // what these return changes nothing here
    is_ended = seat->comm.TryAbort(libraries()) && is_ended;
  }
  is_ended_.store(is_ended);
  return is_ended;
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
    if (limit_ns < 0 || call->waited_ns < std::min(limit_ns, kNoExcuseNs)) {
      continue;
    }
    if (limits.is_anyone_excused != nullptr && limits.is_anyone_excused()) {
      seat->watch.Excuse(now_ns);
    } else if (call->waited_ns >= limit_ns) {
      cause = DeadlineExceeded(LateText(*seat, *call));
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

std::string Clique::LateText(const Seat& seat, const LateCall& call) const {
  std::set<int> late;
  for (const auto& other : seats_) {
    if (other->num_calls.load(std::memory_order_relaxed) <
        seat.num_calls.load(std::memory_order_relaxed)) {
      late.insert(other->ordinal);
    }
  }
  return WaitText(call.site, call.waited_ns, late);
}

// In the form of csrc/host's, which jaxcoll/diagnosis/errors.py reads.
std::string Clique::WaitText(std::uint64_t site, std::int64_t waited_ns,
                             const std::set<int>& late) const {
  std::string of_arrived;
  std::string of_late;
  std::string doing;
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
         (late.empty() ? " for other processes, devices " + Listed(elsewhere)
                       : " for rank " + of_late) +
         "; arrived: " + of_arrived + DumpText() + doing;
}

}  // namespace jaxcoll::cuda

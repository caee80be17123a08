#include "host/communicator.h"

#include <algorithm>    // std::find
#include <atomic>       // std::atomic
#include <numeric>      // std::iota
#include <string_view>  // std::string_view
#include <utility>      // std::move

#include "host/copy_work.h"
#include "host/job.h"
#include "host/reduce_work.h"
#include "host/watchdog.h"
#include "host/witness.h"
#include "kernels/reduce.h"

namespace jaxcoll {
namespace {

// All calls between two resets are one run: where one has failed, so do the others. XLA's RunIds,
// which have 32 bits, are never this large.
std::atomic<std::int64_t> current_run{std::int64_t{1} << 62};

std::atomic<std::uint64_t> num_calls{0};

std::string_view Name(Operation::Kind kind) {
  switch (kind) {
    case Operation::Kind::kAllReduce:
      return "all_reduce";
    case Operation::Kind::kAllGather:
      return "all_gather";
    case Operation::Kind::kReduceScatter:
      return "reduce_scatter";
    case Operation::Kind::kShift:
      return "all_to_all";  // of which it is a step
    case Operation::Kind::kSend:
      return "ppermute";
  }
  return "";
}

bool Reduces(Operation::Kind kind) {
  return kind == Operation::Kind::kAllReduce || kind == Operation::Kind::kReduceScatter;
}

// Null, and `problem`, where it can't be done.
std::unique_ptr<const Work> MakeWork(const Operation& operation, std::size_t num_ranks,
                                     std::string& problem) {
  const std::size_t count = operation.count;
  const std::size_t bytes = count * SizeOf(operation.dtype);
  ReduceFn reduce = nullptr;
  if (Reduces(operation.kind)) {
    reduce = GetReduce(operation.dtype, operation.op);
    if (reduce == nullptr) {
      problem =
          "no " + std::string(Name(operation.op)) + " of " + std::string(Name(operation.dtype));
      return nullptr;
    }
  }
  switch (operation.kind) {
    case Operation::Kind::kAllReduce:
      return std::make_unique<AllReduceWork>(
          std::vector<ReducedLeaf>{{.dtype = operation.dtype, .count = count, .reduce = reduce}});
    case Operation::Kind::kReduceScatter:
      return std::make_unique<ReduceScatterWork>(operation.dtype, reduce, 1, num_ranks, count);
    case Operation::Kind::kAllGather: {
      const ExchangeLayout layout{.rows = 1,
                                  .columns = 1,
                                  .bytes = bytes,
                                  .from_block = 0,
                                  .from_row = 0,
                                  .from_column = bytes,
                                  .to_block = bytes,
                                  .to_row = 0,
                                  .to_column = num_ranks * bytes};
      return std::make_unique<ExchangeWork>(layout, bytes, num_ranks * bytes);
    }
    case Operation::Kind::kShift: {
      std::vector<std::size_t> source_of(num_ranks);
      for (std::size_t rank = 0; rank < num_ranks; ++rank) {
        source_of[(rank + operation.from) % num_ranks] = rank;
      }
      return std::make_unique<PermuteWork>(std::move(source_of), bytes);
    }
    case Operation::Kind::kSend:
      return std::make_unique<PermuteWork>(std::vector<std::size_t>{PermuteWork::kNone, 0}, bytes);
  }
  return nullptr;
}

// FNV-1a, as good as any: the same on all processes.
std::uint64_t Mix(std::uint64_t hash, std::uint64_t value) {
  return (hash ^ value) * 0x100'0000'01b3;
}

std::uint64_t Mix(std::uint64_t hash, const Operation& operation) {
  hash = Mix(hash, static_cast<std::uint64_t>(operation.kind));
  hash = Mix(hash, static_cast<std::uint64_t>(operation.dtype));
  hash = Mix(hash, static_cast<std::uint64_t>(operation.op));
  hash = Mix(hash, operation.count);
  return Mix(Mix(hash, operation.from), operation.to);
}

// An error names so many programs' lines for calls of one kind and count, each at such a length:
// XLA takes 1,023 bytes of it, and who is missing comes after them.
constexpr std::size_t kMaxOrigins = 3;
constexpr std::size_t kMaxOriginBytes = 140;
constexpr std::size_t kOriginBeginBytes = 50;  // of those
constexpr std::size_t kMaxRuns = 8;

// As 0-3, 8, 10-11.
std::string DevicesText(const std::vector<std::int64_t>& devices) {
  std::string text;
  std::size_t num_runs = 0;
  for (std::size_t i = 0; i < devices.size();) {
    std::size_t end = i + 1;
    while (end < devices.size() && devices[end] == devices[end - 1] + 1) {
      ++end;
    }
    if (++num_runs > kMaxRuns) {
      return text + ", ... (" + std::to_string(devices.size()) + ")";
    }
    text += (i == 0 ? "" : ", ") + std::to_string(devices[i]);
    if (end - i > 1) {
      text += (end - i > 2 ? "-" : ", ") + std::to_string(devices[end - 1]);
    }
    i = end;
  }
  return text;
}

// Begin and end, where the line of the program is.
std::string Shortened(const std::string& origin) {
  if (origin.size() <= kMaxOriginBytes) {
    return origin;
  }
  return origin.substr(0, kOriginBeginBytes) + "..." +
         origin.substr(origin.size() - (kMaxOriginBytes - kOriginBeginBytes));
}

constexpr std::uint64_t kHashStart = 0xcbf2'9ce4'8422'2325;

}  // namespace

// ---- Clique -------------------------------------------------------------------------------------

std::size_t Clique::Hash::operator()(const Operation& operation) const {
  return Mix(kHashStart, operation);
}

Clique::Clique(std::vector<std::int64_t> devices, std::vector<std::int64_t> processes, Job* job)
    : devices_(std::move(devices)), processes_(std::move(processes)), job_(job) {}

Clique::~Clique() {
  for (const auto& [operation, site] : sites_) {
    site->Unref();
  }
}

void Clique::Describe(Operation::Kind kind, std::size_t count, const std::string& origin) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string>& known = origins_[{kind, count}];
  if (known.size() == kMaxOrigins || std::find(known.begin(), known.end(), origin) != known.end()) {
    return;
  }
  known.push_back(origin);
  for (const auto& [operation, site] : sites_) {
    if (operation.kind == kind && operation.count == count) {
      DescribeSite(site->id(), known.size() == 1 ? Text(operation, origin) : Shortened(origin),
                   Json(operation));
    }
  }
}

std::string Clique::Text(const Operation& operation, const std::string& origin) const {
  std::string text = std::string(Name(operation.kind)) + " of XLA";
  if (Reduces(operation.kind)) {
    text += " (" + std::string(Name(operation.op)) + ")";
  }
  text += ": " + std::string(Name(operation.dtype)) + "[" + std::to_string(operation.count) +
          "] (" + std::to_string(operation.count * SizeOf(operation.dtype)) + " bytes)";
  if (operation.kind == Operation::Kind::kSend) {
    text += " from device " + std::to_string(devices_[operation.from]) + " to device " +
            std::to_string(devices_[operation.to]);
  } else {
    text += ", devices " + DevicesText(devices_);
  }
  return origin.empty() ? text : text + ", for " + Shortened(origin);
}

std::string Clique::Json(const Operation& operation) const {
  const bool is_pair = operation.kind == Operation::Kind::kSend;
  return R"({"op":")" + std::string(Name(operation.kind)) + R"( of XLA","ranks":)" +
         std::to_string(is_pair ? 2 : devices_.size()) + R"(,"bytes":)" +
         std::to_string(operation.count * SizeOf(operation.dtype)) + R"(,"path":"native, )" +
         (job_ != nullptr ? "between processes" : "in one process") + "\"}";
}

CallSite* Clique::Site(const Operation& operation, std::string& problem) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = sites_.find(operation); found != sites_.end()) {
    return found->second;
  }
  std::vector<std::size_t> members;
  if (operation.kind == Operation::Kind::kSend) {
    members = {operation.from, operation.to};
  } else {
    members.resize(devices_.size());
    std::iota(members.begin(), members.end(), std::size_t{0});
  }
  std::vector<std::int64_t> ids;
  Placement placement{.job = job_, .processes = {{}}, .devices = {{}}, .fails_with_job = true};
  std::uint64_t id = Mix(kHashStart, operation);
  for (const std::int64_t device : devices_) {  // a pair's calls are those of one group
    id = Mix(id, static_cast<std::uint64_t>(device));
  }
  for (std::size_t i = 0; i < members.size(); ++i) {
    ids.push_back(static_cast<std::int64_t>(i));
    placement.processes[0].push_back(processes_[members[i]]);
    placement.devices[0].push_back(devices_[members[i]]);
  }
  problem = members.size() > kMaxRanks
                ? "more than " + std::to_string(kMaxRanks) + " ranks in a group"
                : CallSite::Problem(placement);
  std::unique_ptr<const Work> work =
      problem.empty() ? MakeWork(operation, members.size(), problem) : nullptr;
  if (work == nullptr) {
    problem = Text(operation, "") + ": " + problem;
    return nullptr;
  }
  const auto origins = origins_.find({operation.kind, operation.count});
  if (origins == origins_.end()) {
    DescribeSite(id, Text(operation, ""), Json(operation));
  } else {
    for (const std::string& origin : origins->second) {
      const bool is_first = &origin == &origins->second.front();
      DescribeSite(id, is_first ? Text(operation, origin) : Shortened(origin), Json(operation));
    }
  }
  auto* const site = new CallSite(id, {std::move(ids)}, std::move(work), placement);
  sites_.emplace(operation, site);
  return site;
}

// ---- PendingCall --------------------------------------------------------------------------------

void PendingCall::Begin(CallSite& site, std::size_t rank, std::int64_t device, std::int64_t run,
                        const void* send, void* receive, Patience patience) {
  patience_ = patience;
  const CallSite::Visit visit = site.Begin(static_cast<std::int64_t>(rank), device, run);
  num_calls.fetch_add(1, std::memory_order_release);
  visit.meeting->SetOperand(visit.rank, 0, send);
  visit.meeting->SetResult(visit.rank, 0, receive);
  const Arrival arrival = site.Arrive(visit, *this);
  if (arrival.answer == Answer::kFailed) {
    status_ = *arrival.failure;
  } else if (arrival.answer == Answer::kWaits) {
    meeting_ = visit.meeting;
  }
}

Waiter PendingCall::Make() {
  is_pending_ = true;
  return {.context = this, .resume = &Resume, .is_brief = true};
}

void PendingCall::Resume(const Waiter& waiter, const Status* status) {
  auto& call = *static_cast<PendingCall*>(waiter.context);
  const std::lock_guard<std::mutex> lock(call.mutex_);
  if (status != nullptr) {
    call.status_ = *status;
  }
  call.is_pending_ = false;
  call.ended_.notify_one();  // under the lock: the caller may end the object's life right after
}

Status PendingCall::Wait() {
  if (meeting_ != nullptr) {
    meeting_->Continue();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [this] { return !is_pending_; });
  lock.unlock();
  if (!status_.ok()) {
    Witness::Get().AwaitLook();
  }
  return status_;
}

// ---- Communicator -------------------------------------------------------------------------------

void Communicator::Reset() { current_run.fetch_add(1); }

std::uint64_t Communicator::NumCalls() { return num_calls.load(std::memory_order_acquire); }

Status Communicator::Call(const Operation& operation, const void* send, void* receive) {
  if (is_calling_.exchange(true)) {
    return RefuseTwo();
  }
  PendingCall call;
  Status status = Begin(operation, send, receive, call, Patience::kWaits);
  if (status.ok()) {
    status = call.Wait();
  }
  is_calling_.store(false);
  return status;
}

Status Communicator::RefuseTwo() const {
  const auto cause = std::make_shared<const Status>(
      Internal("device " + std::to_string(clique_.devices()[rank_]) +
               " runs two programs at once, whose calls can't be told apart"));
  Watchdog::Get().FailRun(current_run.load(), cause);
  if (clique_.job() != nullptr) {
    clique_.job()->session()->segment().Fail(cause->message);
  }
  Witness::Get().AwaitLook();
  return *cause;
}

Status Communicator::Begin(const Operation& operation, const void* send, void* receive,
                           PendingCall& call) {
  if (is_calling_.exchange(true)) {
    return RefuseTwo();
  }
  Status status = Begin(operation, send, receive, call, Patience::kReturns);
  is_calling_.store(false);
  return status;
}

Status Communicator::Begin(const Operation& operation, const void* send, void* receive,
                           PendingCall& call, Patience patience) {
  const std::int64_t run = current_run.load();  // once: a reset may come in between
  if (clique_.job() != nullptr) {
    if (auto cause = clique_.job()->Failure(); cause != nullptr) {
      Watchdog::Get().FailRun(run, cause);
      Witness::Get().AwaitLook();
      return *cause;
    }
  }
  std::string problem;
  CallSite* const site = clique_.Site(operation, problem);
  if (site == nullptr) {
    return Internal(std::move(problem));
  }
  std::size_t rank = rank_;
  if (operation.kind == Operation::Kind::kSend) {
    rank = rank_ == operation.from ? 0 : 1;
  }
  call.Begin(*site, rank, clique_.devices()[rank_], run, send, receive, patience);
  return {};
}

}  // namespace jaxcoll

// How the communicators of a group are made, and its peer memory; the rest of a clique is in
// clique.cc.
#include <algorithm>           // std::any_of
#include <array>               // std::array
#include <bit>                 // std::bit_width
#include <chrono>              // std::chrono
#include <condition_variable>  // std::condition_variable
#include <memory>              // std::make_shared
#include <mutex>               // std::lock_guard, std::mutex, std::unique_lock
#include <optional>            // std::optional
#include <set>                 // std::set
#include <string>              // std::string, std::to_string
#include <thread>              // std::this_thread
#include <utility>             // std::move
#include <vector>              // std::vector

#include "core/clock.h"
#include "cuda/clique.h"

namespace jaxcoll::cuda {
namespace {

constexpr auto kAskNcclEvery = std::chrono::milliseconds(1);

/// For a cause that is known.
Status GroupHasEnded() { return Internal("the group has ended"); }

/// What each rank says first.
struct Introduction {
  NcclId id;                        // of the first rank
  std::array<char, 256> problem{};  // why it can't take part, or nothing
};

}  // namespace

Status Clique::Connect(std::int64_t timeout_ns) {
  int before = 0;
  Status status;
  if (const int error = libraries().runtime.get_device(&before); error != kCudaSuccess) {
    status = libraries().OfRuntime("cudaGetDevice", error);
  }
  Rounds rounds(surroundings_.exchange, devices_, generation_, seats_.size());
  NcclId id;
  status = Introduce(status.ok() ? MakeTools() : status, rounds, id);
  if (status.ok()) {
    status = ConnectLocal(rounds, id, timeout_ns);
  }
  if (const int error = libraries().runtime.set_device(before);
      error != kCudaSuccess && status.ok()) {
    status = libraries().OfRuntime("cudaSetDevice", error);
  }
  return status;
}

Status Clique::Introduce(Status status, Rounds& rounds, NcclId& id) {
  std::vector<Introduction> all(devices_.size());  // by rank
  const bool has_root =
      std::any_of(seats_.begin(), seats_.end(), [](const auto& seat) { return seat->rank == 0; });
  if (status.ok() && has_root) {
    if (const int result = libraries().nccl.get_unique_id(&all.front().id);
        result != kNcclSuccess) {
      status = libraries().OfNccl("ncclGetUniqueId", result);
    }
  }
  for (const auto& seat : seats_) {
    auto& problem = all[seat->rank].problem;
    status.message.copy(problem.data(), problem.size() - 1);
  }
  // Also who can't: the others would wait.
  if (Status shared = rounds.Share(all); !shared.ok() && status.ok()) {
    status = shared;
  }
  for (std::size_t rank = 0; rank < all.size() && status.ok(); ++rank) {
    if (all[rank].problem.front() != '\0') {
      status = Internal("no communicator of devices " + Listed(devices_) + ": rank " +
                        std::to_string(rank) + ": " + all[rank].problem.data());
    }
  }
  id = all.front().id;
  return status;
}

Status Clique::ConnectLocal(Rounds& rounds, const NcclId& id, std::int64_t timeout_ns) {
  const PeerMemory::Plan plan = PeerPlan(timeout_ns);
  // Who goes on from here to NCCL finds the others there.
  Status status = peers_.Offer(libraries(), plan, rounds);
  // What failed there is known; NCCL is not to take it for its own.
  libraries().runtime.get_last_error();
  if (status.ok()) {
    status = ConnectNccl(id, timeout_ns);
  }
  if (status.ok()) {
    status = peers_.Connect(libraries(), plan, rounds);
  }
  libraries().runtime.get_last_error();
  for (std::size_t i = 0; i < seats_.size() && status.ok(); ++i) {
    seats_[i]->peers = peers_.seat(i);
  }
  if (status.ok() && !peers_.problem().empty() && !peers_.is_foreseen() &&
      surroundings_.notice != nullptr) {
    surroundings_.notice("small sums of devices " + Listed(devices_) +
                         " are NCCL's: " + peers_.problem());
  }
  return status;
}

PeerMemory::Plan Clique::PeerPlan(std::int64_t timeout_ns) const {
  return {.image = surroundings_.peer_image,
          .host = surroundings_.host,
          .local = LocalRanks(),
          .ended = flag_.ended(),
          .raised = surroundings_.traps ? flag_.word() : nullptr,
          .timeout_ns = timeout_ns};
}

std::vector<LocalRank> Clique::LocalRanks() const {
  std::vector<LocalRank> local;
  local.reserve(seats_.size());
  for (const auto& seat : seats_) {
    local.push_back({.rank = seat->rank, .ordinal = seat->ordinal, .stream = seat->side_stream});
  }
  return local;
}

Status Clique::MakeTools() {
  const Runtime& runtime = libraries().runtime;
  // Else CUDA would make itself at home on device 0, which may be another process's.
  if (const int error = runtime.set_device(seats_.front()->ordinal); error != kCudaSuccess) {
    return libraries().OfRuntime("cudaSetDevice", error);
  }
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
    int least = 0;
    int greatest = 0;
    if (const int error = runtime.device_get_stream_priority_range(&least, &greatest);
        error != kCudaSuccess) {
      return libraries().OfRuntime("cudaDeviceGetStreamPriorityRange", error);
    }
    // Else communication waits until the blocks of a product that begins later have begun.
    if (const int error =
            runtime.stream_create_with_priority(&seat->side_stream, kStreamNonBlocking, greatest);
        error != kCudaSuccess) {
      return libraries().OfRuntime("cudaStreamCreateWithPriority", error);
    }
  }
  return {};
}

Status Clique::ConnectNccl(const NcclId& id, std::int64_t timeout_ns) {
  struct Progress {
    std::mutex mutex;  // guards the following
    std::condition_variable changed;
    std::int64_t begun_ns = NowNs();  // of what is under way
    bool is_over = false;
    Status outcome;
  };
  const auto progress = std::make_shared<Progress>();
  const bool starts = surroundings_.start([self = shared_from_this(), id, progress] {
    Status status = self->BeginCommunicators(id);
    if (status.ok()) {
      status = self->AwaitNccl();
    }
    if (status.ok()) {
      for (const auto& seat : self->seats_) {
        seat->comm.SetMade();
      }
      {
        const std::lock_guard<std::mutex> lock(progress->mutex);
        progress->begun_ns = NowNs();
      }
      status = self->WarmUp();
    }
    const std::lock_guard<std::mutex> lock(progress->mutex);
    progress->outcome = std::move(status);
    progress->is_over = true;
    progress->changed.notify_all();
  });
  if (!starts) {
    return Internal("there is no thread to connect NCCL on");
  }
  std::unique_lock<std::mutex> lock(progress->mutex);
  while (!progress->changed.wait_for(lock, kAskNcclEvery, [&] { return progress->is_over; })) {
    if (timeout_ns >= 0 && NowNs() - progress->begun_ns >= timeout_ns) {
      return DeadlineExceeded("no communicator of devices " + Listed(devices_) +
                              ": NCCL has not connected them within " + SecondsText(timeout_ns));
    }
    if (seats_.front()->comm.is_given_up()) {
      return GroupHasEnded();
    }
  }
  return progress->outcome;
}

std::vector<std::unique_lock<std::mutex>> Clique::EnterAll() const {
  std::vector<std::unique_lock<std::mutex>> all;
  for (const auto& seat : seats_) {
    all.push_back(seat->comm.Enter());
    if (!all.back()) {
      return {};
    }
  }
  return all;
}

Status Clique::BeginCommunicators(const NcclId& id) const {
  const auto inside = EnterAll();
  if (inside.empty()) {
    return GroupHasEnded();
  }
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
    status =
        seat->comm.Begin(libraries(), id, seat->num_ranks, seat->rank, peers_.is_on_one_host());
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

Status Clique::AwaitNccl() const {
  for (const auto& seat : seats_) {
    for (;;) {
      const std::optional<int> state = seat->comm.State(libraries());
      if (!state) {
        return GroupHasEnded();
      }
      if (*state == kNcclSuccess) {
        break;
      }
      if (*state != kNcclInProgress) {
        return libraries().OfNccl("connecting", *state);
      }
      std::this_thread::sleep_for(kAskNcclEvery);
    }
  }
  return {};
}

Status Clique::WarmUp() const {
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
  int result = kNcclSuccess;
  {
    const auto inside = EnterAll();
    if (inside.empty()) {
      return GroupHasEnded();
    }
    if (result = nccl.group_start(); result != kNcclSuccess) {
      return libraries().OfNccl("ncclGroupStart", result);
    }
    for (std::size_t i = 0; i < seats_.size() && HasTaken(result); ++i) {
      result = nccl.all_reduce(words[i], words[i], 1, NcclType::kI32, NcclOp::kSum,
                               seats_[i]->comm.handle(), seats_[i]->side_stream);
    }
    if (const int ended = nccl.group_end(); HasTaken(result)) {
      result = ended;
    }
  }
  if (!HasTaken(result)) {
    return libraries().OfNccl("ncclAllReduce", result);
  }
  if (Status status = AwaitNccl(); !status.ok()) {
    return status;
  }
  for (const auto& seat : seats_) {
    int error = runtime.stream_query(seat->side_stream);
    for (; error == kCudaErrorNotReady; error = runtime.stream_query(seat->side_stream)) {
      if (seat->comm.is_given_up()) {
        return GroupHasEnded();
      }
      std::this_thread::sleep_for(kAskNcclEvery);
    }
    if (error != kCudaSuccess) {
      return libraries().OfRuntime("cudaStreamQuery", error);
    }
  }
  return {};
}

// ---- Windows for blocks -------------------------------------------------------------------------

Status Clique::OpenBlocks(int ordinal, Stream stream, std::size_t bytes, const Limits& limits,
                          BlockSeat*& blocks) {
  blocks = nullptr;
  const std::size_t slot_bytes = RoundedSlotBytes(bytes);
  if (SeatOf(ordinal).peers == nullptr || slot_bytes > kMostSlotBytes) {
    return {};  // which is the same on all ranks
  }
  Blocks& of = BlocksOf(slot_bytes);
  if (!of.meeting.is_done()) {
    if (const int error = libraries().runtime.stream_synchronize(stream); error != kCudaSuccess) {
      return libraries().OfRuntime("cudaStreamSynchronize", error);
    }
    Status status = of.meeting.Arrive(
        ordinal, {},
        {.timeout_ns = limits.first_timeout_ns,
         .interruption = [this] { return Failure(); },
         .late =
             [&](const std::set<int>& missing) {
               std::vector<std::int64_t> ids;
               for (const int other : missing) {
                 ids.push_back(devices_[SeatOf(other).rank]);
               }
               return DeadlineExceeded("devices " + Listed(devices_) + ": waited " +
                                       SecondsText(limits.first_timeout_ns) + " for devices " +
                                       Listed(ids) +
                                       ", which have not begun a program with a collective matmul");
             }});
    if (!status.ok()) {
      Fail(status);
      return Failure();
    }
  }
  const std::lock_guard<std::mutex> lock(of.mutex);
  Status status = Failure();
  if (status.ok() && !of.is_made) {
    of.is_made = true;
    if (status = MakeBlocks(of, slot_bytes); !status.ok()) {
      Fail(status);
      return Failure();
    }
  }
  for (std::size_t i = 0; i < seats_.size() && status.ok(); ++i) {
    if (seats_[i]->ordinal == ordinal) {
      blocks = of.windows.seat(i);
    }
  }
  return status;
}

Clique::Blocks& Clique::BlocksOf(std::size_t slot_bytes) {
  const std::lock_guard<std::mutex> lock(blocks_mutex_);
  std::unique_ptr<Blocks>& blocks = blocks_[slot_bytes];
  if (blocks == nullptr) {
    std::set<int> ordinals;
    for (const auto& seat : seats_) {
      ordinals.insert(seat->ordinal);
    }
    blocks = std::make_unique<Blocks>(ordinals);
  }
  return *blocks;
}

Status Clique::MakeBlocks(Blocks& blocks, std::size_t slot_bytes) {
  // By the size: rounds for different ones are not to be taken for each other.
  Rounds rounds(surroundings_.exchange, devices_, generation_, seats_.size(), "window for blocks",
                Rounds::kMost * static_cast<std::int64_t>(std::bit_width(slot_bytes)));
  std::vector<PeerSignals> signals;
  signals.reserve(seats_.size());
  for (const auto& seat : seats_) {
    signals.push_back(seat->peers->signals());
  }
  int before = 0;
  if (const int error = libraries().runtime.get_device(&before); error != kCudaSuccess) {
    return libraries().OfRuntime("cudaGetDevice", error);
  }
  Status status = blocks.windows.Make(libraries(), slot_bytes, LocalRanks(), signals, rounds);
  libraries().runtime.get_last_error();  // what failed is known; NCCL is not to take it for its own
  if (const int error = libraries().runtime.set_device(before);
      error != kCudaSuccess && status.ok()) {
    status = libraries().OfRuntime("cudaSetDevice", error);
  }
  if (status.ok() && !blocks.windows.problem().empty() && surroundings_.notice != nullptr) {
    surroundings_.notice("blocks of collective matmuls of devices " + Listed(devices_) +
                         " go by NCCL: " + blocks.windows.problem());
  }
  return status;
}

}  // namespace jaxcoll::cuda

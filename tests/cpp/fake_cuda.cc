// A CUDA runtime, NCCL and cuBLASLt on a CPU: the functions of csrc/cuda/abi.h, on ordinary memory.
//
// A stream is a thread that dawdles, so that what does not wait for an event comes too early; the
// null stream runs what is put on it at once, in the thread that does so. A collective waits there
// for the other ranks; a send does not. So results, orders and offsets are computed for real. A
// communicator is a blocking one from NCCL 2.29 on; before, a thread of its own puts its calls on
// streams, later. FAKE_NCCL_VERSION says which NCCL this is.
// Processes with the same FAKE_CUDA_FOLDER, an empty folder, communicate and map each other's
// memory; they number their devices by CUDA_VISIBLE_DEVICES. fake_cuda_* are for tests.
#include <algorithm>           // std::copy_n, std::max, std::min
#include <array>               // std::array
#include <atomic>              // std::atomic, std::atomic_ref
#include <bit>                 // std::bit_cast
#include <chrono>              // std::chrono
#include <condition_variable>  // std::condition_variable
#include <cstdint>             // std::int64_t, std::uint16_t, std::uint32_t
#include <cstdlib>             // std::getenv
#include <cstring>             // std::memcpy, std::memset
#include <deque>               // std::deque
#include <functional>          // std::function
#include <map>                 // std::map
#include <memory>              // std::shared_ptr
#include <mutex>               // std::mutex
#include <random>              // std::minstd_rand
#include <set>                 // std::set
#include <sstream>             // std::istringstream
#include <string>              // std::string
#include <thread>              // std::this_thread, std::thread
#include <utility>             // std::exchange, std::move, std::pair
#include <vector>              // std::vector

#include "cuda/abi.h"
#include "cuda/peer_call.h"
#include "cuda/peer_flags.h"
#include "cuda/peer_numbers.h"
#include "cuda/peer_sum.h"
#include "fake_between.h"
#include "fake_numbers.h"

// NOLINTBEGIN(readability-identifier-naming): names of others
using namespace jaxcoll::cuda;
using namespace jaxcoll::testing;

/// Work in order, on a thread of its own.
struct CUstream_st {
  CUstream_st() {
    std::thread([this] { Loop(); }).detach();
  }

  void Loop() {
    std::minstd_rand random(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(this) >> 4));
    while (true) {
      std::function<int()> next;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return !work.empty(); });
        next = work.front();
      }
      if (random() % 2 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      }
      const int failed = next();
      const std::lock_guard<std::mutex> lock(mutex);
      error = error == 0 ? failed : error;
      work.pop_front();
      changed.notify_all();
    }
  }

  int Synchronize() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return work.empty(); });
    return error;
  }

  std::mutex mutex;  // guards the following
  std::condition_variable changed;
  std::deque<std::function<int()>> work;
  int error = 0;
};

struct CUevent_st {
  std::mutex mutex;  // guards the following
  std::condition_variable changed;
  std::uint64_t recorded = 0;       // times
  std::set<std::uint64_t> pending;  // of these; on several streams they end in any order
};

namespace {

int Run(CUstream_st* stream, std::function<int()> work) {
  if (stream == nullptr) {
    return work();
  }
  const std::lock_guard<std::mutex> lock(stream->mutex);
  stream->work.push_back(std::move(work));
  stream->changed.notify_all();
  return 0;
}

constexpr int kInvalidArgument = 4;
constexpr int kInvalidUsage = 5;
constexpr int kRemoteError = 6;
constexpr int kTrapped = 719;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidDevice = 101;
constexpr int kUninitialized = 201;
constexpr int kFirstBus = 0x10;
constexpr int kGreatestPriority = -5;
constexpr auto kPatience = std::chrono::seconds(20);

std::mutex log_mutex;
std::string log_text;
thread_local int current_device = 0;

/// Owned by the library, for ever: who is done with one does not say so.
template <typename T>
T* Keep(T* object) {
  static std::mutex mutex;
  static auto* const objects = new std::vector<std::shared_ptr<T>>();
  const std::lock_guard<std::mutex> lock(mutex);
  objects->emplace_back(object);
  return object;
}

/// Zeros, aligned as CUDA's memory.
void* KeepMemory(std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;
  auto* const memory = Keep(new std::vector<std::byte>(bytes + kAlignment));
  const auto address = std::bit_cast<std::uintptr_t>(memory->data());
  return memory->data() + (kAlignment - address % kAlignment);
}

void Log(const std::string& line) {
  const std::lock_guard<std::mutex> lock(log_mutex);
  log_text += line + "\n";
}

// ---- NCCL ---------------------------------------------------------------------------------------

struct Deposit {
  std::string what;
  Bytes data;
};

struct Group {
  std::string id;
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t num_ranks = 0;
  std::size_t num_local = 0;
  std::set<int> here;  // ranks
  bool is_aborted = false;
  std::map<std::uint64_t, std::map<int, Deposit>> collectives;  // by number, then rank
  std::map<std::uint64_t, std::size_t> readers;
  std::map<std::pair<int, int>, std::deque<Bytes>> mail;  // by sender and receiver
  std::map<std::pair<int, int>, std::uint64_t> num_sent;
  std::map<std::pair<int, int>, std::uint64_t> num_fetched;
};

std::mutex groups_mutex;
std::map<std::string, std::shared_ptr<Group>> groups;
std::uint64_t num_ids = 0;

}  // namespace

struct ncclComm {
  ncclComm(std::shared_ptr<Group> of, int as_rank) : group(std::move(of)), rank(as_rank) {}

  std::shared_ptr<Group> group;
  int rank = 0;
  std::uint64_t num_collectives = 0;
  std::atomic<int> async_error{0};
  std::atomic<int> num_pending{0};  // groups of calls that `worker` has not put on a stream
  std::atomic<int> num_inside{0};   // threads
  std::atomic<int> linger_ms{0};
  std::atomic<bool> is_stalled{false};
  std::atomic<bool> is_aborted{false};
  std::atomic<bool> is_made{false};
  std::atomic<bool> is_revoked{false};
  bool is_blocking = false;
  CUstream_st worker;
};

namespace {

struct Op {
  enum Kind { kAllReduce, kBroadcast, kReduceScatter, kAllGather, kSend, kReceive } kind;
  const void* from;
  void* to;
  std::size_t count;
  NcclType type;
  NcclOp op;
  int peer;
  ncclComm* comm;
  CUstream_st* stream;
};

thread_local int depth = 0;
thread_local std::vector<Op> queue;
thread_local std::vector<ncclComm*> begun;    // communicators
thread_local std::vector<ncclComm*> entered;  // those that the group is about
constexpr int kFirstThatRevokes = 22900;
std::atomic<int> nccl_version{[] {
  const char* const text = std::getenv("FAKE_NCCL_VERSION");  // NOLINT(concurrency-mt-unsafe)
  return text == nullptr ? 23007 : std::stoi(text);
}()};
std::atomic<bool> holds_aborts{false};
std::atomic<bool> stalls_all{false};
std::atomic<int> async_error_of_all{0};
std::atomic<bool> forces_non_blocking{false};
std::atomic<bool> holds_records{false};
std::atomic<int> far_device{-1};
std::atomic<bool> breaks_peers{false};
std::atomic<bool> opens_own{false};
std::atomic<bool> refuses_to_open{false};
std::atomic<bool> refuses_streams{false};
std::atomic<bool> refuses_products{false};

/// The numbers of the process's devices in the machine; empty: all.
std::vector<int> VisibleDevices() {
  std::vector<int> visible;
  const char* const text = std::getenv("CUDA_VISIBLE_DEVICES");  // NOLINT(concurrency-mt-unsafe)
  std::istringstream stream(text == nullptr ? "" : text);
  for (std::string one; std::getline(stream, one, ',');) {
    visible.push_back(std::stoi(one));
  }
  return visible;
}

/// Up to seconds.
void AwaitRelease(const std::atomic<bool>& holds) {
  for (int i = 0; i < 500 && holds; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void Enter(ncclComm* comm) {
  ++comm->num_inside;
  if (comm->is_aborted) {
    Log("use after abort");
  }
}

template <typename Ready>
bool Await(const ncclComm* comm, std::unique_lock<std::mutex>& lock, Ready ready) {
  Group& group = *comm->group;
  const auto is_lost = [&] { return group.is_aborted || comm->is_revoked; };
  const auto is_over = [&] { return is_lost() || ready(); };
  const auto until = std::chrono::steady_clock::now() + kPatience;
  // What is of other processes, `ready` looks for.
  const auto look_every = Messages::are_there() ? std::chrono::milliseconds(1) : kPatience;
  bool has_ended = is_over();
  while (!has_ended && std::chrono::steady_clock::now() < until) {
    has_ended = group.changed.wait_for(lock, look_every, is_over);
  }
  return has_ended && !is_lost();
}

std::string NameOf(const Group& group, const std::string& kind, std::uint64_t number, int rank) {
  return group.id + " " + kind + " " + std::to_string(number) + " " + std::to_string(rank);
}

/// Adds what ranks of other processes have brought to a collective.
void Fetch(const Group& group, std::uint64_t number, std::map<int, Deposit>& deposits) {
  for (int rank = 0; Messages::are_there() && rank < static_cast<int>(group.num_ranks); ++rank) {
    if (deposits.count(rank) != 0) {
      continue;
    }
    if (const auto message = Messages::Get(NameOf(group, "of", number, rank)); message) {
      const std::size_t end = message->find('\n');
      const auto* const data = reinterpret_cast<const std::byte*>(message->data());
      deposits[rank] = {message->substr(0, end), Bytes(data + end + 1, data + message->size())};
    }
  }
}

int RunCollective(const Op& op) {
  Group& group = *op.comm->group;
  const std::uint64_t number = op.comm->num_collectives++;
  const std::size_t ranks = group.num_ranks;
  const std::size_t sent = op.count * (op.kind == Op::kReduceScatter ? ranks : 1) * SizeOf(op.type);
  const auto* const from = static_cast<const std::byte*>(op.from);
  std::unique_lock<std::mutex> lock(group.mutex);
  auto& deposits = group.collectives[number];
  const std::string what = std::to_string(op.kind) + " " + std::to_string(op.count) + " " +
                           std::to_string(static_cast<int>(op.type)) + " " +
                           std::to_string(static_cast<int>(op.op)) + " " + std::to_string(op.peer);
  deposits[op.comm->rank] = {what, Bytes(from, from + sent)};
  if (group.num_local < ranks) {
    Messages::Put(NameOf(group, "of", number, op.comm->rank),
                  what + "\n" + std::string(reinterpret_cast<const char*>(from), sent));
  }
  group.changed.notify_all();
  if (!Await(op.comm, lock, [&] {
        Fetch(group, number, deposits);
        return deposits.size() == ranks;
      })) {
    return kRemoteError;
  }
  std::vector<const Bytes*> inputs;
  for (const auto& [rank, deposit] : deposits) {
    if (deposit.what != what) {
      return kInvalidUsage;
    }
    inputs.push_back(&deposit.data);
  }
  const auto rank = static_cast<std::size_t>(op.comm->rank);
  if (op.kind == Op::kAllReduce) {
    ReduceAny(op.type, inputs, 0, op.count, op.op, op.to);
  } else if (op.kind == Op::kReduceScatter) {
    ReduceAny(op.type, inputs, rank * op.count, op.count, op.op, op.to);
  } else if (op.kind == Op::kBroadcast) {
    const Bytes& root = *inputs[static_cast<std::size_t>(op.peer)];
    std::copy_n(root.begin(), root.size(), static_cast<std::byte*>(op.to));
  } else {
    for (std::size_t i = 0; i < ranks; ++i) {
      std::copy_n(inputs[i]->begin(), sent, static_cast<std::byte*>(op.to) + i * sent);
    }
  }
  if (++group.readers[number] == group.num_local) {
    group.collectives.erase(number);
    group.readers.erase(number);
  }
  return 0;
}

int RunReceive(const Op& op) {
  Group& group = *op.comm->group;
  std::unique_lock<std::mutex> lock(group.mutex);
  const std::pair<int, int> way{op.peer, op.comm->rank};
  auto& mail = group.mail[way];
  std::uint64_t& number = group.num_fetched[way];
  const std::string kind = "from " + std::to_string(op.peer) + " to";
  if (!Await(op.comm, lock, [&] {
        if (Messages::are_there() && mail.empty()) {
          if (const auto message = Messages::Get(NameOf(group, kind, number, op.comm->rank))) {
            const auto* const data = reinterpret_cast<const std::byte*>(message->data());
            mail.emplace_back(data, data + message->size());
            ++number;
          }
        }
        return !mail.empty();
      })) {
    return kRemoteError;
  }
  const Bytes data = std::move(mail.front());
  mail.pop_front();
  if (data.size() != op.count * SizeOf(op.type)) {
    return kInvalidArgument;
  }
  std::copy_n(data.begin(), data.size(), static_cast<std::byte*>(op.to));
  return 0;
}

int RunSend(const Op& op) {
  Group& group = *op.comm->group;
  const auto* const from = static_cast<const std::byte*>(op.from);
  const std::size_t bytes = op.count * SizeOf(op.type);
  const std::pair<int, int> way{op.comm->rank, op.peer};
  const std::lock_guard<std::mutex> lock(group.mutex);
  if (Messages::are_there()) {
    const std::string kind = "from " + std::to_string(op.comm->rank) + " to";
    Messages::Put(NameOf(group, kind, group.num_sent[way]++, op.peer),
                  std::string(reinterpret_cast<const char*>(from), bytes));
  } else {
    group.mail[way].emplace_back(from, from + bytes);
  }
  group.changed.notify_all();
  return 0;
}

int RunAll(const std::vector<Op>& ops) {
  int failed = 0;
  const auto run = [&](auto which, auto execute) {
    for (const Op& op : ops) {
      if (failed == 0 && which(op.kind)) {
        failed = execute(op);
      }
    }
  };
  run([](Op::Kind kind) { return kind == Op::kSend; }, RunSend);
  run([](Op::Kind kind) { return kind < Op::kSend; }, RunCollective);
  run([](Op::Kind kind) { return kind == Op::kReceive; }, RunReceive);
  return failed;
}

int Work(ncclComm* comm, const std::function<int()>& work) {
  if (comm->is_stalled || (stalls_all && comm->is_made)) {
    std::unique_lock<std::mutex> lock(comm->group->mutex);
    Await(comm, lock, [] { return false; });
    return kRemoteError;
  }
  return comm->is_revoked ? kInvalidUsage : work();
}

/// Does a communicator's work: here, or on its thread, where it may fail later.
int Submit(ncclComm* comm, std::function<int()> work) {
  if (comm->is_blocking) {
    return Work(comm, work);
  }
  ++comm->num_pending;
  Run(&comm->worker, [comm, work = std::move(work)] {
    if (const int failed = Work(comm, work); failed != 0) {
      comm->async_error = failed;
    }
    --comm->num_pending;
    return 0;
  });
  return kNcclInProgress;
}

int AwaitRanks(ncclComm* comm) {
  Group& group = *comm->group;
  std::unique_lock<std::mutex> lock(group.mutex);
  const auto are_here = [&] {
    for (int rank = 0; Messages::are_there() && rank < static_cast<int>(group.num_ranks); ++rank) {
      if (group.here.count(rank) == 0 && Messages::Get(NameOf(group, "here", 0, rank))) {
        group.here.insert(rank);
      }
    }
    return group.here.size() == group.num_ranks;
  };
  comm->is_made = Await(comm, lock, are_here);
  return comm->is_made ? 0 : kRemoteError;
}

int Flush() {
  std::map<ncclComm*, std::vector<Op>> ops_of;
  for (const Op& op : std::exchange(queue, {})) {
    ops_of[op.comm].push_back(op);
  }
  for (const auto& [comm, ops] : ops_of) {
    Log(std::to_string(comm->rank) + " group of " + std::to_string(ops.size()));
  }
  int result = 0;
  const auto submit = [&](ncclComm* comm, const std::function<int()>& work) {
    const int submitted = Submit(comm, work);
    result = result == 0 || result == kNcclInProgress ? submitted : result;
  };
  for (const auto& [comm, ops] : ops_of) {
    submit(comm, [ops = ops] {
      CUstream_st* const stream = ops[0].stream;
      return Run(stream, [ops, stream] {
        const int failed = RunAll(ops);
        // Who waits for a stream does not learn that NCCL aborted something on it.
        return stream != nullptr && failed == kRemoteError ? 0 : failed;
      });
    });
  }
  const std::vector<ncclComm*> made = std::exchange(begun, {});
  for (ncclComm* const comm : made) {
    submit(comm, [comm] { return AwaitRanks(comm); });
  }
  for (ncclComm* const comm : std::exchange(entered, {})) {
    std::this_thread::sleep_for(std::chrono::milliseconds(comm->linger_ms));
    --comm->num_inside;
  }
  return result;
}

int Put(const char* name, const Op& op) {
  if (op.comm == nullptr || op.count == 0 || depth == 0) {
    return kInvalidArgument;
  }
  Log(std::to_string(op.comm->rank) + " " + name + " " + std::to_string(op.count) + " type " +
      std::to_string(static_cast<int>(op.type)) + " op " + std::to_string(static_cast<int>(op.op)) +
      (op.peer < 0 ? "" : " peer " + std::to_string(op.peer)) + (depth > 0 ? " grouped" : ""));
  Enter(op.comm);
  entered.push_back(op.comm);
  if (op.comm->num_pending > 0) {
    Log("used before the previous call is done");
    return kInvalidArgument;
  }
  queue.push_back(op);
  return 0;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// ---- For tests ----------------------------------------------------------------------------------

/// What NCCL was called with since the last time, a line each.
EXPORT const char* fake_cuda_take_log() {
  thread_local std::string taken;
  const std::lock_guard<std::mutex> lock(log_mutex);
  taken.swap(log_text);
  log_text.clear();
  return taken.c_str();
}

/// The next look at a communicator finds this error.
EXPORT void fake_cuda_set_async_error(ncclComm* comm, int error) { comm->async_error = error; }

/// The same for any communicator.
EXPORT void fake_cuda_set_async_error_of_all(int error) { async_error_of_all = error; }

/// Calls of a communicator are never put on a stream.
EXPORT void fake_cuda_stall(ncclComm* comm) { comm->is_stalled = true; }

/// Whether communicators are non-blocking ones whatever is asked for, as with NCCL_COMM_BLOCKING=0.
EXPORT void fake_cuda_force_non_blocking(bool forces) { forces_non_blocking = forces; }

/// Whether no call of any communicator is put on a stream.
EXPORT void fake_cuda_stall_all(bool stalls) { stalls_all = stalls; }

/// The end of a group takes so long.
EXPORT void fake_cuda_linger(ncclComm* comm, int milliseconds) { comm->linger_ms = milliseconds; }

/// What waits for other ranks to come fails, as when a connection ends.
EXPORT void fake_cuda_lose_ranks() {
  const std::lock_guard<std::mutex> lock(groups_mutex);
  for (const auto& [id, group] : groups) {
    const std::lock_guard<std::mutex> group_lock(group->mutex);
    group->is_aborted = true;
    group->changed.notify_all();
  }
}

EXPORT void fake_cuda_set_nccl_version(int version) { nccl_version = version; }

/// Whether cudaEventRecord waits, as for a stream that is full.
EXPORT void fake_cuda_hold_records(bool holds) { holds_records = holds; }

/// One device is not reached by the others; < 0: none.
EXPORT void fake_cuda_set_far_device(int device) { far_device = device; }

/// Whether what rank 0 writes is not seen by the others, nor what they write by it.
EXPORT void fake_cuda_break_peers(bool breaks) { breaks_peers = breaks; }

/// Whether processes may open what they have exported, which CUDA refuses: threads are processes.
EXPORT void fake_cuda_open_own(bool opens) { opens_own = opens; }

/// Whether memory of other processes is not opened.
EXPORT void fake_cuda_refuse_to_open(bool refuses) { refuses_to_open = refuses; }

/// No more streams are made.
EXPORT void fake_cuda_refuse_streams(bool refuses) { refuses_streams = refuses; }

/// No more matrix products are described.
EXPORT void fake_cuda_refuse_products(bool refuses) { refuses_products = refuses; }

/// Whether ncclCommAbort waits, as for a device that is stuck.
EXPORT void fake_cuda_hold_aborts(bool holds) { holds_aborts = holds; }

// ---- CUDA's runtime -----------------------------------------------------------------------------

EXPORT int cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return 0;
}
EXPORT int cudaDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
EXPORT const char* cudaGetErrorString(int /*error*/) { return "fake CUDA error"; }
EXPORT int cudaGetLastError() { return 0; }
EXPORT int cudaGetDevice(int* device) {
  *device = current_device;
  return 0;
}
EXPORT int cudaSetDevice(int device) {
  current_device = device;
  return 0;
}
EXPORT int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = kGreatestPriority;
  return 0;
}
EXPORT int cudaStreamCreateWithPriority(CUstream_st** stream, unsigned /*flags*/, int priority) {
  if (priority > 0 || priority < kGreatestPriority) {
    return kInvalidArgument;
  }
  if (refuses_streams) {
    return kOutOfMemory;
  }
  *stream = new CUstream_st();  // leaked: its thread uses it
  return 0;
}
EXPORT int cudaStreamSynchronize(CUstream_st* stream) {
  return stream == nullptr ? 0 : stream->Synchronize();
}
EXPORT int cudaStreamQuery(CUstream_st* stream) {
  const std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->work.empty() ? stream->error : kCudaErrorNotReady;
}
EXPORT int cudaMalloc(void** data, std::size_t bytes) {
  *data = DeviceMemory::Get().Allocate(bytes);
  return *data == nullptr ? kOutOfMemory : 0;
}
EXPORT int cudaStreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned /*flags*/) {
  std::uint64_t awaited = 0;
  {
    const std::lock_guard<std::mutex> lock(event->mutex);
    awaited = event->recorded;
  }
  if (awaited == 0) {
    return kInvalidArgument;  // CUDA would not wait at all: a schedule that forgot to record
  }
  return Run(stream, [=] {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return event->pending.count(awaited) == 0; });
    return 0;
  });
}
EXPORT int cudaEventCreateWithFlags(CUevent_st** event, unsigned /*flags*/) {
  *event = Keep(new CUevent_st{});
  return 0;
}
EXPORT int cudaEventRecord(CUevent_st* event, CUstream_st* stream) {
  AwaitRelease(holds_records);
  std::uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(event->mutex);
    number = ++event->recorded;
    event->pending.insert(number);
  }
  return Run(stream, [=] {
    const std::lock_guard<std::mutex> lock(event->mutex);
    event->pending.erase(number);
    event->changed.notify_all();
    return 0;
  });
}
EXPORT int cudaEventQuery(CUevent_st* event) {
  const std::lock_guard<std::mutex> lock(event->mutex);
  return event->pending.count(event->recorded) == 0 ? 0 : kCudaErrorNotReady;
}
EXPORT int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind,
                           CUstream_st* stream) {
  return Run(stream, [=] {
    std::memcpy(to, from, bytes);
    return kind == kMemcpyDeviceToDevice ? 0 : kInvalidArgument;
  });
}
EXPORT int cudaMemsetAsync(void* to, int value, std::size_t bytes, CUstream_st* stream) {
  return Run(stream, [=] {
    std::memset(to, value, bytes);
    return 0;
  });
}

EXPORT int cudaThreadExchangeStreamCaptureMode(int* mode) {
  return *mode == kCaptureModeRelaxed ? 0 : kInvalidArgument;
}
EXPORT int cudaHostAlloc(void** data, std::size_t bytes, unsigned /*flags*/) {
  *data = KeepMemory(bytes);
  return 0;
}
EXPORT int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != far_device && peer != far_device ? 1 : 0;
  return device == peer ? kInvalidArgument : 0;
}
EXPORT int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  Log("device " + std::to_string(current_device) + " reaches " + std::to_string(peer));
  return flags == 0 ? kCudaErrorPeerAccessAlreadyEnabled : kInvalidArgument;
}

EXPORT int cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  const std::vector<int> visible = VisibleDevices();
  const auto at = static_cast<std::size_t>(device);
  if (!visible.empty() && at >= visible.size()) {
    return kInvalidDevice;
  }
  const int bus = kFirstBus + (visible.empty() ? device : visible[at]);
  std::snprintf(text, static_cast<std::size_t>(bytes), "0000:%02X:00.0",
                static_cast<unsigned>(bus));
  return bytes < 13 ? kInvalidArgument : 0;
}
EXPORT int cudaDeviceGetByPCIBusId(int* device, const char* text) {
  const std::vector<int> visible = VisibleDevices();
  const int wanted = std::stoi(std::string(text).substr(5, 2), nullptr, 16) - kFirstBus;
  for (std::size_t i = 0; i < visible.size(); ++i) {
    if (visible[i] == wanted) {
      *device = static_cast<int>(i);
      return 0;
    }
  }
  if (!visible.empty()) {
    return kInvalidDevice;
  }
  *device = wanted;
  return 0;
}
EXPORT int cudaIpcGetMemHandle(IpcHandle* handle, void* memory) {
  return DeviceMemory::Get().Describe(memory, *handle) ? 0 : kInvalidArgument;
}
EXPORT int cudaIpcOpenMemHandle(void** memory, IpcHandle handle, unsigned flags) {
  if (refuses_to_open || flags != kIpcMemLazyEnablePeerAccess) {
    return kInvalidArgument;
  }
  if (DeviceMemory::PidOf(handle) == getpid() && !opens_own) {
    return kUninitialized;
  }
  *memory = DeviceMemory::Map(handle);
  Log("memory of process " + std::to_string(DeviceMemory::PidOf(handle)) + " on device " +
      std::to_string(current_device));
  return *memory == nullptr ? kOutOfMemory : 0;
}

// ---- CUDA's driver, with the kernels that there are ---------------------------------------------

/// A kernel, from a copy of its parameter.
struct CUfunc_st {
  int (*run)(const std::byte* parameter, unsigned num_blocks);
  std::size_t parameter_bytes;
  unsigned num_threads;
  std::string name;
};

namespace {

int RunCheck(const std::byte* parameter, unsigned num_blocks) {
  std::uint32_t* word = nullptr;
  std::memcpy(static_cast<void*>(&word), parameter, sizeof(word));
  return num_blocks != 1 ? kInvalidArgument : std::atomic_ref(*word).load() == 0 ? 0 : kTrapped;
}

/// A block of one thread.
class Team {
 public:
  Team(unsigned block, unsigned num_blocks) : block_(block), num_blocks_(num_blocks) {}

  std::uint32_t thread() const { return 0; }
  std::uint32_t num_threads() const { return 1; }
  std::uint32_t block() const { return block_; }
  std::uint32_t num_blocks() const { return num_blocks_; }
  void Sync() const {}
  bool SyncAll(bool value) const { return value; }
  void Store(std::uint32_t& flag, std::uint32_t value) const { std::atomic_ref(flag).store(value); }
  std::uint32_t Load(const std::uint32_t& flag) const {
    std::this_thread::yield();
    return std::atomic_ref(const_cast<std::uint32_t&>(flag)).load();
  }
  std::uint32_t LoadFailure(const std::uint32_t& word) const { return Load(word); }
  void Trap() { has_trapped_ = true; }
  bool has_trapped() const { return has_trapped_; }

 private:
  bool has_trapped_ = false;
  unsigned block_;
  unsigned num_blocks_;
};

template <typename Element, bool kIsOneShot>
int RunSum(const std::byte* parameter, unsigned num_blocks) {
  PeerCall call;
  std::memcpy(&call, parameter, sizeof(call));
  if (breaks_peers) {
    call.windows[0] = call.windows[call.rank];
  }
  bool has_trapped = false;
  for (unsigned block = 0; block < num_blocks; ++block) {
    Team team(block, num_blocks);
    const PeerSum<Element, Team> sum(call, team);
    if constexpr (kIsOneShot) {
      sum.OneShot();
    } else {
      sum.TwoShot();
    }
    has_trapped = has_trapped || team.has_trapped();
  }
  return has_trapped ? kTrapped : 0;
}

template <bool kSays>
int RunSignal(const std::byte* parameter, unsigned num_blocks) {
  PeerSignal signal;
  std::memcpy(&signal, parameter, sizeof(signal));
  Team team(0, 1);
  if constexpr (kSays) {
    SayFlags(signal, team);
  } else {
    AwaitFlags(signal, team);
  }
  return num_blocks != 1 ? kInvalidArgument : team.has_trapped() ? kTrapped : 0;
}

template <typename Element>
void AddSum(std::map<std::string, CUfunc_st>& kernels, const std::string& name) {
  for (const bool is_one_shot : {true, false}) {
    const std::string whole = (is_one_shot ? "jaxcoll_one_shot_" : "jaxcoll_two_shot_") + name;
    kernels[whole] = {is_one_shot ? &RunSum<Element, true> : &RunSum<Element, false>,
                      sizeof(PeerCall), kPeerThreads, whole};
  }
}

std::map<std::string, CUfunc_st>& Kernels() {
  static auto* const kernels = [] {
    auto* const all = new std::map<std::string, CUfunc_st>();
    (*all)["jaxcoll_check"] = {&RunCheck, sizeof(void*), 1, ""};
    for (const bool says : {true, false}) {
      const std::string name = says ? "jaxcoll_say" : "jaxcoll_await";
      (*all)[name] = {says ? &RunSignal<true> : &RunSignal<false>, sizeof(PeerSignal),
                      PeerSignal::kMostFlags, name};
    }
    AddSum<PlainElement<std::uint8_t>>(*all, "i8");
    AddSum<PlainElement<std::uint32_t>>(*all, "i32");
    AddSum<PlainElement<std::uint64_t>>(*all, "i64");
    AddSum<F16Element>(*all, "f16");
    AddSum<BF16Element>(*all, "bf16");
    AddSum<PlainElement<float>>(*all, "f32");
    AddSum<PlainElement<double>>(*all, "f64");
    return all;
  }();
  return *kernels;
}

}  // namespace

EXPORT int cuModuleLoadData(CUmod_st** module, const void* image) {
  *module = nullptr;
  return image != nullptr ? 0 : kInvalidArgument;
}
EXPORT int cuModuleGetFunction(CUfunc_st** function, CUmod_st* /*module*/, const char* name) {
  const auto found = Kernels().find(name);
  *function = found == Kernels().end() ? nullptr : &found->second;
  return *function == nullptr ? kInvalidArgument : 0;
}
EXPORT int cuLaunchKernel(CUfunc_st* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned /*shared_bytes*/, CUstream_st* stream, void** parameters,
                          void** /*extra*/) {
  if (grid_y * grid_z * block_y * block_z != 1 || block_x != function->num_threads) {
    return kInvalidArgument;
  }
  if (!function->name.empty()) {
    Log("kernel " + function->name);
  }
  const auto* const parameter = static_cast<const std::byte*>(parameters[0]);
  return Run(stream, [copy = Bytes(parameter, parameter + function->parameter_bytes), function,
                      grid_x] { return function->run(copy.data(), grid_x); });
}

// ---- NCCL ---------------------------------------------------------------------------------------

EXPORT int ncclGetVersion(int* version) {
  *version = nccl_version;
  return 0;
}
EXPORT const char* ncclGetErrorString(int /*result*/) { return "fake NCCL error"; }
EXPORT const char* ncclGetLastError(ncclComm* /*comm*/) { return ""; }
EXPORT int ncclGetUniqueId(NcclId* id) {
  const std::lock_guard<std::mutex> lock(groups_mutex);
  id->bytes.fill(0);
  const std::string text = std::to_string(getpid()) + "-" + std::to_string(++num_ids);
  std::copy_n(text.begin(), text.size(), id->bytes.begin());
  Log("get_unique_id");
  return 0;
}
EXPORT int ncclCommInitRankConfig(ncclComm** comm, int num_ranks, NcclId id, int rank,
                                  const NcclConfig* config) {
  if (config->size != 48 || config->magic != 0xcafebeef || config->version != 21800 ||
      (config->blocking != 0 && nccl_version < kFirstThatRevokes) ||
      config->max_ctas != NcclConfig::kUndefined || depth == 0) {
    return kInvalidArgument;
  }
  const std::lock_guard<std::mutex> lock(groups_mutex);
  std::shared_ptr<Group>& group = groups[std::string(id.bytes.data())];
  if (group == nullptr) {
    group = std::make_shared<Group>();
    group->id = id.bytes.data();
    group->num_ranks = static_cast<std::size_t>(num_ranks);
  }
  *comm = Keep(new ncclComm(group, rank));
  (*comm)->is_blocking = config->blocking != 0 && !forces_non_blocking;
  begun.push_back(*comm);
  Enter(*comm);
  entered.push_back(*comm);
  Log("init rank " + std::to_string(rank) + " of " + std::to_string(num_ranks) + " on device " +
      std::to_string(current_device) + (depth > 0 ? " grouped" : "") +
      (config->blocking != 0 ? " blocking" : ""));
  const std::lock_guard<std::mutex> group_lock(group->mutex);
  ++group->num_local;
  group->here.insert(rank);
  if (Messages::are_there()) {
    Messages::Put(NameOf(*group, "here", 0, rank), "");
  }
  group->changed.notify_all();
  return 0;
}
EXPORT int ncclCommAbort(ncclComm* comm) {
  Log("abort rank " + std::to_string(comm->rank) +
      (comm->num_inside > 0 ? " while a thread is inside" : ""));
  comm->is_aborted = true;
  AwaitRelease(holds_aborts);
  {
    const std::lock_guard<std::mutex> lock(comm->group->mutex);
    comm->group->is_aborted = true;
    comm->group->changed.notify_all();
  }
  return comm->worker.Synchronize();
}
EXPORT int ncclCommRevoke(ncclComm* comm, int flags) {
  Log("revoke rank " + std::to_string(comm->rank) + (comm->is_made ? "" : " too early"));
  if (flags != kNcclRevokeDefault || comm->is_aborted || comm->is_revoked.exchange(true)) {
    return kInvalidArgument;
  }
  const std::lock_guard<std::mutex> lock(comm->group->mutex);
  comm->group->changed.notify_all();
  return 0;
}
EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* error) {
  Enter(comm);
  const int failed = async_error_of_all != 0 ? async_error_of_all.load() : comm->async_error.load();
  *error = failed == 0 && comm->num_pending > 0 ? kNcclInProgress : failed;
  --comm->num_inside;
  return 0;
}
EXPORT int ncclGroupStart() {
  ++depth;
  return 0;
}
EXPORT int ncclGroupEnd() { return --depth > 0 ? 0 : Flush(); }
EXPORT int ncclAllReduce(const void* from, void* to, std::size_t count, NcclType type, NcclOp op,
                         ncclComm* comm, CUstream_st* stream) {
  return Put("all_reduce", {Op::kAllReduce, from, to, count, type, op, -1, comm, stream});
}
EXPORT int ncclBroadcast(const void* from, void* to, std::size_t count, NcclType type, int root,
                         ncclComm* comm, CUstream_st* stream) {
  return Put("broadcast",
             {Op::kBroadcast, from, to, count, type, NcclOp::kSum, root, comm, stream});
}
EXPORT int ncclReduceScatter(const void* from, void* to, std::size_t count, NcclType type,
                             NcclOp op, ncclComm* comm, CUstream_st* stream) {
  return Put("reduce_scatter", {Op::kReduceScatter, from, to, count, type, op, -1, comm, stream});
}
EXPORT int ncclAllGather(const void* from, void* to, std::size_t count, NcclType type,
                         ncclComm* comm, CUstream_st* stream) {
  return Put("all_gather", {Op::kAllGather, from, to, count, type, NcclOp::kSum, -1, comm, stream});
}
EXPORT int ncclSend(const void* from, std::size_t count, NcclType type, int peer, ncclComm* comm,
                    CUstream_st* stream) {
  return Put("send", {Op::kSend, from, nullptr, count, type, NcclOp::kSum, peer, comm, stream});
}
EXPORT int ncclRecv(void* to, std::size_t count, NcclType type, int peer, ncclComm* comm,
                    CUstream_st* stream) {
  return Put("receive", {Op::kReceive, nullptr, to, count, type, NcclOp::kSum, peer, comm, stream});
}

// ---- cuBLASLt -----------------------------------------------------------------------------------

namespace {

struct Description {
  BlasCompute compute;
  BlasType scale;
  BlasOp a = BlasOp::kN;
  BlasOp b = BlasOp::kN;
};
struct Layout {
  BlasType type;
  std::uint64_t rows;
  std::uint64_t columns;
  std::int64_t leading;
  std::int32_t batch = 1;
  std::int64_t stride = 0;
};

std::size_t BytesOf(BlasType type) {
  return type == BlasType::kF64 ? 8 : type == BlasType::kF32 ? 4 : 2;
}

double Load(const void* data, std::int64_t at, BlasType type) {
  const auto* const from =
      static_cast<const std::byte*>(data) + static_cast<std::size_t>(at) * BytesOf(type);
  if (type == BlasType::kF64) {
    return *reinterpret_cast<const double*>(from);
  }
  if (type == BlasType::kF32) {
    return static_cast<double>(*reinterpret_cast<const float*>(from));
  }
  const std::uint16_t bits = *reinterpret_cast<const std::uint16_t*>(from);
  return static_cast<double>(type == BlasType::kBF16 ? FromBf16(bits) : FromHalf(bits));
}

void Store(void* data, std::int64_t at, BlasType type, double value) {
  auto* const to = static_cast<std::byte*>(data) + static_cast<std::size_t>(at) * BytesOf(type);
  if (type == BlasType::kF64) {
    *reinterpret_cast<double*>(to) = value;
  } else if (type == BlasType::kF32) {
    *reinterpret_cast<float*>(to) = static_cast<float>(value);
  } else {
    const auto narrow = static_cast<float>(value);
    *reinterpret_cast<std::uint16_t*>(to) =
        type == BlasType::kBF16 ? ToBf16(narrow) : ToHalf(narrow);
  }
}

// Dimensions of op(A) (m, k), op(B) (k, n) and D (m, n) fit each other, and so do batches.
bool Fit(const Description& description, const Layout& a, const Layout& b, const Layout& c,
         const Layout& d) {
  const bool a_is_turned = description.a == BlasOp::kT;
  const bool b_is_turned = description.b == BlasOp::kT;
  const auto leads = [](const Layout& x) {
    return x.leading >= static_cast<std::int64_t>(x.rows) && x.batch == 1;
  };
  const bool have_batches = a.batch == b.batch && a.batch == d.batch && c.batch == d.batch;
  return (a_is_turned ? a.columns : a.rows) == d.rows &&
         (b_is_turned ? b.rows : b.columns) == d.columns &&
         (a_is_turned ? a.rows : a.columns) == (b_is_turned ? b.columns : b.rows) &&
         c.rows == d.rows && c.columns == d.columns && c.type == d.type && have_batches &&
         (a.batch > 1 || (leads(a) && leads(b) && leads(c) && leads(d)));
}

}  // namespace

EXPORT std::size_t cublasLtGetVersion() { return 130200; }
EXPORT int cublasLtCreate(void** handle) {
  *handle = Keep(new int(0));
  Log("blas handle");
  return 0;
}
EXPORT int cublasLtMatmulDescCreate(void** description, BlasCompute compute, BlasType scale) {
  if (refuses_products) {
    return kInvalidArgument;
  }
  *description = new Description{compute, scale};
  return 0;
}
EXPORT int cublasLtMatmulDescSetAttribute(void* description, BlasDescription attribute,
                                          const void* value, std::size_t bytes) {
  auto& of = *static_cast<Description*>(description);
  std::memcpy(attribute == BlasDescription::kTransA ? &of.a : &of.b, value, bytes);
  return bytes == sizeof(BlasOp) ? 0 : kInvalidArgument;
}
EXPORT int cublasLtMatmulDescDestroy(void* description) {
  delete static_cast<Description*>(description);
  return 0;
}
EXPORT int cublasLtMatrixLayoutCreate(void** layout, BlasType type, std::uint64_t rows,
                                      std::uint64_t columns, std::int64_t leading) {
  *layout = new Layout{type, rows, columns, leading};
  return 0;
}
EXPORT int cublasLtMatrixLayoutSetAttribute(void* layout, BlasLayout attribute, const void* value,
                                            std::size_t bytes) {
  auto& of = *static_cast<Layout*>(layout);
  const bool is_count = attribute == BlasLayout::kBatchCount;
  if (bytes != (is_count ? sizeof(of.batch) : sizeof(of.stride))) {
    return kInvalidArgument;
  }
  std::memcpy(is_count ? static_cast<void*>(&of.batch) : &of.stride, value, bytes);
  return 0;
}
EXPORT int cublasLtMatrixLayoutDestroy(void* layout) {
  delete static_cast<Layout*>(layout);
  return 0;
}
EXPORT int cublasLtMatmulPreferenceCreate(void** preference) {
  *preference = new std::uint64_t(0);
  return 0;
}
EXPORT int cublasLtMatmulPreferenceSetAttribute(void* /*preference*/, BlasPreference attribute,
                                                const void* /*value*/, std::size_t bytes) {
  const bool is_workspace = attribute == BlasPreference::kMaxWorkspaceBytes;
  return bytes == (is_workspace ? sizeof(std::uint64_t) : sizeof(std::uint32_t)) ? 0
                                                                                 : kInvalidArgument;
}
EXPORT int cublasLtMatmulPreferenceDestroy(void* preference) {
  delete static_cast<std::uint64_t*>(preference);
  return 0;
}
EXPORT int cublasLtMatmulAlgoGetHeuristic(void* /*handle*/, void* description, void* a, void* b,
                                          void* c, void* d, void* /*preference*/, int requested,
                                          BlasHeuristic* results, int* returned) {
  const bool fit =
      Fit(*static_cast<Description*>(description), *static_cast<Layout*>(a),
          *static_cast<Layout*>(b), *static_cast<Layout*>(c), *static_cast<Layout*>(d));
  *returned = fit && requested > 0 ? 1 : 0;
  results[0] = {};
  return fit ? 0 : kInvalidArgument;
}
EXPORT int cublasLtMatmul(void* /*handle*/, void* description, const void* alpha, const void* a,
                          void* layout_a, const void* b, void* layout_b, const void* beta,
                          const void* c, void* layout_c, void* d, void* layout_d,
                          const BlasAlgorithm* /*algorithm*/, void* /*workspace*/,
                          std::size_t /*workspace_bytes*/, CUstream_st* stream) {
  const auto of = *static_cast<Description*>(description);
  const auto la = *static_cast<Layout*>(layout_a);
  const auto lb = *static_cast<Layout*>(layout_b);
  const auto lc = *static_cast<Layout*>(layout_c);
  const auto ld = *static_cast<Layout*>(layout_d);
  if (!Fit(of, la, lb, lc, ld)) {
    return kInvalidArgument;
  }
  const double scale = Load(alpha, 0, of.scale);
  const double keep = Load(beta, 0, of.scale);
  return Run(stream, [=] {
    const std::uint64_t inner = of.a == BlasOp::kT ? la.rows : la.columns;
    const auto at = [](const Layout& x, std::int64_t batch, std::uint64_t row,
                       std::uint64_t column) {
      return batch * x.stride + static_cast<std::int64_t>(row) +
             static_cast<std::int64_t>(column) * x.leading;
    };
    for (std::int64_t batch = 0; batch < ld.batch; ++batch) {
      for (std::uint64_t i = 0; i < ld.rows; ++i) {
        for (std::uint64_t j = 0; j < ld.columns; ++j) {
          double total = 0;
          for (std::uint64_t k = 0; k < inner; ++k) {
            const double x = of.a == BlasOp::kT ? Load(a, at(la, batch, k, i), la.type)
                                                : Load(a, at(la, batch, i, k), la.type);
            const double y = of.b == BlasOp::kT ? Load(b, at(lb, batch, j, k), lb.type)
                                                : Load(b, at(lb, batch, k, j), lb.type);
            total += x * y;
          }
          const double old = keep == 0 ? 0 : Load(c, at(lc, batch, i, j), lc.type);
          Store(d, at(ld, batch, i, j), ld.type, scale * total + keep * old);
        }
      }
    }
    return 0;
  });
}
// NOLINTEND(readability-identifier-naming)

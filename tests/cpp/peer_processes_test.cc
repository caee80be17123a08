// tests/cpp/peer_processes_test.cc: small sums and blocks over peer memory between processes, on
// the CUDA runtime and NCCL of fake_cuda.cc. Threads are the processes, each with cliques of its
// own.
#include <dlfcn.h>  // dlopen, dlsym

#include <algorithm>           // std::copy
#include <array>               // std::array
#include <atomic>              // std::atomic
#include <chrono>              // std::chrono
#include <condition_variable>  // std::condition_variable
#include <cstddef>             // std::byte, std::size_t
#include <cstdint>             // std::int32_t, std::int64_t
#include <functional>          // std::function
#include <map>                 // std::map
#include <memory>              // std::make_unique, std::unique_ptr
#include <mutex>               // std::mutex
#include <numeric>             // std::iota
#include <set>                 // std::set
#include <span>                // std::span
#include <string>              // std::string, std::to_string
#include <thread>              // std::thread
#include <utility>             // std::move, std::pair
#include <vector>              // std::vector

#include "core/clock.h"
#include "cuda/clique.h"
#include "cuda/collectives.h"
#include "cuda/libraries.h"
#include "cuda/peer_memory.h"
#include "cuda/ring_matmul.h"
#include "testing.h"

namespace jaxcoll::testing::peer_processes_test {
namespace {

using namespace jaxcoll::cuda;

constexpr std::int64_t kFirstId = 40;
constexpr std::int64_t kLong = 20'000'000'000;
constexpr const char* kImage = "an image";

template <typename Function>
Function OfFake(const char* name) {
  return reinterpret_cast<Function>(dlsym(dlopen(FAKE_CUDA, RTLD_NOW), name));
}

std::string TakeLog() { return OfFake<const char* (*)()>("fake_cuda_take_log")(); }

std::size_t Lines(const std::string& log, const std::string& what) {
  std::size_t count = 0;
  for (std::size_t at = log.find(what); at != std::string::npos; at = log.find(what, at + 1)) {
    ++count;
  }
  return count;
}

LibraryPaths FakePaths() {
  return {.runtime = {FAKE_CUDA}, .driver = {FAKE_CUDA}, .nccl = {FAKE_CUDA}, .blas = {FAKE_CUDA}};
}

const Libraries& OpenLibraries() {
  static const auto* const libraries = [] {
    auto* const opened = new Libraries();
    if (const Status status = opened->Open(FakePaths()); !status.ok()) {
      std::printf("%s\n", status.message.c_str());
      std::abort();
    }
    OfFake<void (*)(bool)>("fake_cuda_open_own")(true);
    return opened;
  }();
  return *libraries;
}

// ---- Processes ----------------------------------------------------------------------------------

/// What the key-value store does for the processes of a job.
struct Store {
  std::mutex mutex;  // guards the following
  std::condition_variable changed;
  std::map<std::int64_t, std::map<std::size_t, std::vector<std::byte>>> rows;  // by round, process
  std::set<std::int64_t> stays_away_from;  // rounds, of the last process
  std::chrono::milliseconds patience{20'000};
};

Store* store = nullptr;
thread_local std::size_t process = 0;
std::size_t num_processes = 0;

std::string Exchange(const std::vector<std::int64_t>& /*devices*/, std::int64_t /*generation*/,
                     std::int64_t round, std::span<std::byte> rows) {
  const std::size_t size = rows.size() / num_processes;
  std::unique_lock<std::mutex> lock(store->mutex);
  if (process + 1 == num_processes && store->stays_away_from.count(round) != 0) {
    return "I am away";
  }
  auto& all = store->rows[round];
  const auto own = rows.subspan(process * size, size);
  all[process] = {own.begin(), own.end()};
  store->changed.notify_all();
  store->changed.wait_for(lock, store->patience, [&] { return all.size() == num_processes; });
  for (std::size_t other = 0; other < num_processes; ++other) {
    if (all.count(other) == 0) {
      return "process " + std::to_string(other) + " has not come to round " + std::to_string(round);
    }
    std::copy(all[other].begin(), all[other].end(), rows.subspan(other * size).begin());
  }
  return "";
}

std::mutex notices_mutex;
std::vector<std::string> notices;

struct Options {
  std::size_t devices = 1;  ///< of each process
  bool do_share = false;    ///< the same device, each process's first
  std::int64_t timeout_ns = kLong;
  std::function<void(Surroundings&)> change = [](Surroundings&) {};  ///< in each process
};

/// As the engine's threads.
void Abort(Clique& clique) {
  for (std::size_t at = 0; at < clique.num_local(); ++at) {
    while (!clique.TryAbort(at)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

/// A job of some processes, and what they have: a clique each.
class Job {
 public:
  Job(std::size_t processes, const Options& options) : options_(options) {
    num_processes = processes;
    store = &store_;
    notices.clear();
    ids_.resize(processes * options.devices);
    std::iota(ids_.begin(), ids_.end(), kFirstId);
    cliques_.resize(processes);
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  /// Ends what is under way.
  ~Job() {
    for (const auto& clique : cliques_) {
      clique->Fail(Internal("the end"), /*is_orderly=*/true);
      Abort(*clique);
    }
  }

  [[nodiscard]] std::size_t num_ranks() const { return ids_.size(); }
  [[nodiscard]] int OrdinalOf(std::size_t rank) const {
    return static_cast<int>(options_.do_share ? rank % options_.devices : rank);
  }
  [[nodiscard]] Clique& CliqueOf(std::size_t rank) { return *cliques_[rank / options_.devices]; }
  [[nodiscard]] Store& of_store() { return store_; }

  /// A thread for each rank; its process is set.
  std::vector<Status> OnRanks(const std::function<Status(std::size_t rank)>& run) {
    std::vector<Status> statuses(num_ranks());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < num_ranks(); ++rank) {
      threads.emplace_back([&, rank] {
        process = rank / options_.devices;
        OpenLibraries().runtime.set_device(OrdinalOf(rank));
        statuses[rank] = run(rank);
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    return statuses;
  }

  std::vector<Status> Join() {
    for (process = 0; process < num_processes; ++process) {
      Surroundings surroundings{
          .libraries = &OpenLibraries(),
          .exchange = &Exchange,
          .notice =
              [](const std::string& text) {
                const std::lock_guard<std::mutex> lock(notices_mutex);
                notices.push_back(text);
              },
          .site_text = [](std::uint64_t site) { return "site " + std::to_string(site); },
          .start =
              [](std::function<void()> work) {
                std::thread(std::move(work)).detach();
                return true;
              },
          .peer_image = kImage,
          .host = 1};
      options_.change(surroundings);
      std::vector<Clique::LocalDevice> local;
      for (std::size_t i = 0; i < options_.devices; ++i) {
        const std::size_t rank = process * options_.devices + i;
        local.push_back({.id = ids_[rank], .ordinal = OrdinalOf(rank)});
      }
      cliques_[process] = std::make_shared<Clique>(surroundings, ids_, local, 0);
    }
    return OnRanks([&](std::size_t rank) {
      return CliqueOf(rank).Join(
          OrdinalOf(rank), nullptr,
          {.timeout_ns = options_.timeout_ns, .first_timeout_ns = options_.timeout_ns});
    });
  }

 private:
  const Options options_;
  Store store_;
  std::vector<std::int64_t> ids_;
  std::vector<std::shared_ptr<Clique>> cliques_;
};

bool AllSucceed(Context& context, const std::vector<Status>& statuses) {
  bool ok = true;
  for (const Status& status : statuses) {
    ok = context.Expect(status.ok(), [&] { return status.message; }) && ok;
  }
  return ok;
}

void ExpectPart(Context& context, const std::string& text, const std::string& part) {
  context.Expect(text.find(part) != std::string::npos, text);
}

void ExpectInAll(Context& context, const std::vector<Status>& statuses, const std::string& part) {
  for (const Status& status : statuses) {
    ExpectPart(context, status.message, part);
  }
}

/// A small sum of `count` numbers on all ranks, which must be right.
void Sum(Context& context, Job& job, std::size_t count) {
  const Reduction ints{.type = NcclType::kI32, .op = NcclOp::kSum, .parts = 1};
  const AllReduce sum({{.reduction = ints, .count = count, .bytes = 4 * count}},
                      /*is_small_sum=*/true);
  std::vector<std::vector<std::int32_t>> numbers(job.num_ranks());
  AllSucceed(context, job.OnRanks([&](std::size_t rank) {
    std::vector<std::int32_t>& own = numbers[rank];
    for (std::size_t i = 0; i < count; ++i) {
      own.push_back(static_cast<std::int32_t>(rank * 1000 + i));
    }
    const int ordinal = job.OrdinalOf(rank);
    const Seat& seat = job.CliqueOf(rank).SeatOf(ordinal);
    const void* from = own.data();
    void* to = own.data();
    Status status = sum.Enqueue(OpenLibraries(), seat, seat.side_stream, {&from, 1}, {&to, 1});
    OpenLibraries().runtime.stream_synchronize(seat.side_stream);
    return status;
  }));
  const std::size_t p = job.num_ranks();
  for (const auto& own : numbers) {
    for (std::size_t i = 0; i < count; ++i) {
      context.Expect(own[i] == static_cast<std::int32_t>(p * (p - 1) / 2 * 1000 + p * i), "a sum");
    }
  }
}

// ---- Tests --------------------------------------------------------------------------------------

void SumsGoOverTheMemoryOfOtherProcesses(Context& context) {
  for (const bool do_share : {false, true}) {
    for (const auto& [processes, devices] :
         {std::pair<std::size_t, std::size_t>{2, 1}, {4, 1}, {2, 2}}) {
      TakeLog();
      Job job(processes, {.devices = devices, .do_share = do_share});
      if (!AllSucceed(context, job.Join())) {
        return;
      }
      const std::size_t p = job.num_ranks();
      const std::string log = TakeLog();
      context.Expect(Lines(log, "memory of process") == p * (p - devices), log);
      for (const std::size_t count : {3U, 20'000U, 65'536U, 5U}) {
        Sum(context, job, count);
      }
      const std::string sums = TakeLog();
      context.Expect(Lines(sums, "kernel jaxcoll_one_shot_i32") == 2 * p &&
                         Lines(sums, "kernel jaxcoll_two_shot_i32") == 2 * p &&
                         Lines(sums, "all_reduce") == 0,
                     sums);
      context.Expect(job.CliqueOf(0).peer_problem().empty() && notices.empty(), "no problem");
    }
  }
}

/// All ranks know that `reason`, and NCCL sums.
void ExpectNccl(Context& context, Job& job, const std::string& reason, std::size_t num_notices,
                bool blocks = true) {
  TakeLog();
  if (!AllSucceed(context, job.Join())) {
    return;
  }
  const std::string made = TakeLog();
  const bool can_revoke = OpenLibraries().can_revoke();
  context.Expect(Lines(made, "blocking") == (blocks && can_revoke ? job.num_ranks() : 0), made);
  Sum(context, job, 3);
  const std::string log = TakeLog();
  context.Expect(Lines(log, "all_reduce") == job.num_ranks() && Lines(log, "kernel") == 0, log);
  for (std::size_t rank = 0; rank < job.num_ranks(); ++rank) {
    ExpectPart(context, job.CliqueOf(rank).peer_problem(), reason);
  }
  context.Expect(notices.size() == num_notices, "who did not expect it says so");
  for (const std::string& notice : notices) {
    context.Expect(notice.starts_with("small sums of devices 40, 41 are NCCL's: ") &&
                       notice.find(reason) != std::string::npos,
                   notice);
  }
}

/// What fails in one process, and how.
struct Broken {
  const char* error;
  void (*breaks)(Libraries& of);
};
constexpr std::array kBroken{
    Broken{"cudaMalloc: fake CUDA error",
           [](Libraries& of) {
             of.runtime.malloc = [](void** data, std::size_t bytes) {
               const bool is_window = bytes > sizeof(std::int32_t);
               return is_window ? 2 : OpenLibraries().runtime.malloc(data, bytes);
             };
           }},
    Broken{"cudaMemsetAsync: fake CUDA error",
           [](Libraries& of) { of.runtime.memset_async = [](auto...) { return 1; }; }},
    Broken{"cudaDeviceGetPCIBusId: fake CUDA error",
           [](Libraries& of) { of.ipc.device_get_pci_bus_id = [](auto...) { return 1; }; }},
    Broken{"cudaIpcGetMemHandle: fake CUDA error",
           [](Libraries& of) { of.ipc.get_mem_handle = [](auto...) { return 1; }; }},
    Broken{"cudaDeviceCanAccessPeer: fake CUDA error",
           [](Libraries& of) { of.runtime.device_can_access_peer = [](auto...) { return 1; }; }},
    Broken{"cudaIpcOpenMemHandle: fake CUDA error",
           [](Libraries& of) { of.ipc.open_mem_handle = [](auto...) { return 1; }; }},
    Broken{"cuModuleGetFunction: CUDA error",
           [](Libraries& of) {
             of.driver.module_get_function = [](Function* function, Module module,
                                                const char* name) {
               const bool is_check = std::string(name) == "jaxcoll_check";
               return is_check ? OpenLibraries().driver.module_get_function(function, module, name)
                               : 1;
             };
           }},
};

void WhatOneCannotDoNobodyDoes(Context& context) {
  const Libraries& libraries = OpenLibraries();
  for (const auto& [error, breaks] : kBroken) {
    Libraries broken = libraries;
    breaks(broken);
    Job job(2, {.change = [&](Surroundings& of) {
              of.libraries = process == 1 ? &broken : &libraries;
            }});
    ExpectNccl(context, job, "rank 1", 2);
    ExpectPart(context, job.CliqueOf(0).peer_problem(), error);
  }
  {
    Job job(2, {.change = [](Surroundings& of) { of.host = process; }});
    ExpectNccl(context, job, "the group is on several hosts", 0, /*blocks=*/false);
  }
  OfFake<void (*)(int)>("fake_cuda_set_far_device")(1);
  {
    Job job(2, {});
    ExpectNccl(context, job, "rank 0: can't reach the memory of rank 1: CUDA says", 2);
  }
  {
    Job job(2, {.do_share = true});  // its one device is reached
    AllSucceed(context, job.Join());
    context.Expect(job.CliqueOf(0).peer_problem().empty(), job.CliqueOf(0).peer_problem());
  }
  OfFake<void (*)(int)>("fake_cuda_set_far_device")(-1);
}

void WhatTheRuntimeLacksTurnsItOff(Context& context) {
  const Libraries& libraries = OpenLibraries();
  Libraries without = libraries;
  without.ipc_problem = "cudaIpcOpenMemHandle is missing";
  context.Expect(PeerMemory::Problem(without, kImage, {0}, 2) ==
                     "CUDA's runtime can't share memory between processes (cudaIpcOpenMemHandle is "
                     "missing)",
                 PeerMemory::Problem(without, kImage, {0}, 2));
  context.Expect(PeerMemory::Problem(without, kImage, {0, 1}, 2).empty(), "in one process");
  Job job(2, {.change = [&](Surroundings& of) {
            of.libraries = process == 0 ? &without : &libraries;
          }});
  ExpectNccl(context, job, "rank 0: CUDA's runtime can't share memory", 1);
}

void TheProbeIsOfAllProcesses(Context& context) {
  const auto breaks = OfFake<void (*)(bool)>("fake_cuda_break_peers");
  breaks(true);
  Job job(2, {.timeout_ns = 300'000'000});
  const auto begun = std::chrono::steady_clock::now();
  ExpectInAll(context, job.Join(),
              "devices 40, 41: the probe of peer memory has not ended (JAXCOLL_CUDA_PEERS=0");
  context.Expect(std::chrono::steady_clock::now() - begun < std::chrono::seconds(5),
                 "it takes too long");
  breaks(false);
}

/// In whichever round: nobody goes on without it, nor waits for it for ever.
void WhoStaysAwayIsNamed(Context& context) {
  for (const std::int64_t round : {0, 1, 2, 3}) {
    Job job(3, {.timeout_ns = 2'000'000'000});
    job.of_store().stays_away_from = {round};
    job.of_store().patience = std::chrono::milliseconds(200);
    const std::vector<Status> statuses = job.Join();
    const std::string expected =
        "no communicator of devices 40, 41, 42: process 2 has not come "
        "to round " +
        std::to_string(round);
    ExpectInAll(context, {statuses[0], statuses[1]}, expected);
    context.Expect(job.CliqueOf(0).SeatOf(0).peers == nullptr, "no sums over it");
  }
}

/// A rank whose process has ended: the kernels of the others end, and what waits for them fails.
void WhoDiesInASumIsNoticed(Context& context) {
  Job job(3, {});
  if (!AllSucceed(context, job.Join())) {
    return;
  }
  const Libraries& libraries = OpenLibraries();
  const Reduction ints{.type = NcclType::kI32, .op = NcclOp::kSum, .parts = 1};
  const AllReduce sum({{.reduction = ints, .count = 2, .bytes = 8}}, /*is_small_sum=*/true);
  std::vector<std::array<std::int32_t, 2>> numbers(3);
  std::array<int, 3> errors{};
  AllSucceed(context, job.OnRanks([&](std::size_t rank) {
    if (rank == 2) {
      return Status{};
    }
    Clique& clique = job.CliqueOf(rank);
    const int ordinal = job.OrdinalOf(rank);
    Stream stream = nullptr;
    libraries.runtime.stream_create_with_priority(&stream, kStreamNonBlocking, 0);
    Status status = clique.Run(ordinal, stream, 7, /*is_first=*/false,
                               !sum.traps(clique.SeatOf(ordinal)), {}, [&](const Seat& seat) {
                                 const void* from = numbers[rank].data();
                                 void* to = numbers[rank].data();
                                 return sum.Enqueue(libraries, seat, stream, {&from, 1}, {&to, 1});
                               });
    // As the engine's watch.
    Limits limits{.timeout_ns = 200'000'000, .first_timeout_ns = 200'000'000};
    if (rank == 1) {
      limits.absent = [](const std::vector<std::int64_t>& devices, std::uint64_t /*group*/,
                         std::uint64_t /*site*/, std::int64_t /*execution*/) {
        return "rank 2 of " + std::to_string(devices.size()) + "\n  rank 2: no call";
      };
    }
    while (!clique.Look(NowNs(), limits)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    Abort(clique);
    errors.at(rank) = libraries.runtime.stream_synchronize(stream);
    return status;
  }));
  context.Expect(errors[0] != 0 && errors[1] != 0, "what waits for the streams gets an error");
  ExpectInAll(context, {job.CliqueOf(0).Failure()},
              "site 7: waited 0.2 s for other processes, devices 41, 42");
  ExpectInAll(context, {job.CliqueOf(1).Failure()},
              "site 7: waited 0.2 s for rank 2 of 3; arrived: 1 (device 41)\n  rank 2: no call");
}

// ---- Blocks -------------------------------------------------------------------------------------

/// Slots for so many bytes, on each rank that can.
std::vector<Status> OpenBlocks(Job& job, std::size_t bytes, std::vector<BlockSeat*>& seats) {
  seats.assign(job.num_ranks(), nullptr);
  return job.OnRanks([&](std::size_t rank) {
    return job.CliqueOf(rank).OpenBlocks(job.OrdinalOf(rank), nullptr, bytes,
                                         {.timeout_ns = kLong, .first_timeout_ns = kLong},
                                         seats[rank]);
  });
}

void BlocksGoToTheMemoryOfOtherProcesses(Context& context) {
  const Libraries& libraries = OpenLibraries();
  for (const bool do_share : {false, true}) {
    for (const auto& [processes, devices] :
         {std::pair<std::size_t, std::size_t>{2, 1}, {4, 1}, {2, 2}}) {
      Job job(processes, {.devices = devices, .do_share = do_share});
      std::vector<BlockSeat*> seats;
      if (!AllSucceed(context, job.Join()) || !AllSucceed(context, OpenBlocks(job, 1000, seats))) {
        return;
      }
      const std::size_t p = job.num_ranks();
      std::vector<std::array<std::size_t, 2>> got(p);
      AllSucceed(context, job.OnRanks([&](std::size_t rank) {
        BlockSeat& seat = *seats[rank];
        const Stream stream = job.CliqueOf(rank).SeatOf(job.OrdinalOf(rank)).side_stream;
        const std::array<std::size_t, 2> numbers{rank, 100 + rank};
        Status status;
        const auto then = [&](const auto& put) { status = status.ok() ? put() : status; };
        for (std::size_t call = 0; call < 2; ++call) {
          const std::size_t& number = numbers.at(call);
          then([&] { return seat.Begin(libraries, stream); });
          then([&] { return seat.AwaitRoom(libraries, stream); });
          then([&] {
            return seat.Send(libraries, stream, &number, sizeof(number), (rank + 1) % p, 8, 1);
          });
          then([&] { return seat.AwaitArrival(libraries, stream, 1); });
          libraries.runtime.memcpy_async(&got[rank].at(call), seat.slots() + 8, sizeof(number),
                                         kMemcpyDeviceToDevice, stream);
          then([&] { return seat.End(libraries, stream); });
        }
        libraries.runtime.stream_synchronize(stream);
        return status;
      }));
      for (std::size_t rank = 0; rank < p; ++rank) {
        const std::size_t before = (rank + p - 1) % p;
        context.Expect(got[rank] == std::array{before, 100 + before}, "what has come");
      }
      context.Expect(notices.empty(), "no problem");
    }
  }
}

/// One fails early, which is to pass on a block that never comes: nobody takes another one for it.
void WhoHasFailedPassesNothingOn(Context& context) {
  constexpr std::size_t kRanks = 4;
  const Libraries& libraries = OpenLibraries();
  Job job(kRanks, {});
  std::vector<BlockSeat*> seats;
  if (!AllSucceed(context, job.Join()) || !AllSucceed(context, OpenBlocks(job, 16, seats))) {
    return;
  }
  struct Buffers {
    std::array<float, 4> x{1, 1, 1, 1}, w{1, 1, 1, 1}, y{};
    std::array<float, 12> slots{};
    std::array<std::byte, 64> workspace{};
  };
  std::array<Buffers, kRanks> buffers;
  std::array<Stream, kRanks> streams{};
  std::array<std::unique_ptr<Operation>, kRanks> operations;
  const auto call = [&](std::size_t rank) {
    Clique& clique = job.CliqueOf(rank);
    const int ordinal = job.OrdinalOf(rank);
    Buffers& with = buffers.at(rank);
    const std::array<const void*, 2> operands{with.x.data(), with.w.data()};
    const std::array<void*, 3> results{with.y.data(), with.slots.data(), with.workspace.data()};
    return clique.Run(ordinal, streams.at(rank), 7, /*is_first=*/false, /*is_checked=*/true, {},
                      [&](const Seat& seat) {
                        return operations.at(rank)->Enqueue(libraries, seat, streams.at(rank),
                                                            operands, results);
                      });
  };
  AllSucceed(context, job.OnRanks([&](std::size_t rank) {
    libraries.runtime.stream_create_with_priority(&streams.at(rank), kStreamNonBlocking, 0);
    operations.at(rank) = MakeRingMatmul(
        {.num_ranks = kRanks, .rows = 1, .inner = 4, .columns = 1, .workspace_bytes = 64});
    Seat& seat = job.CliqueOf(rank).SeatOf(job.OrdinalOf(rank));
    Status status = operations.at(rank)->Prepare(libraries, seat, seats[rank]);
    status = status.ok() ? call(rank) : status;  // a first time, in which all comes
    libraries.runtime.stream_synchronize(streams.at(rank));
    return status;
  }));
  context.Expect(buffers[1].y == std::array<float, 4>{4, 4, 4, 4}, "the first products");
  AllSucceed(context,
             job.OnRanks([&](std::size_t rank) { return rank == 3 ? Status{} : call(rank); }));
  job.CliqueOf(0).Fail(Internal("early"));
  Abort(job.CliqueOf(0));
  context.Expect(libraries.runtime.stream_synchronize(streams[0]) != 0, "it makes its device fail");
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  context.Expect(libraries.runtime.stream_query(streams[1]) == kCudaErrorNotReady,
                 "another one has gone on");
  for (const std::size_t rank : {1U, 2U}) {
    job.CliqueOf(rank).Fail(Internal("late"));
    Abort(job.CliqueOf(rank));
    context.Expect(libraries.runtime.stream_synchronize(streams.at(rank)) != 0, "an error");
  }
}

void WindowsThatOneCannotMakeNobodyHas(Context& context) {
  const Libraries& libraries = OpenLibraries();
  static std::atomic<bool> is_broken{false};
  for (const bool of_malloc : {true, false}) {
    is_broken = false;
    Libraries broken = libraries;
    if (of_malloc) {
      broken.runtime.malloc = [](void** data, std::size_t bytes) {
        return is_broken ? 2 : OpenLibraries().runtime.malloc(data, bytes);
      };
    } else {
      broken.ipc.open_mem_handle = [](void** memory, IpcHandle handle, unsigned flags) {
        return is_broken ? 1 : OpenLibraries().ipc.open_mem_handle(memory, handle, flags);
      };
    }
    Job job(2, {.change = [&](Surroundings& of) {
              of.libraries = process == 1 ? &broken : &libraries;
            }});
    AllSucceed(context, job.Join());
    is_broken = true;
    for (int times = 0; times < 2; ++times) {  // which is said once
      std::vector<BlockSeat*> seats;
      AllSucceed(context, OpenBlocks(job, 1000, seats));
      context.Expect(seats[0] == nullptr && seats[1] == nullptr, "nobody has them");
    }
    context.Expect(notices.size() == 2, "both say so");
    for (const std::string& notice : notices) {
      ExpectPart(context, notice,
                 "blocks of collective matmuls of devices 40, 41 go by NCCL: rank 1: ");
      ExpectPart(context, notice, of_malloc ? "cudaMalloc" : "cudaIpcOpenMemHandle");
    }
    Sum(context, job, 3);  // small sums have their windows
  }
}

void WhoStaysAwayFromWindowsIsNamed(Context& context) {
  for (const std::int64_t later : {0, 1}) {
    Job job(3, {});
    AllSucceed(context, job.Join());
    // 2^20 bytes are a number of 21 bits.
    job.of_store().stays_away_from = {21 * Rounds::kMost + later};
    job.of_store().patience = std::chrono::milliseconds(200);
    std::vector<BlockSeat*> seats;
    const std::vector<Status> statuses = OpenBlocks(job, 1000, seats);
    ExpectInAll(context, {statuses[0], statuses[1], job.CliqueOf(0).Failure()},
                "no window for blocks of devices 40, 41, 42: process 2 has not come to round " +
                    std::to_string(21 * Rounds::kMost + later));
  }
}

const Suite suite("peer_processes",
                  {
                      {"SumsGoOverTheMemoryOfOtherProcesses", SumsGoOverTheMemoryOfOtherProcesses},
                      {"WhatOneCannotDoNobodyDoes", WhatOneCannotDoNobodyDoes},
                      {"WhatTheRuntimeLacksTurnsItOff", WhatTheRuntimeLacksTurnsItOff},
                      {"TheProbeIsOfAllProcesses", TheProbeIsOfAllProcesses},
                      {"WhoStaysAwayIsNamed", WhoStaysAwayIsNamed},
                      {"WhoDiesInASumIsNoticed", WhoDiesInASumIsNoticed},
                      {"BlocksGoToTheMemoryOfOtherProcesses", BlocksGoToTheMemoryOfOtherProcesses},
                      {"WhoHasFailedPassesNothingOn", WhoHasFailedPassesNothingOn},
                      {"WindowsThatOneCannotMakeNobodyHas", WindowsThatOneCannotMakeNobodyHas},
                      {"WhoStaysAwayFromWindowsIsNamed", WhoStaysAwayFromWindowsIsNamed},
                  });

}  // namespace
}  // namespace jaxcoll::testing::peer_processes_test

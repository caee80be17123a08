// tests/cpp/cuda.h: the engine for GPUs on a CUDA runtime, NCCL and cuBLASLt that work on ordinary
// memory (fake_cuda.cc). Threads are the ranks, each of a local device of its own.
#pragma once

#include <dlfcn.h>  // dlopen, dlsym

#include <algorithm>   // std::min
#include <array>       // std::array
#include <atomic>      // std::atomic
#include <chrono>      // std::chrono
#include <cstddef>     // std::byte, std::size_t
#include <cstdint>     // std::int32_t, std::int64_t
#include <cstdio>      // std::printf
#include <cstdlib>     // std::abort
#include <functional>  // std::function
#include <memory>      // std::make_unique, std::shared_ptr, std::unique_ptr
#include <numeric>     // std::iota
#include <span>        // std::span
#include <string>      // std::string
#include <thread>      // std::thread
#include <utility>     // std::move
#include <vector>      // std::vector

#include "cuda/clique.h"
#include "cuda/collectives.h"
#include "cuda/engine.h"
#include "cuda/libraries.h"
#include "cuda/operation.h"
#include "cuda/recording.h"
#include "cuda/site.h"
#include "host/recorder_door.h"
#include "testing.h"

namespace jaxcoll::cuda::testing {

using jaxcoll::testing::Around;
using jaxcoll::testing::Context;
using jaxcoll::testing::Suite;

inline constexpr std::int64_t kFirstId = 40;  // global ids and CUDA's numbers differ
inline constexpr int kMostRanks = 5;
inline constexpr std::int64_t kLong = 20'000'000'000;
inline constexpr std::int64_t kRun = 3;

inline LibraryPaths FakePaths() {
  return {.runtime = {FAKE_CUDA}, .driver = {FAKE_CUDA}, .nccl = {FAKE_CUDA}, .blas = {FAKE_CUDA}};
}

inline std::vector<std::int64_t> Devices(std::size_t count) {
  std::vector<std::int64_t> ids(count);
  std::iota(ids.begin(), ids.end(), kFirstId);
  return ids;
}

inline Engine& OpenEngine() {
  Engine& engine = Engine::Get();
  if (engine.libraries().nccl_version == 0) {
    SetRecorder({.begin = &RecordBegin,
                 .end = &RecordEnd,
                 .write_last_call = &WriteLastCall,
                 .write_dump_text = &WriteDumpText});
    const Status status = engine.Open(FakePaths());
    if (!status.ok()) {
      std::printf("%s\n", status.message.c_str());
      std::abort();
    }
    std::vector<Clique::LocalDevice> devices;
    for (int ordinal = 0; ordinal < kMostRanks; ++ordinal) {
      devices.push_back({.id = kFirstId + ordinal, .ordinal = ordinal});
    }
    engine.SetDevices(devices);
  }
  engine.Reset();
  engine.SetTimeout(kLong);
  return engine;
}

template <typename Function>
Function OfFake(const char* name) {
  return reinterpret_cast<Function>(dlsym(dlopen(FAKE_CUDA, RTLD_NOW), name));
}

inline std::string TakeLog() { return OfFake<const char* (*)()>("fake_cuda_take_log")(); }

inline std::size_t Lines(const std::string& log, const std::string& what) {
  std::size_t count = 0;
  for (std::size_t at = log.find(what); at != std::string::npos; at = log.find(what, at + 1)) {
    ++count;
  }
  return count;
}

using Ints = std::vector<std::int32_t>;
using Bytes = std::vector<std::byte>;

template <typename T>
Operand In(const std::vector<T>& data) {
  return {.data = data.data(), .bytes = data.size() * sizeof(T)};
}
template <typename T>
Result Out(std::vector<T>& data) {
  return {.data = data.data(), .bytes = data.size() * sizeof(T)};
}

/// What turns kernels on until its end.
struct WithPeers {
  explicit WithPeers(Engine& of) : engine(of) { engine.SetPeerImage("an image"); }
  WithPeers(const WithPeers&) = delete;
  WithPeers& operator=(const WithPeers&) = delete;
  ~WithPeers() {
    engine.SetPeerImage(nullptr);
    engine.Reset();
  }
  Engine& engine;
};

/// Runs a thread for each rank, each of which returns a Status; returns these.
inline std::vector<Status> OnRanks(std::size_t count, const std::function<Status(int)>& run) {
  std::vector<Status> statuses(count);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] { statuses[rank] = run(static_cast<int>(rank)); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return statuses;
}

inline bool AllSucceed(Context& context, const std::vector<Status>& statuses) {
  bool ok = true;
  for (const Status& status : statuses) {
    ok = context.Expect(status.ok(), [&] { return status.message; }) && ok;
  }
  return ok;
}

inline std::unique_ptr<Site> SiteOf(std::unique_ptr<Operation> operation, std::size_t ranks) {
  std::vector<std::vector<std::int64_t>> groups;
  groups.push_back(Devices(ranks));
  return std::make_unique<Site>(Engine::Get(), 7, std::move(groups), std::move(operation));
}

/// A run of a program with one call, on all ranks: one operand and one result each.
template <typename T>
void Run(Context& context, std::unique_ptr<Operation> operation,
         const std::vector<std::vector<T>>& operands, std::vector<std::vector<T>>& results) {
  const auto site = SiteOf(std::move(operation), operands.size());
  AllSucceed(context, OnRanks(operands.size(), [&](int rank) {
               Status status = site->Initialize(rank, nullptr);
               if (!status.ok()) {
                 return status;
               }
               const std::array in{In(operands[static_cast<std::size_t>(rank)])};
               const std::array out{Out(results[static_cast<std::size_t>(rank)])};
               return site->Execute(rank, nullptr, kRun, in, out);
             }));
}

/// Different small integers on each rank.
inline std::vector<Ints> Values(std::size_t ranks, std::size_t count) {
  std::vector<Ints> values(ranks, Ints(count));
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t i = 0; i < count; ++i) {
      values[rank][i] = static_cast<std::int32_t>(rank * 1000 + i * 7 % 101);
    }
  }
  return values;
}

inline std::unique_ptr<Operation> SmallGather(std::size_t p) {
  return std::make_unique<AllGather>(4, p);
}

inline void ExpectInAll(Context& context, const std::vector<Status>& statuses,
                        const std::string& part) {
  for (const Status& status : statuses) {
    context.Expect(status.message.find(part) != std::string::npos, [&] { return status.message; });
  }
}

/// Of two ranks that have communicated, the second is to call once more.
struct Pair {
  Pair() : site(SiteOf(SmallGather(2), 2)) {
    OnRanks(2, [&](int rank) {
      Status status = site->Initialize(rank, nullptr);
      return status.ok() ? Call(rank) : status;
    });
    clique = Engine::Get().Find(Devices(2));
    TakeLog();
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;
  ~Pair() { Engine::Get().Reset(); }  // what is under way uses the buffers

  Status Call(int rank) {
    const auto at = static_cast<std::size_t>(rank);
    const std::array in{In(from[at])};
    const std::array out{Out(to[at])};
    return site->Execute(rank, streams[at], kRun, in, out);
  }
  NcclComm CommOf(int ordinal) { return clique->SeatOf(ordinal).comm.handle(); }

  std::array<Stream, 2> streams{};  ///< null: a call returns when it is done
  std::array<Ints, 2> from{Ints(1), Ints(1)};
  std::array<Ints, 2> to{Ints(2), Ints(2)};
  std::unique_ptr<Site> site;
  std::shared_ptr<Clique> clique;
};

/// What was logged until so many lines of it say `what`, within seconds.
inline std::string LogUntil(std::size_t count, const std::string& what) {
  std::string log = TakeLog();
  for (int tries = 0; tries < 1000 && Lines(log, what) < count; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    log += TakeLog();
  }
  return log;
}

/// How far the devices of a site are; one of them is slow, or fails.
struct Stages {
  int slow_one = 1;
  bool fails = false;
  std::atomic<int> num_prepared{0};
  std::atomic<int> num_calling{0};
  std::atomic<int> num_called{0};
  std::atomic<int> fewest_calling{100};  // when a call was put on a stream
};

/// Puts nothing on a stream.
class Staged final : public Operation {
 public:
  explicit Staged(Stages& stages) : stages_(stages) {}

  [[nodiscard]] std::size_t num_operands() const override { return 0; }
  [[nodiscard]] std::size_t num_results() const override { return 0; }
  [[nodiscard]] std::size_t operand_bytes(std::size_t /*i*/) const override { return 0; }
  [[nodiscard]] std::size_t result_bytes(std::size_t /*i*/) const override { return 0; }
  Status Prepare(const Libraries& /*libraries*/, const Seat& seat, BlockSeat* /*blocks*/) override {
    Linger(seat);
    ++stages_.num_prepared;
    return stages_.fails && seat.ordinal == stages_.slow_one ? Internal("no kernel") : Status{};
  }
  Status Enqueue(const Libraries& /*libraries*/, const Seat& seat, Stream /*stream*/,
                 std::span<const void* const> /*operands*/,
                 std::span<void* const> /*results*/) const override {
    stages_.fewest_calling = std::min<int>(stages_.fewest_calling, stages_.num_calling);
    Linger(seat);
    ++stages_.num_called;
    return {};
  }

 private:
  void Linger(const Seat& seat) const {
    if (seat.ordinal == stages_.slow_one) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }

  Stages& stages_;
};

/// The engine's threads end before the process does.
inline const Around kEngineStops{.after = [] { Engine::Get().Stop(); }};

}  // namespace jaxcoll::cuda::testing

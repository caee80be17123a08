// tests/cpp/ranks.h: ranks without XLA: threads that start programs, and programs that call the
// engine and wait in it.
//
// A Program is a coroutine that stands for one device's program; `co_await Call(...)` is a native
// call. As under XLA, what follows it runs on the calling thread where the call finishes at once,
// and otherwise on the thread that resumes the program:
//
//   RunRanks(context, 4, [&](std::size_t rank) -> Program {
//     const CallResult result = co_await Call(*site, rank, run, operands[rank], results[rank]);
//     Check(result.ok, "the call succeeds");
//   });
#pragma once

#include <algorithm>           // std::all_of, std::fill
#include <atomic>              // std::atomic
#include <chrono>              // std::chrono::milliseconds
#include <condition_variable>  // std::condition_variable
#include <coroutine>           // std::coroutine_handle
#include <cstddef>             // std::size_t
#include <cstdint>             // std::int64_t, std::uint64_t
#include <cstdio>              // std::printf
#include <cstdlib>             // std::_Exit
#include <exception>           // std::terminate
#include <functional>          // std::function
#include <initializer_list>    // std::initializer_list
#include <memory>              // std::unique_ptr
#include <mutex>               // std::mutex
#include <numeric>             // std::iota
#include <span>                // std::span
#include <string>              // std::string
#include <thread>              // std::thread
#include <type_traits>         // std::is_invocable_v
#include <utility>             // std::move
#include <vector>              // std::vector

#include "core/clock.h"
#include "core/types.h"
#include "host/call_site.h"
#include "host/meeting.h"
#include "host/reduce_work.h"
#include "host/work.h"
#include "kernels/reduce.h"
#include "testing.h"

namespace jaxcoll::testing {

/// A test that takes longer than this hangs: the process ends, which no joined thread could.
inline constexpr std::chrono::seconds kHangs{60};

/// Device ordinals differ from logical ids, so that a text that confuses them shows.
inline constexpr std::int64_t kFirstDevice = 100;

inline thread_local bool on_rank_thread = false;  ///< a thread of RunThreads
inline thread_local int handlers_on_stack = 0;    ///< calls of CallSite::Arrive

/// What all threads of a test share: failed checks, and programs that have not ended.
class Shared {
 public:
  static Shared& Get() {
    static auto* const shared = new Shared();  // leaked: runners never end
    return *shared;
  }

  void Fail(std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failures_.push_back(std::move(text));
  }

  void Add(int programs) {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_ += programs;
    if (running_ == 0) {
      ended_.notify_all();  // under the lock: the waiter may go on to free what programs used
    }
  }

  void AwaitPrograms() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!ended_.wait_for(lock, kHangs, [this] { return running_ == 0; })) {
      for (const std::string& failure : failures_) {
        std::printf("  %s\n", failure.c_str());
      }
      std::printf("FAIL: %d threads and programs hang\n", running_);
      std::fflush(stdout);
      std::_Exit(1);
    }
  }

  void Report(Context& context) {
    const std::lock_guard<std::mutex> lock(mutex_);
    context.Expect(failures_.empty(), [this] {
      std::string text = std::to_string(failures_.size()) + " failed checks on the ranks:";
      for (std::size_t i = 0; i < failures_.size() && i < 5; ++i) {
        text += "\n    " + failures_[i];
      }
      return text;
    });
    failures_.clear();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<std::string> failures_;
  int running_ = 0;
};

/// Context::Expect for any thread; RunThreads reports it.
template <typename What>
bool Check(bool ok, const What& what) {
  if (!ok) {
    if constexpr (std::is_invocable_v<What>) {
      Shared::Get().Fail(what());
    } else {
      Shared::Get().Fail(what);
    }
  }
  return ok;
}

/// One device's program. Begins with Start(); frees itself when it ends.
class Program {
 public:
  // The coroutine's own names, in the language's spelling.
  struct promise_type {
    promise_type() { Shared::Get().Add(1); }
    ~promise_type() { Shared::Get().Add(-1); }
    Program get_return_object() {
      return Program(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_never final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
  };

  void Start() { handle_.resume(); }

 private:
  explicit Program(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  std::coroutine_handle<promise_type> handle_;
};

/// What a native call came to.
struct CallResult {
  bool ok = true;
  std::string error;
};

/// A native call: what csrc/ffi/site.cc does, for co_await in a Program.
class Call {
 public:
  Call(CallSite& site, std::size_t logical_id, std::int64_t run,
       std::span<const void* const> operands, std::span<void* const> results)
      : site_(site),
        logical_id_(static_cast<std::int64_t>(logical_id)),
        run_(run),
        operands_(operands),
        results_(results) {}

  bool await_ready() { return false; }

  bool await_suspend(std::coroutine_handle<> program) {
    program_ = program;
    const CallSite::Visit visit = site_.Begin(logical_id_, kFirstDevice + logical_id_, run_);
    if (visit.meeting == nullptr) {
      result_ = {false, "in no group"};
      return false;
    }
    for (std::size_t i = 0; i < operands_.size(); ++i) {
      visit.meeting->SetOperand(visit.rank, i, operands_[i]);
    }
    for (std::size_t i = 0; i < results_.size(); ++i) {
      visit.meeting->SetResult(visit.rank, i, results_[i]);
    }
    Factory factory(*this);
    ++handlers_on_stack;
    const Arrival arrival = site_.Arrive(visit, factory);
    --handlers_on_stack;
    if (arrival.answer == Answer::kWaits) {
      return true;  // the program may have gone on already, and this object with it
    }
    if (arrival.answer == Answer::kFailed) {
      result_ = {false, arrival.failure->message};
    }
    return false;
  }

  CallResult await_resume() { return std::move(result_); }

 private:
  class Factory final : public WaiterFactory {
   public:
    explicit Factory(Call& call) : call_(call) {}
    Waiter Make() override { return {&call_, nullptr, &Resume}; }
    [[nodiscard]] bool may_stay() const override { return true; }

   private:
    Call& call_;
  };

  static void Resume(const Waiter& waiter, const Status* status) {
    Check(handlers_on_stack == 0, "a program was resumed inside a handler");
    Check(!on_rank_thread, "a program was resumed on a thread of another rank");
    auto* const call = static_cast<Call*>(waiter.context);
    if (status != nullptr) {
      call->result_ = {false, status->message};
    }
    call->program_.resume();
  }

  CallSite& site_;
  std::int64_t logical_id_;
  std::int64_t run_;
  std::span<const void* const> operands_;
  std::span<void* const> results_;
  std::coroutine_handle<> program_;
  CallResult result_;
};

/// Runs body(0) to body(n - 1), each on a thread of its own, and waits for them and for all
/// programs that they started.
inline void RunThreads(Context& context, std::size_t n,
                       const std::function<void(std::size_t)>& body) {
  std::vector<std::thread> threads;
  Shared::Get().Add(static_cast<int>(n));
  for (std::size_t i = 0; i < n; ++i) {
    threads.emplace_back([&body, i] {
      on_rank_thread = true;
      body(i);
      Shared::Get().Add(-1);
    });
  }
  Shared::Get().AwaitPrograms();
  for (std::thread& thread : threads) {
    thread.join();
  }
  Shared::Get().Report(context);
}

/// Runs one program for each rank, started on a thread each.
inline void RunRanks(Context& context, std::size_t num_ranks,
                     const std::function<Program(std::size_t)>& program) {
  RunThreads(context, num_ranks, [&](std::size_t rank) { program(rank).Start(); });
}

/// The first of a thousand run ids that no other test uses: failures stick to a run.
inline std::int64_t FreshRuns() {
  static std::atomic<std::int64_t> next{1000};
  return next.fetch_add(1000, std::memory_order_relaxed);
}

/// To loop over: `for (const std::size_t p : Sizes{1, 2, 8})`.
using Sizes = std::initializer_list<std::size_t>;

inline void SpinUs(std::int64_t us) {
  const std::int64_t end_ns = NowNs() + us * 1000;
  while (NowNs() < end_ns) {
  }
}

inline void SleepMs(std::int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// ---- Call sites -------------------------------------------------------------------------------

struct Release {
  void operator()(CallSite* site) const { site->Unref(); }
};
/// The reference that a compiled program holds.
using Site = std::unique_ptr<CallSite, Release>;
using Groups = std::vector<std::vector<std::int64_t>>;

inline Groups OneGroup(std::size_t num_ranks) {
  std::vector<std::int64_t> group(num_ranks);
  std::iota(group.begin(), group.end(), std::int64_t{0});
  return {group};
}

inline Site MakeSite(std::uint64_t id, const Groups& groups, std::unique_ptr<const Work> work) {
  return Site(new CallSite(id, groups, std::move(work)));
}

/// Sums int32 leaves of these lengths over all ranks.
inline std::unique_ptr<const Work> SumWork(const std::vector<std::size_t>& counts) {
  std::vector<AllReduceWork::Leaf> leaves;
  for (const std::size_t count : counts) {
    leaves.push_back({DType::kI32, count, GetReduce(DType::kI32, ReduceOp::kSum)});
  }
  return std::make_unique<AllReduceWork>(std::move(leaves));
}

/// Which execution a rank is at, as it sees it.
struct Stamp {
  std::uint64_t site = 0;
  std::int64_t run = 0;
  std::int64_t iteration = 0;
  std::size_t rank = 0;

  /// Of all that ranks have in common.
  [[nodiscard]] std::uint64_t Hash() const {
    std::uint64_t hash = site * 0x9E3779B97F4A7C15U + static_cast<std::uint64_t>(run);
    hash = (hash ^ (hash >> 29)) * 0xBF58476D1CE4E5B9U + static_cast<std::uint64_t>(iteration);
    return hash ^ (hash >> 32);
  }
};

/// Sees which call meets which: every rank's operand is its Stamp; into chunk c of every rank's
/// result goes the sum of all ranks' hashes. The result is added to what was there, so that a
/// chunk that runs twice shows as one that does not run.
class StampWork final : public Work {
 public:
  /// Work of `num_chunks` chunks that claims to move `bytes`; from 512 KiB on, runners help.
  explicit StampWork(std::size_t num_chunks = 1, std::size_t bytes = 0)
      : num_chunks_(num_chunks), bytes_(bytes) {}

  /// Called in every chunk.
  std::function<void(std::size_t chunk)> in_chunk;

  [[nodiscard]] std::size_t num_operands() const override { return 1; }
  [[nodiscard]] std::size_t num_results() const override { return 1; }
  [[nodiscard]] std::size_t operand_bytes(std::size_t) const override { return sizeof(Stamp); }
  [[nodiscard]] std::size_t result_bytes(std::size_t) const override {
    return num_chunks_ * sizeof(std::uint64_t);
  }
  [[nodiscard]] std::size_t num_chunks(std::size_t) const override { return num_chunks_; }
  [[nodiscard]] std::size_t bytes_moved(std::size_t) const override { return bytes_; }

  [[nodiscard]] std::unique_ptr<const Route> MakeRoute(const Membership&,
                                                       const RouteOptions&) const override {
    return nullptr;  // its ranks are in one process
  }

  void Run(std::size_t chunk, const Buffers& buffers) const override {
    std::uint64_t sum = 0;
    for (std::size_t r = 0; r < buffers.num_ranks; ++r) {
      const Stamp& stamp = *static_cast<const Stamp*>(buffers.operands[r]);
      sum += stamp.Hash();
      Check(stamp.rank == r, "a rank's buffer stands in another's place");
    }
    if (in_chunk) {
      in_chunk(chunk);
    }
    for (std::size_t r = 0; r < buffers.num_ranks; ++r) {
      static_cast<std::uint64_t*>(buffers.results[r])[chunk] += sum;
    }
  }

 private:
  std::size_t num_chunks_;
  std::size_t bytes_;
};

/// The same for work that starts early: into slot s of every rank's result goes the hash of rank
/// s, as soon as both are there. To be verified as of one rank, with a chunk for each.
class EarlyStampWork final : public Work {
 public:
  explicit EarlyStampWork(std::size_t num_ranks, std::size_t bytes = 0)
      : num_ranks_(num_ranks), bytes_(bytes) {}

  /// Called in every chunk, with the source's stamp.
  std::function<void(const Stamp& source, std::size_t target)> in_chunk;
  /// Called with the number of ranks that have come, by each before its chunks are ready.
  std::function<void(std::size_t count)> on_arrival;

  [[nodiscard]] std::size_t num_operands() const override { return 1; }
  [[nodiscard]] std::size_t num_results() const override { return 1; }
  [[nodiscard]] std::size_t operand_bytes(std::size_t) const override { return sizeof(Stamp); }
  [[nodiscard]] std::size_t result_bytes(std::size_t) const override {
    return num_ranks_ * sizeof(std::uint64_t);
  }
  [[nodiscard]] std::size_t num_chunks(std::size_t num_ranks) const override {
    return num_ranks * num_ranks;
  }
  [[nodiscard]] std::size_t bytes_moved(std::size_t) const override { return bytes_; }
  [[nodiscard]] bool starts_early() const override { return true; }
  [[nodiscard]] std::size_t num_ready(const std::size_t*, std::size_t count,
                                      std::size_t) const override {
    if (on_arrival) {
      on_arrival(count);
    }
    return count * count;
  }

  [[nodiscard]] std::unique_ptr<const Route> MakeRoute(const Membership&,
                                                       const RouteOptions&) const override {
    return nullptr;  // its ranks are in one process
  }

  void Run(std::size_t chunk, const Buffers& buffers) const override {
    std::size_t last = 0;
    while ((last + 1) * (last + 1) <= chunk) {
      ++last;
    }
    const std::size_t at = chunk - last * last;
    const std::size_t source = buffers.arrivals[at < last ? at : last];
    const std::size_t target = buffers.arrivals[at < last ? last : at - last];
    const Stamp& stamp = *static_cast<const Stamp*>(buffers.operands[source]);
    Check(stamp.rank == source, "a rank's buffer stands in another's place");
    if (in_chunk) {
      in_chunk(stamp, target);
    }
    static_cast<std::uint64_t*>(buffers.results[target])[source] += stamp.Hash();
  }

 private:
  std::size_t num_ranks_;
  std::size_t bytes_;
};

/// A rank's buffers for calls of a StampWork, checked after each call.
class Stamped {
 public:
  Stamped(std::size_t num_ranks, std::size_t num_chunks = 1)
      : num_ranks_(num_ranks), result_(num_chunks) {}

  /// co_await Begin(...), then Verify what it gave.
  Call Begin(CallSite& site, std::size_t logical_id, std::size_t rank, std::int64_t run,
             std::int64_t iteration) {
    stamp_ = {site.id(), run, iteration, rank};
    std::fill(result_.begin(), result_.end(), kPoison);
    operand_ = &stamp_;
    target_ = result_.data();
    return {site, logical_id, run, {&operand_, 1}, {&target_, 1}};
  }

  void Verify(const CallResult& result) const {
    if (!Check(result.ok, [&] { return Describe() + " failed: " + result.error; })) {
      return;
    }
    for (const std::uint64_t value : result_) {
      if (!Check(value == kPoison + num_ranks_ * stamp_.Hash(),
                 [&] { return Describe() + " met another call, or is not complete"; })) {
        return;
      }
    }
  }

  /// No call wrote here.
  [[nodiscard]] bool untouched() const {
    return std::all_of(result_.begin(), result_.end(),
                       [](std::uint64_t value) { return value == kPoison; });
  }

 private:
  static constexpr std::uint64_t kPoison = 0xABADCAFE;

  [[nodiscard]] std::string Describe() const {
    return "rank " + std::to_string(stamp_.rank) + ", site " + std::to_string(stamp_.site) +
           ", run " + std::to_string(stamp_.run) + ", iteration " +
           std::to_string(stamp_.iteration);
  }

  std::size_t num_ranks_;
  Stamp stamp_;
  std::vector<std::uint64_t> result_;
  const void* operand_ = nullptr;
  void* target_ = nullptr;
};

}  // namespace jaxcoll::testing

// tests/cpp/cuda_failing_test.cc: what goes wrong on GPUs ends in an error that says who and where.
#include <array>    // std::array
#include <atomic>   // std::atomic
#include <chrono>   // std::chrono
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <memory>   // std::make_unique, std::shared_ptr
#include <string>   // std::string
#include <thread>   // std::thread
#include <vector>   // std::vector

#include "cuda.h"
#include "cuda/call_watch.h"
#include "cuda/clique.h"
#include "cuda/engine.h"
#include "cuda/libraries.h"
#include "cuda/site.h"

namespace jaxcoll::cuda::testing::cuda_failing_test {
namespace {

void OneThatDoesNotComeIsNamed(Context& context) {
  Engine& engine = OpenEngine();
  engine.SetTimeout(100'000'000);
  const auto site = SiteOf(SmallGather(3), 3);
  ExpectInAll(context, OnRanks(2, [&](int rank) { return site->Initialize(rank, nullptr); }),
              "devices 42 have not begun a program with a collective over them within 0.1 s");
  ExpectInAll(context, {site->Initialize(2, nullptr)}, "devices 42 have not begun");
  // In another group of the same site.
  engine.Reset();
  Site other(engine, 7, {{kFirstId, kFirstId + 1}, {kFirstId + 2}}, SmallGather(2));
  ExpectInAll(
      context, OnRanks(2, [&](int rank) { return other.Initialize(rank, nullptr); }),
      "site 7: waited 0.1 s for devices 42, which are not ready for the program's first run");
}

void OneThatDoesNotCallAtFirstIsNamed(Context& context) {
  Engine& engine = OpenEngine();
  Stages stages;
  const auto site = SiteOf(std::make_unique<Staged>(stages), 3);
  AllSucceed(context, OnRanks(3, [&](int rank) { return site->Initialize(rank, nullptr); }));
  engine.SetTimeout(100'000'000);
  const auto call = [&](int rank) { return site->Execute(rank, nullptr, kRun, {}, {}); };
  const std::string text =
      "site 7: waited 0.1 s for rank 2 (device 42); arrived: 0 (device 40), 1 (device 41)";
  ExpectInAll(context, OnRanks(2, call), text);
  ExpectInAll(context, {call(2), site->Initialize(2, nullptr)}, text);
  context.Expect(stages.num_called == 0, "nothing is put on a stream");
}

void OneThatDoesNotCallIsNamed(Context& context) {
  Engine& engine = OpenEngine();
  const auto site = SiteOf(SmallGather(3), 3);
  std::vector<Ints> from(3, Ints(1));
  std::vector<Ints> to(3, Ints(3));
  const auto call = [&](int rank) {
    const std::array in{In(from[static_cast<std::size_t>(rank)])};
    const std::array out{Out(to[static_cast<std::size_t>(rank)])};
    return site->Execute(rank, nullptr, kRun, in, out);
  };
  const auto run = [&](int rank) {
    Status status = site->Initialize(rank, nullptr);
    return status.ok() ? call(rank) : status;
  };
  AllSucceed(context, OnRanks(3, run));
  engine.SetTimeout(200'000'000);
  TakeLog();
  const auto begun = std::chrono::steady_clock::now();
  const std::vector<Status> statuses = OnRanks(2, call);
  const auto took = std::chrono::steady_clock::now() - begun;
  context.Expect(took < std::chrono::seconds(5), "it takes too long");
  ExpectInAll(context, statuses, "site 7: waited 0.");
  ExpectInAll(context, statuses,
              " s for rank 2 (device 42); arrived: 0 (device 40), 1 (device 41)");
  std::string log;  // the first that is aborted ends the wait
  for (int tries = 0; tries < 200 && Lines(log, "abort") < 3; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    log += TakeLog();
  }
  context.Expect(Lines(log, "abort") == 3, "all communicators are aborted");
  ExpectInAll(context, {call(2)}, statuses[0].message);
  ExpectInAll(context, {site->Initialize(2, nullptr)}, statuses[0].message);
  engine.Reset();
  engine.SetTimeout(kLong);
  AllSucceed(context, OnRanks(3, run));
}

/// The program whose call was aborted fails on the device, though it was put on the stream before.
void NobodyGoesOnWithGarbage(Context& context) {
  Engine& engine = OpenEngine();
  const Runtime& runtime = engine.libraries().runtime;
  for (const bool traps : {true, false}) {
    engine.Reset();
    engine.SetTraps(traps);
    engine.SetTimeout(kLong);
    const auto site = SiteOf(SmallGather(3), 3);
    std::vector<Ints> from(3, Ints(1));
    std::vector<Ints> to(3, Ints(3));
    std::array<int, 3> errors{};
    const auto run = [&](int rank) {
      const auto at = static_cast<std::size_t>(rank);
      Stream stream = nullptr;
      runtime.stream_create_with_priority(&stream, kStreamNonBlocking, 0);
      const std::array in{In(from[at])};
      const std::array out{Out(to[at])};
      Status status = site->Initialize(rank, stream);
      status = status.ok() ? site->Execute(rank, stream, kRun, in, out) : status;
      errors.at(at) = runtime.stream_synchronize(stream);
      return status;
    };
    AllSucceed(context, OnRanks(3, run));
    engine.SetTimeout(200'000'000);
    AllSucceed(context, OnRanks(2, run));
    for (const int rank : {0, 1}) {
      context.Expect((errors.at(static_cast<std::size_t>(rank)) != 0) == traps,
                     "whether what waits for the stream gets an error");
    }
    context.Expect(!engine.Find(Devices(3))->Failure().ok(), "the group has failed");
    engine.Reset();  // what is under way uses the buffers
  }
  engine.SetTraps(true);
}

void NothingIsAbortedUnderAThreadInsideNccl(Context& context) {
  Engine& engine = OpenEngine();
  Pair pair;
  OfFake<void (*)(NcclComm, int)>("fake_cuda_linger")(pair.CommOf(1), 1200);
  engine.SetTimeout(100'000'000);
  ExpectInAll(context, {pair.Call(1)}, "for rank 0 (device 40); arrived: 1 (device 41)");
  const std::string log = LogUntil(2, "abort");
  context.Expect(Lines(log, "abort") == 2 && Lines(log, "inside") == 0, log);
  context.Expect(Lines(log, "use after abort") == 0, log);
}

/// Who is inside NCCL and not stuck comes out by itself.
void NothingIsRevokedUnderAThreadThatWorks(Context& context) {
  Engine& engine = OpenEngine();
  Pair pair;
  engine.libraries().runtime.stream_create_with_priority(&pair.streams[1], kStreamNonBlocking, 0);
  engine.SetTimeout(kLong);
  OfFake<void (*)(NcclComm, int)>("fake_cuda_linger")(pair.CommOf(1), 100);
  std::thread caller([&] { pair.Call(1); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  engine.Find(Devices(2))->Fail(Internal("a test"));
  const std::string log = LogUntil(2, "abort");
  caller.join();
  context.Expect(Lines(log, "abort") == 2 && Lines(log, "inside") == 0, log);
  context.Expect(Lines(log, "revoke") == 0, log);
}

/// NCCL_COMM_BLOCKING=0 makes them non-blocking ones: a call returns all the same when it is on its
/// stream.
void WhatNcclDecidesIsNoticed(Context& context) {
  Engine& engine = OpenEngine();
  const auto force = OfFake<void (*)(bool)>("fake_cuda_force_non_blocking");
  force(true);
  Pair pair;
  force(false);
  AllSucceed(context, OnRanks(2, [&](int rank) { return pair.Call(rank); }));
  context.Expect(TakeLog().find("used before") == std::string::npos, "a call begins too early");
  OfFake<void (*)(NcclComm)>("fake_cuda_stall")(pair.CommOf(0));
  engine.SetTimeout(100'000'000);
  ExpectInAll(context, OnRanks(2, [&](int rank) { return pair.Call(rank); }), "site 7: waited");
}

/// To record an event can take as long as the device is stuck: that is what the watch is for.
void NobodyWaitsForWhoRecordsAnEvent(Context& context) {
  const Libraries& libraries = OpenEngine().libraries();
  CallWatch watch;
  AllSucceed(context, {watch.Create(libraries)});
  const auto hold = OfFake<void (*)(bool)>("fake_cuda_hold_records");
  const std::size_t first = watch.Begin(libraries, nullptr, 7);
  hold(true);
  std::thread caller([&] {
    watch.End(libraries, nullptr, first);
    watch.End(libraries, nullptr, watch.Begin(libraries, nullptr, 8));
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto begun = std::chrono::steady_clock::now();
  watch.Look(libraries, 1'000);
  const auto late = watch.Look(libraries, 3'000);
  context.Expect(std::chrono::steady_clock::now() - begun < std::chrono::seconds(1),
                 "the watch waits");
  context.Expect(late && late->site == 7 && late->waited_ns == 2'000, "the call that is late");
  hold(false);
  caller.join();
  context.Expect(!watch.Look(libraries, 4'000), "all calls have ended");
}

void EveryCallIsWatchedInItsTurn(Context& context) {
  const Libraries& libraries = OpenEngine().libraries();
  CallWatch watch;
  AllSucceed(context, {watch.Create(libraries)});
  for (std::uint64_t site = 0; site < 2 * CallWatch::kSlots; ++site) {
    watch.End(libraries, nullptr, watch.Begin(libraries, nullptr, site));
    if (site % 100 == 99) {
      context.Expect(!watch.Look(libraries, 1), "a call that has ended");
    }
  }
  std::array<std::size_t, CallWatch::kSlots> slots{};
  context.Expect(!watch.Look(libraries, 1), "all have ended");
  for (std::size_t i = 0; i < slots.size(); ++i) {
    slots.at(i) = watch.Begin(libraries, nullptr, i);
  }
  context.Expect(watch.Begin(libraries, nullptr, 1) == CallWatch::kUnwatched, "one more");
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const auto late = watch.Look(libraries, static_cast<std::int64_t>(i) + 1);
    context.Expect(late && late->site == i, "the oldest");
    watch.End(libraries, nullptr, slots.at(i));
  }
}

void CallsThatNcclHoldsUpAreLate(Context& context) {
  Engine& engine = OpenEngine();
  Pair pair;
  OfFake<void (*)(NcclComm)>("fake_cuda_stall")(pair.CommOf(0));
  engine.SetTimeout(100'000'000);
  const auto begun = std::chrono::steady_clock::now();
  ExpectInAll(context, OnRanks(2, [&](int rank) { return pair.Call(rank); }), "site 7: waited");
  context.Expect(std::chrono::steady_clock::now() - begun < std::chrono::seconds(5),
                 "it takes too long");
  const std::string log = LogUntil(2, "abort");
  context.Expect(Lines(log, "abort") == 2 && Lines(log, "inside") == 0, log);
  const std::size_t num_freed = engine.libraries().can_revoke() ? 1 : 0;
  context.Expect(Lines(log, "revoke rank 0") == num_freed, log);
}

/// The same where the first call of all stalls, which connects the ranks.
void ConnectingIsInterrupted(Context& context) {
  Engine& engine = OpenEngine();
  const auto stall = OfFake<void (*)(bool)>("fake_cuda_stall_all");
  stall(true);
  engine.SetTimeout(100'000'000);
  TakeLog();
  const auto site = SiteOf(SmallGather(2), 2);
  ExpectInAll(context, OnRanks(2, [&](int rank) { return site->Initialize(rank, nullptr); }),
              "no communicator of devices 40, 41: NCCL has not connected them within 0.1 s");
  stall(false);
  const std::string log = LogUntil(2, "abort");
  context.Expect(Lines(log, "abort") == 2 && Lines(log, "inside") == 0, log);
  context.Expect(Lines(log, "too early") == 0, log);
  engine.Reset();
  engine.SetTimeout(kLong);
  AllSucceed(context, OnRanks(2, [&](int rank) { return site->Initialize(rank, nullptr); }));
}

void FirstRunsAreWaitedForAsCompilationsAre(Context& context) {
  Engine& engine = OpenEngine();
  engine.SetTimeout(50'000'000);
  engine.SetCompileTimeout(kLong);
  std::vector<Ints> from(2, Ints(1));
  std::vector<Ints> to(2, Ints(2));
  const auto site = SiteOf(SmallGather(2), 2);
  AllSucceed(context, OnRanks(2, [&](int rank) {
               const auto at = static_cast<std::size_t>(rank);
               const auto linger = std::chrono::milliseconds(rank == 1 ? 150 : 0);
               std::this_thread::sleep_for(linger);
               Status status = site->Initialize(rank, nullptr);
               std::this_thread::sleep_for(linger);
               const std::array in{In(from[at])};
               const std::array out{Out(to[at])};
               return status.ok() ? site->Execute(rank, nullptr, kRun, in, out) : status;
             }));
  // As where another process compiles still: the first call of another site.
  const auto second = SiteOf(SmallGather(2), 2);
  AllSucceed(context, OnRanks(2, [&](int rank) { return second->Initialize(rank, nullptr); }));
  OfFake<void (*)(NcclComm)>("fake_cuda_stall")(engine.Find(Devices(2))->SeatOf(0).comm.handle());
  engine.SetCompileTimeout(500'000'000);
  const auto begun = std::chrono::steady_clock::now();
  ExpectInAll(context,
              OnRanks(2,
                      [&](int rank) {
                        const auto at = static_cast<std::size_t>(rank);
                        const std::array in{In(from[at])};
                        const std::array out{Out(to[at])};
                        return second->Execute(rank, nullptr, kRun, in, out);
                      }),
              "site 7: waited 0.5");
  context.Expect(std::chrono::steady_clock::now() - begun >= std::chrono::milliseconds(500),
                 "it fails too soon");
  engine.SetCompileTimeout(0);
  engine.Reset();  // what is under way uses the buffers
}

std::atomic<bool> is_excused{false};

void NothingRunsBetweenGenerations(Context& context) {
  Engine& engine = OpenEngine();
  const std::int64_t generation = engine.generation();
  const auto old = SiteOf(SmallGather(1), 1);
  AllSucceed(context, {old->Initialize(0, nullptr)});
  engine.SetGeneration(Engine::kBetween);
  for (int tries = 0; tries < 2; ++tries) {  // of a reset that fails, and is made again
    engine.Reset();
    context.Expect(engine.generation() == Engine::kBetween, "a reset goes on until all have come");
    const auto site = SiteOf(SmallGather(1), 1);
    for (Site* const each : {old.get(), site.get()}) {
      ExpectInAll(context, {each->Initialize(0, nullptr)}, "has not come to its end");
    }
    context.Expect(engine.Find(Devices(1)) == nullptr, "there is no group");
  }
  engine.SetGeneration(generation + 5);
  AllSucceed(context, {old->Initialize(0, nullptr)});
  context.Expect(engine.Find(Devices(1), generation) == nullptr, "of an earlier one neither");
}

void WhoHasAnExcuseIsWaitedFor(Context& context) {
  Engine& engine = OpenEngine();
  Pair pair;
  is_excused = true;
  engine.SetCallbacks({.is_anyone_excused = [] { return is_excused ? 1 : 0; }});
  engine.SetTimeout(100'000'000);
  const auto begun = std::chrono::steady_clock::now();
  std::thread later([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    is_excused = false;
  });
  ExpectInAll(context, {pair.Call(1)}, "for rank 0 (device 40)");
  context.Expect(std::chrono::steady_clock::now() - begun >= std::chrono::milliseconds(500),
                 "it fails too soon");
  later.join();
  engine.SetCallbacks({});
}

void MakingCommunicatorsIsInterrupted(Context& context) {
  Engine& engine = OpenEngine();
  engine.SetCallbacks({.exchange = [](const std::int64_t*, std::size_t, std::int64_t, std::int64_t,
                                      void*, std::size_t, char*, std::size_t) { return 0; }});
  engine.SetTimeout(100'000'000);
  engine.SetCompileTimeout(kLong);  // all have come by then
  TakeLog();
  Site site(engine, 7, {{kFirstId, 99}}, SmallGather(2));  // 99 is another process's
  ExpectInAll(context, {site.Initialize(0, nullptr)},
              "no communicator of devices 40, 99: NCCL has not connected them within 0.1 s");
  if (engine.libraries().can_revoke()) {  // a thread stays inside until NCCL lets it go
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    std::string early = TakeLog();
    context.Expect(Lines(early, "abort") + Lines(early, "revoke") == 0, early);
    OfFake<void (*)()>("fake_cuda_lose_ranks")();
  }
  const std::string log = LogUntil(1, "abort");
  context.Expect(Lines(log, "abort rank 0") == 1 && Lines(log, "inside") == 0, log);
  engine.SetCompileTimeout(0);
  engine.SetCallbacks({});
}

void ErrorsOfNcclAreNoticed(Context& context) {
  Engine& engine = OpenEngine();
  const auto site = SiteOf(SmallGather(2), 2);
  AllSucceed(context, OnRanks(2, [&](int rank) { return site->Initialize(rank, nullptr); }));
  const std::shared_ptr<Clique> clique = engine.Find(Devices(2));
  OfFake<void (*)(NcclComm, int)>("fake_cuda_set_async_error")(clique->SeatOf(1).comm.handle(), 6);
  for (int tries = 0; tries < 100 && clique->is_ready(); ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ExpectInAll(context, {clique->Failure()}, "devices 40, 41, rank 1: communication: fake NCCL");
}

std::atomic<int> num_reports{0};

/// The last test: nothing is watched any more after it.
void WhatFailsIsReportedWhateverAbortsTake(Context& context) {
  Engine& engine = OpenEngine();
  Pair pair;
  const auto hold = OfFake<void (*)(bool)>("fake_cuda_hold_aborts");
  hold(true);
  engine.SetCallbacks({.report = [](const char* /*text*/) { ++num_reports; }});
  engine.SetTimeout(100'000'000);
  const auto begun = std::chrono::steady_clock::now();
  ExpectInAll(context, {pair.Call(1)}, "for rank 0 (device 40)");
  LogUntil(1, "abort");
  while (num_reports == 0 && std::chrono::steady_clock::now() - begun < std::chrono::seconds(3)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  context.Expect(num_reports == 1, "a report while an abort takes its time");
  engine.Stop();
  context.Expect(std::chrono::steady_clock::now() - begun < std::chrono::seconds(4),
                 "the process's end waits for an abort");
  hold(false);
  engine.Stop();
}

const Suite suite(
    "cuda_failing",
    {
        {"OneThatDoesNotComeIsNamed", OneThatDoesNotComeIsNamed},
        {"OneThatDoesNotCallAtFirstIsNamed", OneThatDoesNotCallAtFirstIsNamed},
        {"OneThatDoesNotCallIsNamed", OneThatDoesNotCallIsNamed},
        {"NobodyGoesOnWithGarbage", NobodyGoesOnWithGarbage},
        {"NothingIsAbortedUnderAThreadInsideNccl", NothingIsAbortedUnderAThreadInsideNccl},
        {"NothingIsRevokedUnderAThreadThatWorks", NothingIsRevokedUnderAThreadThatWorks},
        {"WhatNcclDecidesIsNoticed", WhatNcclDecidesIsNoticed},
        {"NobodyWaitsForWhoRecordsAnEvent", NobodyWaitsForWhoRecordsAnEvent},
        {"EveryCallIsWatchedInItsTurn", EveryCallIsWatchedInItsTurn},
        {"CallsThatNcclHoldsUpAreLate", CallsThatNcclHoldsUpAreLate},
        {"ConnectingIsInterrupted", ConnectingIsInterrupted},
        {"FirstRunsAreWaitedForAsCompilationsAre", FirstRunsAreWaitedForAsCompilationsAre},
        {"NothingRunsBetweenGenerations", NothingRunsBetweenGenerations},
        {"WhoHasAnExcuseIsWaitedFor", WhoHasAnExcuseIsWaitedFor},
        {"MakingCommunicatorsIsInterrupted", MakingCommunicatorsIsInterrupted},
        {"ErrorsOfNcclAreNoticed", ErrorsOfNcclAreNoticed},
        {"WhatFailsIsReportedWhateverAbortsTake", WhatFailsIsReportedWhateverAbortsTake},
    },
    kEngineStops);

}  // namespace
}  // namespace jaxcoll::cuda::testing::cuda_failing_test

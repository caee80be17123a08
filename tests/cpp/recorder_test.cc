// tests/cpp/recorder_test.cc: the ring of calls, and the five moments of each.
#include <array>    // std::array
#include <atomic>   // std::atomic
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <memory>   // std::make_unique
#include <string>   // std::string, std::to_string
#include <thread>   // std::thread
#include <vector>   // std::vector

#include "host/recorder.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::recorder_test {
namespace {

std::int64_t At(const CallRecord& record, Moment moment) {
  return record.moments_ns[static_cast<std::size_t>(moment)];
}

std::vector<CallRecord> RecordsOf(std::int64_t device) {
  std::vector<CallRecord> records;
  for (const CallRecord& record : RecordsIn(BlackBox::Get())) {
    if (record.device == device) {
      records.push_back(record);
    }
  }
  return records;
}

void TheRingKeepsTheLatest(Context& context) {
  constexpr std::int64_t kDevice = 1000;
  constexpr std::uint64_t kCalls = Recorder::kCapacity + 1000;
  const std::uint64_t before = Recorder::Get().num_calls();
  for (std::uint64_t i = 1; i <= kCalls; ++i) {
    Recorder::Entry& entry = Recorder::Get().Begin(kDevice, {.site = 3 * i,
                                                             .group = 2 * i,
                                                             .rank = 1,
                                                             .run = -static_cast<std::int64_t>(i),
                                                             .iteration = 5,
                                                             .now_ns = 7});
    entry.Set(Moment::kMoved, static_cast<std::int64_t>(i));
    if (i == 10) {
      context.Expect(RecordsOf(kDevice).size() == 10, "a ring that is not full");
    }
  }
  context.Expect(Recorder::Get().num_calls() == before + kCalls, "all calls are counted");
  const std::vector<CallRecord> records = RecordsOf(kDevice);
  context.Expect(records.size() == Recorder::kCapacity, "the ring holds as many as it can");
  for (std::size_t i = 0; i < records.size(); ++i) {
    const std::uint64_t sequence = kCalls - Recorder::kCapacity + 1 + i;
    context.Expect(records[i].sequence == sequence && records[i].site == 3 * sequence &&
                       records[i].group == 2 * sequence && records[i].rank == 1 &&
                       records[i].run == -static_cast<std::int64_t>(sequence) &&
                       records[i].iteration == 5 && At(records[i], Moment::kArrived) == 7 &&
                       At(records[i], Moment::kOpened) == 0 &&
                       At(records[i], Moment::kMoved) == static_cast<std::int64_t>(sequence),
                   [&] { return "entry " + std::to_string(sequence); });
  }
}

void DevicesHaveRingsOfTheirOwn(Context& context) {
  constexpr std::int64_t kOther = 2048 * 3;  // the same place in another process
  for (const std::int64_t device : {1010, 1011, 1011}) {
    Recorder::Get().Begin(device + kOther, {.site = 1, .run = 2, .iteration = 3, .now_ns = 4});
  }
  context.Expect(RecordsOf(1010).size() == 1 && RecordsOf(1011).size() == 2, "one ring each");
  context.Expect(RecordsOf(1011).back().sequence == 2, "one count each");
}

/// Readers drop what is being overwritten: what they return was written by one call.
void SnapshotsAreConsistent(Context& context) {
  constexpr std::int64_t kDevice = 1020;
  std::atomic<bool> stop{false};
  std::thread writer([&stop] {
    for (std::uint64_t i = 1; !stop.load(std::memory_order_relaxed); ++i) {
      const auto n = static_cast<std::int64_t>(i);
      Recorder::Entry& entry = Recorder::Get().Begin(
          kDevice, {.site = 3 * i, .run = 5 * n, .iteration = 7 * n, .now_ns = 11 * n});
      for (const Moment moment :
           {Moment::kOpened, Moment::kMet, Moment::kMoved, Moment::kResumed}) {
        entry.Set(moment, 11 * n);
      }
    }
  });
  std::size_t seen = 0;
  for (int look = 0; look < 100; ++look) {
    for (const CallRecord& record : RecordsOf(kDevice)) {
      ++seen;
      const auto n = static_cast<std::int64_t>(record.sequence);
      bool ok = record.site == 3 * record.sequence && record.run == 5 * n &&
                record.iteration == 7 * n && At(record, Moment::kArrived) == 11 * n;
      for (const std::int64_t ns : record.moments_ns) {
        ok = ok && (ns == 0 || ns == 11 * n);
      }
      context.Expect(ok, [&] { return "entry " + std::to_string(record.sequence) + " is torn"; });
    }
  }
  stop.store(true);
  writer.join();
  context.Expect(seen > 1000, std::to_string(seen) + " entries seen");
}

/// All five, in their order, on every rank, whichever came first or last.
void ACallReachesItsMomentsInOrder(Context& context) {
  constexpr std::size_t kIterations = 50;
  for (const std::size_t p : Sizes{1, 2, 3, 4, 8}) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1} << 20}) {
      const Site site = MakeSite(900 + p, OneGroup(p), std::make_unique<StampWork>(4, bytes));
      const std::int64_t run = FreshRuns();
      RunRanks(context, p, [&](std::size_t rank) -> Program {
        Stamped stamped(p, 4);
        for (std::size_t i = 0; i < kIterations; ++i) {
          stamped.Verify(
              co_await stamped.Begin(*site, rank, rank, run, static_cast<std::int64_t>(i)));
        }
      });
      std::size_t found = 0;
      for (const CallRecord& record : RecordsIn(BlackBox::Get())) {
        if (record.site != 900 + p || record.run != run) {
          continue;
        }
        ++found;
        const std::int64_t opened = At(record, Moment::kOpened);
        const std::int64_t arrived = At(record, Moment::kArrived);
        const std::int64_t met = At(record, Moment::kMet);
        const std::int64_t moved = At(record, Moment::kMoved);
        const std::int64_t resumed = At(record, Moment::kResumed);
        context.Expect(
            0 < opened && opened <= arrived && arrived <= met && met <= moved && moved <= resumed,
            [&] {
              return std::to_string(p) + " ranks, relative to the arrival: opened " +
                     std::to_string(opened - arrived) + ", met " + std::to_string(met - arrived) +
                     ", moved " + std::to_string(moved - arrived) + ", resumed " +
                     std::to_string(resumed == 0 ? -1 : resumed - arrived) + " (-1: never)";
            });
      }
      context.Expect(found == p * kIterations, "every call of every rank is recorded");
    }
  }
}

/// A call that waits shows since when its meeting is open: what the diagnosis of a hang starts
/// from.
void AWaitingCallShowsThatItsMeetingIsOpen(Context& context) {
  const Site site = MakeSite(950, OneGroup(2), std::make_unique<StampWork>());
  const std::int64_t run = FreshRuns();
  RunThreads(context, 1, [&](std::size_t) {
    const auto call = [](CallSite& s, std::size_t rank, std::int64_t at) -> Program {
      Stamped stamped(2);
      stamped.Verify(co_await stamped.Begin(s, rank, rank, at, 0));
    };
    call(*site, 0, run).Start();
    for (const CallRecord& record : RecordsIn(BlackBox::Get())) {
      if (record.site == 950) {
        Check(At(record, Moment::kArrived) > 0 && At(record, Moment::kOpened) > 0,
              "it came and its meeting is open");
        Check(At(record, Moment::kMet) == 0 && At(record, Moment::kMoved) == 0 &&
                  At(record, Moment::kResumed) == 0,
              "nothing else has happened");
      }
    }
    call(*site, 1, run).Start();
  });
}

const Suite suite("recorder", {{"TheRingKeepsTheLatest", TheRingKeepsTheLatest},
                               {"DevicesHaveRingsOfTheirOwn", DevicesHaveRingsOfTheirOwn},
                               {"SnapshotsAreConsistent", SnapshotsAreConsistent},
                               {"ACallReachesItsMomentsInOrder", ACallReachesItsMomentsInOrder},
                               {"AWaitingCallShowsThatItsMeetingIsOpen",
                                AWaitingCallShowsThatItsMeetingIsOpen}});

}  // namespace
}  // namespace jaxcoll::testing::recorder_test

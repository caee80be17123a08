// tests/cpp/cuda_recorder_test.cc: calls on GPUs stand in the flight recorder.
#include <chrono>   // std::chrono
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <thread>   // std::thread
#include <vector>   // std::vector

#include "core/group_id.h"
#include "cuda.h"
#include "cuda/engine.h"
#include "host/recorder.h"

namespace jaxcoll::cuda::testing::cuda_recorder_test {
namespace {

std::int64_t At(const CallRecord& record, Moment moment) {
  return record.moments_ns.at(static_cast<std::size_t>(moment));
}

/// The latest call of each of the first devices, when all of them have gone on from it.
std::vector<CallRecord> LatestEnded(std::size_t count) {
  std::vector<CallRecord> latest(count);
  bool have_ended = false;
  for (int tries = 0; tries < 200 && !have_ended; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    have_ended = true;
    for (const CallRecord& record : RecordsIn(BlackBox::Get())) {
      if (record.device < kFirstId + static_cast<std::int64_t>(count)) {
        latest.at(static_cast<std::size_t>(record.device - kFirstId)) = record;
      }
    }
    for (const CallRecord& record : latest) {
      have_ended = have_ended && At(record, Moment::kResumed) != 0;
    }
  }
  return latest;
}

void CallsStandInTheRecorder(Context& context) {
  OpenEngine();
  Pair pair;
  const std::uint64_t before = Recorder::Get().num_calls();
  for (int i = 0; i < 2; ++i) {
    AllSucceed(context, OnRanks(2, [&](int rank) { return pair.Call(rank); }));
  }
  context.Expect(Recorder::Get().num_calls() == before + 4, "an entry for each call");
  const std::vector<CallRecord> latest = LatestEnded(2);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const CallRecord& record = latest.at(rank);
    context.Expect(record.site == 7 && record.rank == static_cast<std::int64_t>(rank) &&
                       record.group == GroupId(Devices(2)) && record.run == kRun,
                   "which call it is");
    context.Expect(record.iteration == 2, "the third time in a run");
    context.Expect(record.execution == latest.at(0).execution && record.execution < 0,
                   "the ranks of a process meet");
    context.Expect(At(record, Moment::kArrived) > 0 &&
                       At(record, Moment::kArrived) <= At(record, Moment::kMoved) &&
                       At(record, Moment::kMoved) <= At(record, Moment::kResumed),
                   "its moments");
  }
}

void WhoFailsStandsInTheRecorderAsFailed(Context& context) {
  Engine& engine = OpenEngine();
  Pair pair;
  AllSucceed(context, OnRanks(2, [&](int rank) { return pair.Call(rank); }));
  LatestEnded(2);
  engine.SetTimeout(200'000'000);
  const Status status = pair.Call(1);
  ExpectInAll(context, {status}, "\n  rank 0: last call, ended ");
  ExpectInAll(context, {status}, " ago: a collective of unknown origin (call ");
  const std::vector<CallRecord> latest = LatestEnded(2);
  context.Expect(At(latest.at(0), Moment::kMoved) != 0, "what ended before has not failed");
  context.Expect(At(latest.at(1), Moment::kMoved) == 0, "it has failed");
  pair.Call(1);
  const CallRecord refused = LatestEnded(2).at(1);
  context.Expect(refused.sequence == latest.at(1).sequence + 1 && At(refused, Moment::kMoved) == 0,
                 "a call of a group that has failed fails at once");
}

/// What stands there keeps the ranks of several processes apart from those of one.
void OccurrencesAreCountedForEachSite(Context& context) {
  Engine& engine = OpenEngine();
  const auto clique = engine.Find(Devices(2));
  const std::vector<std::int64_t> with_others{kFirstId, 99};
  const auto between = engine.Find(with_others);
  clique->OccurrencesOf(0, 7).fetch_add(2);
  clique->OccurrencesOf(1, 7).fetch_add(1);
  context.Expect(clique->OccurrencesOf(0, 7) == 2 && clique->OccurrencesOf(1, 7) == 1 &&
                     clique->OccurrencesOf(0, 8) == 0,
                 "by device and site");
  context.Expect(clique->Execution(1) < 0 && between->Execution(1) > 0, "who meets");
  context.Expect(clique->Execution(2) == clique->Execution(1) - 1 &&
                     between->Execution(2) == between->Execution(1) + 1,
                 "they count");
  engine.Reset();
  context.Expect(engine.Find(with_others)->Execution(1) != between->Execution(1),
                 "after a reset no call meets one from before");
}

const Suite suite("cuda_recorder",
                  {
                      {"CallsStandInTheRecorder", CallsStandInTheRecorder},
                      {"WhoFailsStandsInTheRecorderAsFailed", WhoFailsStandsInTheRecorderAsFailed},
                      {"OccurrencesAreCountedForEachSite", OccurrencesAreCountedForEachSite},
                  },
                  kEngineStops);

}  // namespace
}  // namespace jaxcoll::cuda::testing::cuda_recorder_test

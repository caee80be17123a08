// tests/cpp/cuda_peers_test.cc: sums over memory that the GPUs of a process read of each other.
#include <array>    // std::array
#include <chrono>   // std::chrono
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int32_t, std::int64_t
#include <memory>   // std::make_unique, std::unique_ptr
#include <string>   // std::string
#include <vector>   // std::vector

#include "cuda.h"
#include "cuda/collectives.h"
#include "cuda/engine.h"
#include "cuda/operation.h"
#include "cuda/peer_call.h"
#include "cuda/peer_seat.h"
#include "cuda/reductions.h"

namespace jaxcoll::cuda::testing::cuda_peers_test {
namespace {

/// A tree of two leaves, of so many numbers each, summed over peer memory.
std::unique_ptr<Operation> PeerSumOf(std::size_t count) {
  const Reduction ints{.type = NcclType::kI32, .op = NcclOp::kSum, .parts = 1};
  const Reduction complex{.type = NcclType::kF32, .op = NcclOp::kSum, .parts = 2};
  return std::make_unique<AllReduce>(
      std::vector<AllReduce::Leaf>{{.reduction = ints, .count = count, .bytes = 4 * count},
                                   {.reduction = complex, .count = count, .bytes = 8 * count}},
      /*is_small_sum=*/true);
}

void SmallSumsGoOverPeerMemory(Context& context) {
  Engine& engine = OpenEngine();
  const WithPeers peers(engine);
  const Runtime& runtime = engine.libraries().runtime;
  for (const std::size_t p : {2U, 3U, 5U}) {
    for (const std::size_t count : {3U, 20'000U}) {
      const auto site = SiteOf(PeerSumOf(count), p);
      std::vector<Ints> ints = Values(p, count);
      const std::vector<Ints> before = ints;
      std::vector<std::vector<float>> floats(p, std::vector<float>(2 * count, 0.5F));
      AllSucceed(context, OnRanks(p, [&](int rank) { return site->Initialize(rank, nullptr); }));
      TakeLog();
      constexpr int kCalls = 3;  // each on a stream of its own
      AllSucceed(context, OnRanks(p, [&](int rank) {
                   const auto at = static_cast<std::size_t>(rank);
                   Status status;
                   Stream stream = nullptr;
                   for (int call = 0; call < kCalls && status.ok(); ++call) {
                     runtime.stream_create_with_priority(&stream, kStreamNonBlocking, 0);
                     const std::array in{In(ints[at]), In(floats[at])};
                     const std::array out{Out(ints[at]), Out(floats[at])};
                     status = site->Execute(rank, stream, kRun, in, out);
                   }
                   runtime.stream_synchronize(stream);
                   return status;
                 }));
      const std::string log = TakeLog();
      const std::string way = count == 3 ? "one" : "two";
      context.Expect(Lines(log, "kernel jaxcoll_" + way + "_shot_i32") == kCalls * p &&
                         Lines(log, "kernel jaxcoll_" + way + "_shot_f32") == kCalls * p &&
                         Lines(log, "all_reduce") == 0,
                     log);
      const auto times = static_cast<std::int32_t>(p * p);  // by the second and third call
      for (std::size_t i = 0; i < count; ++i) {
        std::int32_t total = 0;
        for (const Ints& of_rank : before) {
          total += of_rank[i];
        }
        for (std::size_t rank = 0; rank < p; ++rank) {
          context.Expect(ints[rank][i] == total * times, "a sum");
          context.Expect(
              floats[rank][2 * i + 1] == 0.5F * static_cast<float>(p) * static_cast<float>(times),
              "an imaginary part");
        }
      }
    }
  }
}

void PeerMemoryIsUsedWhereItIsReached(Context& context) {
  Engine& engine = OpenEngine();
  const auto problem = [&](const std::vector<std::int64_t>& devices) {
    return engine.PeerProblem(devices);
  };
  context.Expect(problem(Devices(2)).starts_with("there are no kernels for it"),
                 problem(Devices(2)));
  const WithPeers peers(engine);
  context.Expect(problem(Devices(2)).empty(), problem(Devices(2)));
  context.Expect(problem({kFirstId, 99}).empty(), problem({kFirstId, 99}));
  const auto set_far = OfFake<void (*)(int)>("fake_cuda_set_far_device");
  set_far(2);
  context.Expect(problem(Devices(2)).empty(), problem(Devices(2)));
  context.Expect(problem(Devices(3)) == "device 0 can't read the memory of device 2",
                 problem(Devices(3)));
  const auto site = SiteOf(SmallGather(3), 3);
  AllSucceed(context, OnRanks(3, [&](int rank) { return site->Initialize(rank, nullptr); }));
  context.Expect(engine.Find(Devices(3))->SeatOf(0).peers == nullptr, "NCCL does it all there");
  set_far(-1);
  context.Expect(PeerSeat::Fits(NcclType::kF16, kPeerSlotBytes / 2) &&
                     !PeerSeat::Fits(NcclType::kF16, kPeerSlotBytes / 2 + 1),
                 "what fits");
}

/// CUDA can say so where it is not so.
void PeerMemoryIsProbed(Context& context) {
  Engine& engine = OpenEngine();
  const WithPeers peers(engine);
  engine.SetTimeout(300'000'000);
  const auto breaks = OfFake<void (*)(bool)>("fake_cuda_break_peers");
  breaks(true);
  const auto site = SiteOf(SmallGather(2), 2);
  const auto begun = std::chrono::steady_clock::now();
  ExpectInAll(context, OnRanks(2, [&](int rank) { return site->Initialize(rank, nullptr); }),
              "devices 40, 41: the probe of peer memory has not ended (JAXCOLL_CUDA_PEERS=0");
  context.Expect(std::chrono::steady_clock::now() - begun < std::chrono::seconds(5),
                 "it takes too long");
  breaks(false);
}

void WhoDoesNotComeToASumOverPeersIsNamed(Context& context) {
  Engine& engine = OpenEngine();
  const WithPeers peers(engine);
  const Runtime& runtime = engine.libraries().runtime;
  const auto site = SiteOf(PeerSumOf(4), 3);
  std::vector<Ints> ints(3, Ints(4, 1));
  std::vector<std::vector<float>> floats(3, std::vector<float>(8));
  std::array<int, 3> errors{};
  const auto run = [&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    Stream stream = nullptr;
    runtime.stream_create_with_priority(&stream, kStreamNonBlocking, 0);
    const std::array in{In(ints[at]), In(floats[at])};
    const std::array out{Out(ints[at]), Out(floats[at])};
    Status status = site->Initialize(rank, stream);
    status = status.ok() ? site->Execute(rank, stream, kRun, in, out) : status;
    errors.at(at) = runtime.stream_synchronize(stream);
    return status;
  };
  AllSucceed(context, OnRanks(3, run));
  engine.SetTimeout(200'000'000);
  const auto begun = std::chrono::steady_clock::now();
  AllSucceed(context, OnRanks(2, run));  // which are on the stream by then
  context.Expect(std::chrono::steady_clock::now() - begun < std::chrono::seconds(5),
                 "the kernels wait for ever");
  context.Expect(errors[0] != 0 && errors[1] != 0, "what waits for the streams gets an error");
  ExpectInAll(context, {engine.Find(Devices(3))->Failure()},
              " s for rank 2 (device 42); arrived: 0 (device 40), 1 (device 41)");
}

const Suite suite("cuda_peers",
                  {
                      {"SmallSumsGoOverPeerMemory", SmallSumsGoOverPeerMemory},
                      {"PeerMemoryIsUsedWhereItIsReached", PeerMemoryIsUsedWhereItIsReached},
                      {"PeerMemoryIsProbed", PeerMemoryIsProbed},
                      {"WhoDoesNotComeToASumOverPeersIsNamed",
                       WhoDoesNotComeToASumOverPeersIsNamed},
                  },
                  kEngineStops);

}  // namespace
}  // namespace jaxcoll::cuda::testing::cuda_peers_test

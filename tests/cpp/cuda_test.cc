// tests/cpp/cuda_test.cc: the engine for GPUs: its libraries, collectives, rings, communicators,
// and the first run of a program.
#include <array>       // std::array
#include <chrono>      // std::chrono
#include <cstddef>     // std::byte, std::size_t
#include <cstdint>     // std::int32_t
#include <filesystem>  // std::filesystem
#include <memory>      // std::make_unique
#include <set>         // std::set
#include <string>      // std::string, std::to_string
#include <thread>      // std::thread
#include <vector>      // std::vector

#include "cuda.h"
#include "cuda/block_path.h"
#include "cuda/collectives.h"
#include "cuda/engine.h"
#include "cuda/libraries.h"
#include "cuda/reductions.h"
#include "cuda/ring.h"
#include "cuda/ring_matmul.h"
#include "cuda/site.h"

namespace jaxcoll::cuda::testing::cuda_test {
namespace {

// ---- Finding libraries --------------------------------------------------------------------------

void LibrariesSayWhatIsMissing(Context& context) {
  const auto problem = [](const LibraryPaths& paths) { return Libraries().Open(paths).message; };
  const auto expect = [&](const std::string& text, const std::string& part) {
    context.Expect(text.find(part) != std::string::npos, [&] { return text; });
  };
  LibraryPaths paths = FakePaths();
  context.Expect(problem(paths).empty(), [&] { return problem(paths); });
  paths.runtime = {"/nowhere/libcudart.so.13"};
  expect(problem(paths), "CUDA's runtime can't be used (/nowhere/libcudart.so.13");
  paths = FakePaths();
  paths.nccl = {};
  expect(problem(paths), "NCCL can't be used (no path is known)");
  paths.nccl = {"libm.so.6"};
  expect(problem(paths), "ncclGetVersion is missing");
  paths.nccl = {"/nowhere/libnccl.so.2", FAKE_CUDA};  // the second one is as good
  context.Expect(problem(paths).empty(), [&] { return problem(paths); });
  paths.blas = {};
  Libraries libraries;
  context.Expect(libraries.Open(paths).ok(), "the collectives need no cuBLASLt");
  expect(libraries.blas_problem, "no path");
  context.Expect(NcclVersionText(22707) == "2.27.7", "NCCL's version");
  const auto set_version = OfFake<void (*)(int)>("fake_cuda_set_nccl_version");
  int opened = 0;
  OfFake<int (*)(int*)>("ncclGetVersion")(&opened);
  set_version(22506);
  expect(problem(FakePaths()), "NCCL is 2.25.6, older than 2.26.0");
  Libraries older;
  set_version(22809);
  context.Expect(older.Open(FakePaths()).ok() && !older.can_revoke(), "NCCL 2.28");
  set_version(opened);
  context.Expect(older.Open(FakePaths()).ok() && older.can_revoke() == (opened >= 22900),
                 "the NCCL of this run");
}

void WhatIsOpenAlreadyIsTaken(Context& context) {
  const auto opened = OfFake<int (*)(int*)>("ncclGetVersion");
  const std::string copy = std::string(FAKE_CUDA) + ".copy";
  std::filesystem::copy_file(FAKE_CUDA, copy, std::filesystem::copy_options::overwrite_existing);
  LibraryPaths paths = FakePaths();
  paths.nccl = {copy, FAKE_CUDA};
  Libraries libraries;
  context.Expect(libraries.Open(paths).ok() && libraries.nccl.get_version == opened,
                 "another copy of a library that is there");
  paths.nccl = {copy};
  context.Expect(libraries.Open(paths).ok() && libraries.nccl.get_version != opened,
                 "the copy is one of its own");
  std::filesystem::remove(copy);
}

void ReductionsAreThoseOfNccl(Context& context) {
  const auto has = [](DType dtype, ReduceOp op, std::size_t ranks) {
    return ReductionOf(dtype, op, ranks).has_value();
  };
  context.Expect(has(DType::kF32, ReduceOp::kMean, 4) && !has(DType::kF32, ReduceOp::kMean, 3),
                 "a mean multiplies before it adds: exact for powers of two alone");
  context.Expect(!has(DType::kI32, ReduceOp::kMean, 4), "a mean of integers");
  context.Expect(!has(DType::kI16, ReduceOp::kSum, 2) && !has(DType::kU16, ReduceOp::kMax, 2),
                 "16-bit integers");
  context.Expect(!has(DType::kI32, ReduceOp::kAnd, 2) && has(DType::kBool, ReduceOp::kAnd, 2),
                 "bitwise");
  context.Expect(!has(DType::kC64, ReduceOp::kProd, 2) && !has(DType::kC64, ReduceOp::kMax, 2),
                 "complex");
  const auto complex = ReductionOf(DType::kC128, ReduceOp::kSum, 3);
  context.Expect(complex && complex->parts == 2 && complex->type == NcclType::kF64, "c128 sum");
  const auto any = ReductionOf(DType::kBool, ReduceOp::kOr, 3);
  context.Expect(any && any->op == NcclOp::kMax && any->type == NcclType::kU8, "bool or");
}

// ---- Collectives --------------------------------------------------------------------------------

void TreesAreReducedInPlaceInOneGroup(Context& context) {
  for (const std::size_t p : {2U, 3U, 5U}) {
    OpenEngine();
    const Reduction sum{.type = NcclType::kI32, .op = NcclOp::kSum, .parts = 1};
    const Reduction wide{.type = NcclType::kF32, .op = NcclOp::kSum, .parts = 2};
    const auto site = SiteOf(std::make_unique<AllReduce>(std::vector<AllReduce::Leaf>{
                                 {.reduction = sum, .count = 11, .bytes = 44},
                                 {.reduction = sum, .count = 0, .bytes = 0},
                                 {.reduction = wide, .count = 2, .bytes = 16}}),
                             p);
    std::vector<Ints> ints = Values(p, 11);
    const std::vector<Ints> before = ints;
    std::vector<std::vector<float>> floats(p, {1, 2, 3, 4});
    Ints none;
    AllSucceed(context, OnRanks(p, [&](int rank) { return site->Initialize(rank, nullptr); }));
    TakeLog();
    AllSucceed(context, OnRanks(p, [&](int rank) {
                 const auto at = static_cast<std::size_t>(rank);
                 const std::array in{In(ints[at]), In(none), In(floats[at])};
                 const std::array out{Out(ints[at]), Out(none), Out(floats[at])};
                 return site->Execute(rank, nullptr, kRun, in, out);
               }));
    const std::string log = TakeLog();
    context.Expect(Lines(log, "all_reduce") == 2 * p && Lines(log, "type 7 op 0 grouped") == p &&
                       Lines(log, "group of") == p && Lines(log, "group of 2") == p,
                   log);
    for (std::size_t i = 0; i < 11; ++i) {
      std::int32_t total = 0;
      for (const Ints& of_rank : before) {
        total += of_rank[i];
      }
      for (const Ints& of_rank : ints) {
        context.Expect(of_rank[i] == total, "a sum");
      }
    }
    for (const auto& of_rank : floats) {
      context.Expect(of_rank[3] == 4 * static_cast<float>(p), "an imaginary part");
    }
  }
}

void CopiesGoWhereTheyBelong(Context& context) {
  for (const std::size_t p : {2U, 3U, 5U}) {
    OpenEngine();
    constexpr std::size_t kBlock = 6;
    const std::vector<Ints> whole = Values(p, p * kBlock);
    const std::vector<Ints> blocks = Values(p, kBlock);
    const auto poisoned = [&](std::size_t count) { return std::vector<Ints>(p, Ints(count, -1)); };
    auto results = poisoned(p * kBlock);
    Run(context, std::make_unique<AllGather>(kBlock * 4, p), blocks, results);
    for (std::size_t rank = 0; rank < p; ++rank) {
      for (std::size_t i = 0; i < p * kBlock; ++i) {
        context.Expect(results[rank][i] == blocks[i / kBlock][i % kBlock], "all_gather");
      }
    }
    results = poisoned(p * kBlock);
    Run(context, std::make_unique<AllToAll>(kBlock * 4, p), whole, results);
    for (std::size_t rank = 0; rank < p; ++rank) {
      for (std::size_t i = 0; i < p * kBlock; ++i) {
        context.Expect(results[rank][i] == whole[i / kBlock][rank * kBlock + i % kBlock],
                       "all_to_all");
      }
    }
    results = poisoned(kBlock);
    const Reduction sum{.type = NcclType::kI32, .op = NcclOp::kSum, .parts = 1};
    Run(context, std::make_unique<ReduceScatter>(sum, kBlock, kBlock * 4, p), whole, results);
    for (std::size_t rank = 0; rank < p; ++rank) {
      for (std::size_t i = 0; i < kBlock; ++i) {
        std::int32_t total = 0;
        for (const Ints& of_rank : whole) {
          total += of_rank[rank * kBlock + i];
        }
        context.Expect(results[rank][i] == total, "reduce_scatter");
      }
    }
    results = poisoned(kBlock);
    std::vector<int> sources(p, -1);  // rank 0 gets its own, the last nothing, the others shift
    sources[0] = 0;
    for (std::size_t rank = 1; rank + 1 < p; ++rank) {
      sources[rank] = static_cast<int>(rank) + 1;
    }
    Run(context, std::make_unique<Permute>(sources, kBlock * 4), blocks, results);
    for (std::size_t rank = 0; rank < p; ++rank) {
      const int source = sources[rank];
      context.Expect(
          results[rank] == (source < 0 ? Ints(kBlock) : blocks[static_cast<std::size_t>(source)]),
          "ppermute");
    }
    results = poisoned(kBlock);
    Run(context, std::make_unique<Broadcast>(static_cast<int>(p) - 1, kBlock * 4), blocks, results);
    for (const Ints& result : results) {
      context.Expect(result == blocks[p - 1], "broadcast");
    }
  }
}

// ---- Rings --------------------------------------------------------------------------------------

void RingsSendWhatIsThere(Context& context) {
  for (std::size_t p = 2; p <= 9; ++p) {
    std::vector<std::vector<GatherStep>> steps;
    for (std::size_t rank = 0; rank < p; ++rank) {
      steps.push_back(GatherSteps(rank, p));
    }
    context.Expect(steps[0].size() == p / 2 + 1, "the number of steps");
    for (std::size_t rank = 0; rank < p; ++rank) {
      std::set<std::size_t> here{rank};
      std::multiset<std::size_t> multiplied;
      for (std::size_t step = 0; step < steps[rank].size(); ++step) {
        for (const std::size_t owner : steps[rank][step].products) {
          context.Expect(here.count(owner) == 1, "a product of a block that is not there");
          multiplied.insert(owner);
        }
        std::set<std::size_t> coming;
        for (const Transfer& transfer : steps[rank][step].transfers) {
          context.Expect(here.count(transfer.sent) == 1, "a block is sent before it came");
          bool is_expected = false;
          for (const Transfer& other : steps[transfer.to][step].transfers) {
            is_expected |= other.from == rank && other.received == transfer.sent;
          }
          context.Expect(is_expected, "who gets a block expects another");
          coming.insert(transfer.received);
        }
        here.insert(coming.begin(), coming.end());
      }
      context.Expect(multiplied.size() == p && here.size() == p, "each block once");
    }
    for (const bool is_forward : {false, true}) {
      std::vector<std::set<std::size_t>> sums(p);  // of each owner, whose products it has
      for (std::size_t step = 0; step < p; ++step) {
        for (std::size_t rank = 0; rank < p; ++rank) {
          const ScatterStep now = ScatterSteps(rank, p, is_forward)[step];
          context.Expect(sums[now.owner].insert(rank).second, "a product is added twice");
          if (step + 1 < p) {
            const ScatterStep next = ScatterSteps(now.to, p, is_forward)[step + 1];
            context.Expect(next.owner == now.owner && next.from == rank, "a sum goes elsewhere");
          } else {
            context.Expect(now.owner == rank, "a sum ends elsewhere");
          }
        }
      }
    }
  }
}

/// Matrices of small integers as floats, so that any order of sums gives the same.
std::vector<float> Matrix(std::size_t count, std::size_t seed) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>((i * 37 + seed * 11) % 13) - 6;
  }
  return values;
}

void MultiplyInRing(Context& context, const RingShape& shape) {
  const std::size_t p = shape.num_ranks;
  const bool gathers_rows = shape.kind == RingKind::kGatherRows;
  const bool gathers_inner = shape.kind == RingKind::kGatherInner;
  const bool gathers = gathers_rows || gathers_inner;
  const std::size_t all_inner = shape.inner * (gathers_inner ? p : 1);
  const std::size_t all_rows = shape.rows * (shape.kind == RingKind::kScatterRows ? p : 1);
  const std::size_t all_columns = shape.columns * (shape.kind == RingKind::kScatterColumns ? p : 1);
  std::vector<std::vector<float>> xs;
  std::vector<std::vector<float>> ws;
  for (std::size_t rank = 0; rank < p; ++rank) {
    xs.push_back(Matrix(shape.batch * all_rows * shape.inner, rank + 1));
    ws.push_back(Matrix(all_inner * all_columns, rank + 50));
  }
  // Element (b, i, j) of a rank's x and the part of a rank's w from row `first` on.
  const auto product = [&](std::size_t x_rank, std::size_t w_rank, std::size_t b, std::size_t i,
                           std::size_t j, std::size_t first = 0) {
    float total = 0;
    for (std::size_t k = 0; k < shape.inner; ++k) {
      const std::size_t at_x =
          shape.x_is_transposed ? k * all_rows + i : (b * all_rows + i) * shape.inner + k;
      const std::size_t at_w =
          shape.w_is_transposed ? j * all_inner + first + k : (first + k) * all_columns + j;
      total += xs[x_rank][at_x] * ws[w_rank][at_w];
    }
    return total;
  };
  const auto site = SiteOf(MakeRingMatmul(shape), p);
  const std::size_t y_rows = shape.rows * (gathers_rows ? p : 1);
  const std::size_t block = shape.batch * shape.rows * (gathers ? shape.inner : shape.columns);
  std::vector<std::vector<float>> ys(
      p, std::vector<float>(shape.batch * y_rows * shape.columns, -1e6F));
  const Runtime& runtime = Engine::Get().libraries().runtime;
  static std::array<std::array<Stream, 2>, kMostRanks> streams{};
  // One call after the other, on two streams in turn, and nobody waits for the others between: the
  // first ones with other operands, so that what comes too early or late is seen.
  constexpr std::size_t kCalls = 4;
  AllSucceed(context, OnRanks(p, [&](int rank) {
               const auto at = static_cast<std::size_t>(rank);
               for (Stream& stream : streams[at]) {
                 if (stream == nullptr) {
                   runtime.stream_create_with_priority(&stream, kStreamNonBlocking, 0);
                 }
               }
               Status status = site->Initialize(rank, streams[at][0]);
               struct Buffers {
                 std::vector<float> source, slots, x, w, y;
                 std::vector<std::byte> workspace;
               };
               std::vector<Buffers> all(kCalls);
               for (std::size_t call = 0; call < kCalls && status.ok(); ++call) {
                 const Stream stream = streams[at][call % 2];
                 const bool is_last = call + 1 == kCalls;
                 Buffers& with = all[call];
                 with.source = xs[at];
                 for (float& element : with.source) {
                   element += is_last ? 0 : 100 * static_cast<float>(call + 1);
                 }
                 with.slots.assign(block * (p - 1), -1e6F);
                 with.workspace.resize(shape.workspace_bytes);
                 with.y = ys[at];
                 // Computed on the stream right before.
                 with.x.assign(xs[at].size(), -1e6F);
                 with.w.assign(ws[at].size(), -1e6F);
                 runtime.memcpy_async(with.x.data(), with.source.data(), In(with.x).bytes,
                                      kMemcpyDeviceToDevice, stream);
                 runtime.memcpy_async(with.w.data(), ws[at].data(), In(with.w).bytes,
                                      kMemcpyDeviceToDevice, stream);
                 const std::array in{In(with.x), In(with.w)};
                 const std::array out{is_last ? Out(ys[at]) : Out(with.y), Out(with.slots),
                                      Out(with.workspace)};
                 status = site->Execute(rank, stream, kRun, in, out);
                 if (status.ok()) {  // as XLA, whose next kernels may use the memory
                   runtime.memset_async(with.x.data(), 0xff, In(with.x).bytes, stream);
                   runtime.memset_async(with.slots.data(), 0xff, In(with.slots).bytes, stream);
                 }
               }
               int error = 0;
               for (const Stream stream : streams[at]) {
                 error = std::max(error, runtime.stream_synchronize(stream));
               }
               return status.ok() && error != 0 ? Internal("the stream has failed") : status;
             }));
  std::size_t num_wrong = 0;
  for (std::size_t rank = 0; rank < p; ++rank) {
    for (std::size_t b = 0; b < shape.batch; ++b) {
      for (std::size_t i = 0; i < y_rows; ++i) {
        for (std::size_t j = 0; j < shape.columns; ++j) {
          float expected = 0;
          if (gathers_inner) {
            for (std::size_t other = 0; other < p; ++other) {
              expected += product(other, rank, b, i, j, other * shape.inner);
            }
          } else if (gathers_rows) {
            expected = product(i / shape.rows, rank, b, i % shape.rows, j);
          } else {
            const bool rows = shape.kind == RingKind::kScatterRows;
            for (std::size_t other = 0; other < p; ++other) {
              expected += product(other, other, b, rows ? rank * shape.rows + i : i,
                                  rows ? j : rank * shape.columns + j);
            }
          }
          num_wrong += ys[rank][(b * y_rows + i) * shape.columns + j] == expected ? 0 : 1;
        }
      }
    }
  }
  context.Expect(num_wrong == 0, [&] {
    return std::to_string(num_wrong) + " wrong: kind " +
           std::to_string(static_cast<int>(shape.kind)) + ", " + std::to_string(p) + " ranks, " +
           std::to_string(shape.batch) + " x " + std::to_string(shape.rows);
  });
}

void MultiplyInRings(Context& context) {
  for (const std::size_t p : {2U, 3U, 4U, 5U}) {
    Engine::Get().Reset();
    for (const RingKind kind : {RingKind::kGatherRows, RingKind::kGatherInner,
                                RingKind::kScatterRows, RingKind::kScatterColumns}) {
      for (const auto& [batch, rows] : {std::pair{1U, 5U}, std::pair{1U, 1U}, std::pair{3U, 2U}}) {
        for (const bool is_transposed : {false, true}) {
          MultiplyInRing(context, {.kind = kind,
                                   .num_ranks = p,
                                   .batch = batch,
                                   .rows = rows,
                                   .inner = 4,
                                   .columns = 3,
                                   .x_is_transposed = is_transposed && batch == 1,
                                   .w_is_transposed = is_transposed,
                                   .workspace_bytes = 64});
        }
      }
    }
  }
}

void MatrixProductsOfRings(Context& context) {
  OpenEngine();
  TakeLog();
  MultiplyInRings(context);
  const std::string log = TakeLog();
  context.Expect(Lines(log, " send ") > 0 && Lines(log, "kernel") == 0, "by NCCL");
}

void BlocksOfRingsGoOverPeerMemory(Context& context) {
  Engine& engine = OpenEngine();
  const WithPeers peers(engine);
  TakeLog();
  MultiplyInRings(context);
  const std::string log = TakeLog();
  context.Expect(Lines(log, " send ") == 0 && Lines(log, "kernel jaxcoll_say") > 0, "not by NCCL");
}

/// In each call: for room, and for what the other sends; and back.
void EachCallAwaitsRoom(Context& context) {
  Engine& engine = OpenEngine();
  const WithPeers peers(engine);
  MultiplyInRing(context, {.num_ranks = 2, .rows = 2, .inner = 2, .columns = 2});
  TakeLog();
  MultiplyInRing(context, {.num_ranks = 2, .rows = 2, .inner = 2, .columns = 2});
  const std::string log = TakeLog();
  constexpr std::size_t kCalls = 4;
  context.Expect(Lines(log, "kernel jaxcoll_await") == 2 * 2 * kCalls &&
                     Lines(log, "kernel jaxcoll_say") == 2 * 2 * kCalls,
                 log);
}

void BlocksBeyondAWindowGoByNccl(Context& context) {
  Engine& engine = OpenEngine();
  const WithPeers peers(engine);
  const auto site = SiteOf(SmallGather(2), 2);
  constexpr std::array<std::size_t, 4> kBytes{1000, 2000, 3 << 20, kMostSlotBytes + 1};
  std::array<std::array<BlockSeat*, kBytes.size()>, 2> seats{};
  AllSucceed(context, OnRanks(2, [&](int rank) {
               Status status = site->Initialize(rank, nullptr);
               for (std::size_t i = 0; i < kBytes.size() && status.ok(); ++i) {
                 status = engine.Find(Devices(2))
                              ->OpenBlocks(rank, nullptr, kBytes.at(i), engine.limits(),
                                           seats.at(static_cast<std::size_t>(rank)).at(i));
               }
               return status;
             }));
  for (const auto& [small, alike, large, beyond] : seats) {
    context.Expect(small != nullptr && small == alike, "a window of one size");
    context.Expect(large != nullptr && large != small, "a window of another size");
    context.Expect(beyond == nullptr, "a window that is too large");
  }
}

/// What two ranks send blocks with, and a stream of each; another one of the first rank.
struct BlockSeats {
  explicit BlockSeats(Context& context) : site(SiteOf(SmallGather(2), 2)) {
    for (Stream& stream : streams) {
      libraries.runtime.stream_create_with_priority(&stream, kStreamNonBlocking, 0);
    }
    AllSucceed(context, OnRanks(2, [&](int rank) {
                 Status status = site->Initialize(rank, nullptr);
                 return status.ok() ? engine.Find(Devices(2))
                                          ->OpenBlocks(rank, nullptr, 1000, engine.limits(),
                                                       seats.at(static_cast<std::size_t>(rank)))
                                    : status;
               }));
  }

  Engine& engine = OpenEngine();
  const Libraries& libraries = engine.libraries();
  WithPeers peers{engine};
  std::array<Stream, 3> streams{};
  std::array<BlockSeat*, 2> seats{};
  std::unique_ptr<Site> site;
};

void WhoSendsBlocksWaitsForRoom(Context& context) {
  const BlockSeats with(context);
  const Libraries& libraries = with.libraries;
  const auto& [first, second] = with.seats;
  const auto& [stream, other, unused] = with.streams;
  const std::array<int, 2> blocks{7, 8};
  for (const int& block : blocks) {
    first->Begin(libraries, stream);
    first->AwaitRoom(libraries, stream);
    first->Send(libraries, stream, &block, sizeof(block), 1, 16, 0);
    first->End(libraries, stream);
  }
  int got = 0;
  for (const int block : blocks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // for the next one to come early
    second->Begin(libraries, other);
    second->AwaitArrival(libraries, other, 0);
    libraries.runtime.memcpy_async(&got, second->slots() + 16, sizeof(got), kMemcpyDeviceToDevice,
                                   other);
    libraries.runtime.stream_synchronize(other);
    context.Expect(got == block, [&] { return "got " + std::to_string(got); });
    second->End(libraries, other);
  }
  libraries.runtime.stream_synchronize(stream);
}

/// Operands stay until they are sent: XLA uses their memory for what comes next on its stream.
void ACallEndsWhenItsBlocksAreSent(Context& context) {
  const BlockSeats with(context);
  const Libraries& libraries = with.libraries;
  const auto& [first, second] = with.seats;
  const auto& [stream, other, unused] = with.streams;
  const Seat& seat = with.engine.Find(Devices(2))->SeatOf(0);
  const int block = 1;
  const std::array parcels{Parcel{.to = 1,
                                  .from = 1,
                                  .sent = &block,
                                  .received = first->slots(),
                                  .bytes = sizeof(block),
                                  .offset = 0,
                                  .arrival = 0}};
  for (int call = 0; call < 2; ++call) {
    Event begun = nullptr;
    Event ended = nullptr;
    libraries.runtime.event_create_with_flags(&begun, kEventDisableTiming);
    libraries.runtime.event_create_with_flags(&ended, kEventDisableTiming);
    BlockPath path(libraries, seat, first, stream);
    path.Begin(begun);
    path.Exchange(parcels, ended);
    path.End(ended);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  context.Expect(libraries.runtime.stream_query(stream) == kCudaErrorNotReady,
                 "the second one has no room yet");
  second->Begin(libraries, other);
  second->End(libraries, other);
  context.Expect(libraries.runtime.stream_synchronize(stream) == 0, "an error");
}

void CallsOfADeviceTakeTheSlotsInTurn(Context& context) {
  const BlockSeats with(context);
  const Libraries& libraries = with.libraries;
  const auto& [first, second] = with.seats;
  const auto& [stream, of_second, other] = with.streams;
  first->Begin(libraries, stream);
  first->AwaitArrival(libraries, stream, 0);
  first->End(libraries, stream);
  first->Begin(libraries, other);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  context.Expect(libraries.runtime.stream_query(other) == kCudaErrorNotReady, "too early");
  const int block = 1;
  second->Begin(libraries, of_second);
  second->Send(libraries, of_second, &block, sizeof(block), 0, 0, 0);
  context.Expect(libraries.runtime.stream_synchronize(other) == 0, "an error");
}

void ProductsOfADeviceShareAHandle(Context& context) {
  OpenEngine();
  TakeLog();
  for (int product = 0; product < 2; ++product) {
    MultiplyInRing(context, {.num_ranks = 2, .rows = 2, .inner = 2, .columns = 2});
  }
  const std::string log = TakeLog();
  context.Expect(Lines(log, "blas handle") <= 2, log);
}

// ---- Communicators ------------------------------------------------------------------------------
void CommunicatorsAreMadeOnceAndTogether(Context& context) {
  Engine& engine = OpenEngine();
  const auto first = SiteOf(SmallGather(4), 4);
  const auto second = SiteOf(SmallGather(4), 4);
  TakeLog();
  for (int run = 0; run < 2; ++run) {
    AllSucceed(context, OnRanks(4, [&](int rank) {
                 Status status = first->Initialize(rank, nullptr);
                 return status.ok() ? second->Initialize(rank, nullptr) : status;
               }));
  }
  std::string log = TakeLog();
  context.Expect(Lines(log, "get_unique_id") == 1 && Lines(log, "init rank") == 4,
                 [&] { return log; });
  // A first call of each, all in one group.
  context.Expect(Lines(log, "all_reduce 1 type 2 op 0 grouped") == 4, [&] { return log; });
  for (int rank = 0; rank < 4; ++rank) {
    const std::string line = "init rank " + std::to_string(rank) + " of 4 on device " +
                             std::to_string(rank) + " grouped";
    context.Expect(Lines(log, line) == 1, line);
  }
  // The same devices in another order are another group.
  Site turned(engine, 8, {{kFirstId + 1, kFirstId}, {kFirstId + 3, kFirstId + 2}}, SmallGather(2));
  AllSucceed(context, OnRanks(4, [&](int rank) { return turned.Initialize(rank, nullptr); }));
  log = TakeLog();
  context.Expect(Lines(log, "get_unique_id") == 2 &&
                     Lines(log, "init rank 1 of 2 on device 0 grouped") == 1 &&
                     Lines(log, "init rank 0 of 2 on device 3 grouped") == 1,
                 [&] { return log; });
  engine.Reset();
  log = TakeLog();
  context.Expect(Lines(log, "abort") == 8, [&] { return log; });
  AllSucceed(context, OnRanks(4, [&](int rank) { return first->Initialize(rank, nullptr); }));
  log = TakeLog();
  context.Expect(Lines(log, "init rank") == 4, [&] { return log; });
  const Status unknown = first->Initialize(4, nullptr);
  context.Expect(unknown.message.find("in none of the groups") != std::string::npos,
                 [&] { return unknown.message; });
}

// ---- The first run ------------------------------------------------------------------------------

void DevicesStartTogether(Context& context) {
  Engine& engine = OpenEngine();
  Stages stages;
  // One group has nothing to do with the other one, and waits for its devices all the same.
  Site site(engine, 7, {{kFirstId}, {kFirstId + 1, kFirstId + 2}},
            std::make_unique<Staged>(stages));
  std::array<int, 3> prepared{};
  std::array<int, 3> called{};
  AllSucceed(context, OnRanks(3, [&](int rank) {
               const auto at = static_cast<std::size_t>(rank);
               Status status = site.Initialize(rank, nullptr);
               prepared.at(at) = stages.num_prepared;
               if (!status.ok() || rank == 0) {
                 return status;
               }
               std::this_thread::sleep_for(std::chrono::milliseconds(rank == 1 ? 100 : 0));
               ++stages.num_calling;
               status = site.Execute(rank, nullptr, kRun, {}, {});
               called.at(at) = stages.num_called;
               return status;
             }));
  context.Expect(prepared == std::array{3, 3, 3}, "one begins before all are prepared");
  context.Expect(stages.fewest_calling == 2, "one calls before the others of its group have come");
  context.Expect(called == std::array{0, 2, 2}, "one goes on before the others have called");
  AllSucceed(context,
             {site.Initialize(2, nullptr), site.Execute(2, nullptr, kRun, {}, {})});  // alone
}

void OneThatIsNotPreparedFailsAll(Context& context) {
  Engine& engine = OpenEngine();
  Stages stages{.fails = true};
  Site site(engine, 7, {{kFirstId}, {kFirstId + 1}, {kFirstId + 2}},
            std::make_unique<Staged>(stages));
  for (const Status& status :
       OnRanks(3, [&](int rank) { return site.Initialize(rank, nullptr); })) {
    context.Expect(status.message == "no kernel", [&] { return status.message; });
  }
}

void WrongBuffersAreRefused(Context& context) {
  OpenEngine();
  const auto site = SiteOf(SmallGather(2), 2);
  const Status early = site->Execute(0, nullptr, kRun, {}, {});
  ExpectInAll(context, {early}, "CUDA device 0 was not initialized");
  AllSucceed(context, OnRanks(2, [&](int rank) { return site->Initialize(rank, nullptr); }));
  Ints one(1);
  Ints three(3);
  const std::array in{In(one)};
  const std::array out{Out(three)};
  ExpectInAll(context, {site->Execute(0, nullptr, kRun, in, out)},
              "result 0: expected 8 bytes, got 12");
  ExpectInAll(context, {site->Execute(0, nullptr, kRun, {}, out)}, "wrong number of buffers");
}

const Suite suite("cuda",
                  {
                      {"LibrariesSayWhatIsMissing", LibrariesSayWhatIsMissing},
                      {"WhatIsOpenAlreadyIsTaken", WhatIsOpenAlreadyIsTaken},
                      {"ReductionsAreThoseOfNccl", ReductionsAreThoseOfNccl},
                      {"TreesAreReducedInPlaceInOneGroup", TreesAreReducedInPlaceInOneGroup},
                      {"CopiesGoWhereTheyBelong", CopiesGoWhereTheyBelong},
                      {"RingsSendWhatIsThere", RingsSendWhatIsThere},
                      {"MatrixProductsOfRings", MatrixProductsOfRings},
                      {"BlocksOfRingsGoOverPeerMemory", BlocksOfRingsGoOverPeerMemory},
                      {"EachCallAwaitsRoom", EachCallAwaitsRoom},
                      {"BlocksBeyondAWindowGoByNccl", BlocksBeyondAWindowGoByNccl},
                      {"WhoSendsBlocksWaitsForRoom", WhoSendsBlocksWaitsForRoom},
                      {"ACallEndsWhenItsBlocksAreSent", ACallEndsWhenItsBlocksAreSent},
                      {"CallsOfADeviceTakeTheSlotsInTurn", CallsOfADeviceTakeTheSlotsInTurn},
                      {"ProductsOfADeviceShareAHandle", ProductsOfADeviceShareAHandle},
                      {"CommunicatorsAreMadeOnceAndTogether", CommunicatorsAreMadeOnceAndTogether},
                      {"DevicesStartTogether", DevicesStartTogether},
                      {"OneThatIsNotPreparedFailsAll", OneThatIsNotPreparedFailsAll},
                      {"WrongBuffersAreRefused", WrongBuffersAreRefused},
                  },
                  kEngineStops);

}  // namespace
}  // namespace jaxcoll::cuda::testing::cuda_test

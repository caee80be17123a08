// tests/cpp/cuda_test.cc: the engine for GPUs, on a CUDA runtime, NCCL and cuBLASLt that work on
// ordinary memory (fake_cuda.cc). Threads are the ranks, each of a local device of its own.
#include <dlfcn.h>  // dlopen, dlsym

#include <algorithm>   // std::min
#include <array>       // std::array
#include <atomic>      // std::atomic
#include <chrono>      // std::chrono
#include <cstddef>     // std::byte, std::size_t
#include <cstdint>     // std::int32_t, std::int64_t
#include <filesystem>  // std::filesystem
#include <functional>  // std::function
#include <memory>      // std::make_unique, std::unique_ptr
#include <numeric>     // std::iota
#include <set>         // std::set
#include <span>        // std::span
#include <string>      // std::string, std::to_string
#include <thread>      // std::thread
#include <utility>     // std::move
#include <vector>      // std::vector

#include "core/group_id.h"
#include "cuda/collectives.h"
#include "cuda/engine.h"
#include "cuda/libraries.h"
#include "cuda/peer_call.h"
#include "cuda/peer_seat.h"
#include "cuda/recording.h"
#include "cuda/reductions.h"
#include "cuda/ring.h"
#include "cuda/ring_matmul.h"
#include "cuda/site.h"
#include "host/recorder.h"
#include "host/recorder_door.h"
#include "testing.h"

namespace jaxcoll::testing {
namespace {

using namespace jaxcoll::cuda;

constexpr std::int64_t kFirstId = 40;  // global ids and CUDA's numbers differ
constexpr int kMostRanks = 5;
constexpr std::int64_t kLong = 20'000'000'000;
constexpr std::int64_t kRun = 3;

LibraryPaths FakePaths() {
  return {.runtime = {FAKE_CUDA}, .driver = {FAKE_CUDA}, .nccl = {FAKE_CUDA}, .blas = {FAKE_CUDA}};
}

std::vector<std::int64_t> Devices(std::size_t count) {
  std::vector<std::int64_t> ids(count);
  std::iota(ids.begin(), ids.end(), kFirstId);
  return ids;
}

Engine& OpenEngine() {
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

std::string TakeLog() { return OfFake<const char* (*)()>("fake_cuda_take_log")(); }

std::size_t Lines(const std::string& log, const std::string& what) {
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

/// Runs a thread for each rank, each of which returns a Status; returns these.
std::vector<Status> OnRanks(std::size_t count, const std::function<Status(int)>& run) {
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

bool AllSucceed(Context& context, const std::vector<Status>& statuses) {
  bool ok = true;
  for (const Status& status : statuses) {
    ok = context.Expect(status.ok(), [&] { return status.message; }) && ok;
  }
  return ok;
}

std::unique_ptr<Site> SiteOf(std::unique_ptr<Operation> operation, std::size_t ranks) {
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
std::vector<Ints> Values(std::size_t ranks, std::size_t count) {
  std::vector<Ints> values(ranks, Ints(count));
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t i = 0; i < count; ++i) {
      values[rank][i] = static_cast<std::int32_t>(rank * 1000 + i * 7 % 101);
    }
  }
  return values;
}

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
  set_version(22506);
  expect(problem(FakePaths()), "NCCL is 2.25.6, older than 2.26.0");
  set_version(22707);
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
    context.Expect(Lines(log, "all_reduce") == 2 * p && Lines(log, "type 7 op 0 grouped") == p,
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
    for (const bool both_ways : {false, true}) {
      std::vector<std::vector<GatherStep>> steps;
      for (std::size_t rank = 0; rank < p; ++rank) {
        steps.push_back(GatherSteps(rank, p, both_ways));
      }
      context.Expect(steps[0].size() == (both_ways ? p / 2 + 1 : p), "the number of steps");
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
  static std::array<Stream, kMostRanks> streams{};
  for (int run = 0; run < 2; ++run) {  // the second with what the first has left
    AllSucceed(context, OnRanks(p, [&](int rank) {
                 const auto at = static_cast<std::size_t>(rank);
                 if (streams[at] == nullptr) {
                   runtime.stream_create_with_flags(&streams[at], kStreamNonBlocking);
                 }
                 Status status = site->Initialize(rank, streams[at]);
                 std::vector<float> slots(block * (p - 1), -1e6F);
                 std::vector<std::byte> workspace(shape.workspace_bytes);
                 // Computed on the stream right before.
                 std::vector<float> x(xs[at].size(), -1e6F);
                 std::vector<float> w(ws[at].size(), -1e6F);
                 runtime.memcpy_async(x.data(), xs[at].data(), In(x).bytes, kMemcpyDeviceToDevice,
                                      streams[at]);
                 runtime.memcpy_async(w.data(), ws[at].data(), In(w).bytes, kMemcpyDeviceToDevice,
                                      streams[at]);
                 const std::array in{In(x), In(w)};
                 const std::array out{Out(ys[at]), Out(slots), Out(workspace)};
                 if (status.ok()) {
                   status = site->Execute(rank, streams[at], kRun, in, out);
                 }
                 // The buffers go: as what XLA puts on its stream next, after the whole call.
                 const int error = runtime.stream_synchronize(streams[at]);
                 return status.ok() && error != 0 ? Internal("the stream has failed") : status;
               }));
  }
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

void MatrixProductsOfRings(Context& context) {
  for (const std::size_t p : {2U, 3U, 4U, 5U}) {
    OpenEngine();
    for (const RingKind kind : {RingKind::kGatherRows, RingKind::kGatherInner,
                                RingKind::kScatterRows, RingKind::kScatterColumns}) {
      for (const bool both_ways : {false, true}) {
        for (const auto& [batch, rows] :
             {std::pair{1U, 5U}, std::pair{1U, 1U}, std::pair{3U, 2U}}) {
          for (const bool is_transposed : {false, true}) {
            MultiplyInRing(context, {.kind = kind,
                                     .num_ranks = p,
                                     .batch = batch,
                                     .rows = rows,
                                     .inner = 4,
                                     .columns = 3,
                                     .x_is_transposed = is_transposed && batch == 1,
                                     .w_is_transposed = is_transposed,
                                     .is_bidirectional = both_ways,
                                     .workspace_bytes = 64});
          }
        }
      }
    }
  }
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

std::unique_ptr<Operation> SmallGather(std::size_t p) { return std::make_unique<AllGather>(4, p); }

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
  Status Prepare(const Libraries& /*libraries*/, const Seat& seat) override {
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

// ---- Failing ------------------------------------------------------------------------------------

void ExpectInAll(Context& context, const std::vector<Status>& statuses, const std::string& part) {
  for (const Status& status : statuses) {
    context.Expect(status.message.find(part) != std::string::npos, [&] { return status.message; });
  }
}

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
      runtime.stream_create_with_flags(&stream, kStreamNonBlocking);
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
    return site->Execute(rank, nullptr, kRun, in, out);
  }
  NcclComm CommOf(int ordinal) { return clique->SeatOf(ordinal).comm.handle(); }

  std::array<Ints, 2> from{Ints(1), Ints(1)};
  std::array<Ints, 2> to{Ints(2), Ints(2)};
  std::unique_ptr<Site> site;
  std::shared_ptr<Clique> clique;
};

/// What was logged until so many lines of it say `what`, within seconds.
std::string LogUntil(std::size_t count, const std::string& what) {
  std::string log = TakeLog();
  for (int tries = 0; tries < 1000 && Lines(log, what) < count; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    log += TakeLog();
  }
  return log;
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

// ---- Peer memory --------------------------------------------------------------------------------

/// A tree of two leaves, of so many numbers each, summed over peer memory.
std::unique_ptr<Operation> PeerSumOf(std::size_t count) {
  const Reduction ints{.type = NcclType::kI32, .op = NcclOp::kSum, .parts = 1};
  const Reduction complex{.type = NcclType::kF32, .op = NcclOp::kSum, .parts = 2};
  return std::make_unique<AllReduce>(
      std::vector<AllReduce::Leaf>{{.reduction = ints, .count = count, .bytes = 4 * count},
                                   {.reduction = complex, .count = count, .bytes = 8 * count}},
      /*is_small_sum=*/true);
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
                     runtime.stream_create_with_flags(&stream, kStreamNonBlocking);
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
    runtime.stream_create_with_flags(&stream, kStreamNonBlocking);
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

// ---- The flight recorder ------------------------------------------------------------------------

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

}  // namespace
}  // namespace jaxcoll::testing

int main(int argc, char** argv) {
  using namespace jaxcoll::testing;
  const int status = RunTests(
      {
          {"LibrariesSayWhatIsMissing", LibrariesSayWhatIsMissing},
          {"WhatIsOpenAlreadyIsTaken", WhatIsOpenAlreadyIsTaken},
          {"ReductionsAreThoseOfNccl", ReductionsAreThoseOfNccl},
          {"TreesAreReducedInPlaceInOneGroup", TreesAreReducedInPlaceInOneGroup},
          {"CopiesGoWhereTheyBelong", CopiesGoWhereTheyBelong},
          {"RingsSendWhatIsThere", RingsSendWhatIsThere},
          {"MatrixProductsOfRings", MatrixProductsOfRings},
          {"ProductsOfADeviceShareAHandle", ProductsOfADeviceShareAHandle},
          {"CommunicatorsAreMadeOnceAndTogether", CommunicatorsAreMadeOnceAndTogether},
          {"DevicesStartTogether", DevicesStartTogether},
          {"OneThatIsNotPreparedFailsAll", OneThatIsNotPreparedFailsAll},
          {"OneThatDoesNotComeIsNamed", OneThatDoesNotComeIsNamed},
          {"OneThatDoesNotCallAtFirstIsNamed", OneThatDoesNotCallAtFirstIsNamed},
          {"OneThatDoesNotCallIsNamed", OneThatDoesNotCallIsNamed},
          {"NobodyGoesOnWithGarbage", NobodyGoesOnWithGarbage},
          {"NothingIsAbortedUnderAThreadInsideNccl", NothingIsAbortedUnderAThreadInsideNccl},
          {"NobodyWaitsForWhoRecordsAnEvent", NobodyWaitsForWhoRecordsAnEvent},
          {"EveryCallIsWatchedInItsTurn", EveryCallIsWatchedInItsTurn},
          {"CallsThatNcclHoldsUpAreLate", CallsThatNcclHoldsUpAreLate},
          {"FirstRunsAreWaitedForAsCompilationsAre", FirstRunsAreWaitedForAsCompilationsAre},
          {"WhoHasAnExcuseIsWaitedFor", WhoHasAnExcuseIsWaitedFor},
          {"MakingCommunicatorsIsInterrupted", MakingCommunicatorsIsInterrupted},
          {"ErrorsOfNcclAreNoticed", ErrorsOfNcclAreNoticed},
          {"WrongBuffersAreRefused", WrongBuffersAreRefused},
          {"SmallSumsGoOverPeerMemory", SmallSumsGoOverPeerMemory},
          {"PeerMemoryIsUsedWhereItIsReached", PeerMemoryIsUsedWhereItIsReached},
          {"PeerMemoryIsProbed", PeerMemoryIsProbed},
          {"WhoDoesNotComeToASumOverPeersIsNamed", WhoDoesNotComeToASumOverPeersIsNamed},
          {"CallsStandInTheRecorder", CallsStandInTheRecorder},
          {"WhoFailsStandsInTheRecorderAsFailed", WhoFailsStandsInTheRecorderAsFailed},
          {"OccurrencesAreCountedForEachSite", OccurrencesAreCountedForEachSite},
          {"WhatFailsIsReportedWhateverAbortsTake", WhatFailsIsReportedWhateverAbortsTake},
      },
      argc, argv);
  jaxcoll::cuda::Engine::Get().Stop();
  return status;
}

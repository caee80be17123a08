// tests/cpp/communicator_test.cc: collectives that threads call and wait for, in one process and
// across several, and what they say when a rank does not come.
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int32_t, std::int64_t
#include <memory>   // std::make_unique, std::unique_ptr
#include <string>   // std::string, std::to_string
#include <vector>   // std::vector

#include "core/types.h"
#include "host/communicator.h"
#include "host/watchdog.h"
#include "processes.h"
#include "ranks.h"
#include "testing.h"

namespace jaxcoll::testing::communicator_test {
namespace {

using Kind = Operation::Kind;
using Values = std::vector<std::int32_t>;

/// The ranks of a group, whose processes are threads of this one.
class Group {
 public:
  /// In one process, without a job.
  explicit Group(std::size_t num_ranks) : Group(nullptr, Places(num_ranks, 0)) {}

  Group(Host& host, const Places& process_of) : Group(&host, process_of) {}

  Communicator& operator[](std::size_t rank) { return *communicators_[rank]; }
  std::size_t size() const { return communicators_.size(); }
  Clique& clique() { return *cliques_[0]; }

 private:
  Group(Host* host, const Places& process_of) {
    std::vector<std::int64_t> devices;
    std::vector<std::int64_t> processes;
    for (std::size_t rank = 0; rank < process_of.size(); ++rank) {
      devices.push_back(kFirstDevice + static_cast<std::int64_t>(rank));
      processes.push_back(kFirstProcess + static_cast<std::int64_t>(process_of[rank]));
    }
    for (std::size_t p = 0; p < (host == nullptr ? 1 : host->num_processes()); ++p) {
      cliques_.push_back(
          std::make_unique<Clique>(devices, processes, host == nullptr ? nullptr : &host->job(p)));
    }
    for (std::size_t rank = 0; rank < process_of.size(); ++rank) {
      communicators_.push_back(std::make_unique<Communicator>(*cliques_[process_of[rank]], rank));
    }
  }

  std::vector<std::unique_ptr<Clique>> cliques_;  // by process
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

Values Operand(std::size_t rank, std::size_t count, std::size_t round) {
  Values values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = static_cast<std::int32_t>(1000 * round + 100 * rank + i % 97);
  }
  return values;
}

void CheckCall(const Status& status, const Values& actual, const Values& expected,
               const std::string& what) {
  Check(status.ok(), what + ": " + status.message);
  Check(actual == expected, what + " has the right values");
}

/// A ring as XLA's collective-permute makes it: receive, send, and wait for both.
void SendAround(Group& group, std::size_t rank, std::size_t count, std::size_t round) {
  const std::size_t p = group.size();
  const std::size_t next = (rank + 1) % p;
  const std::size_t previous = (rank + p - 1) % p;
  const Values mine = Operand(rank, count, round);
  Values received(count);
  const std::size_t bytes = count * sizeof(std::int32_t);
  PendingCall sending;
  Check(group[rank]
            .Begin({.kind = Kind::kSend, .count = bytes, .from = rank, .to = next}, mine.data(),
                   nullptr, sending)
            .ok(),
        "a send begins");
  const Status status =
      group[rank].Call({.kind = Kind::kSend, .count = bytes, .from = previous, .to = rank}, nullptr,
                       received.data());
  CheckCall(status, received, Operand(previous, count, round), "a message");
  Check(sending.Wait().ok(), "a send ends");
}

void EveryOperation(Group& group, std::size_t rank, std::size_t count, std::size_t round) {
  const std::size_t p = group.size();
  const Values mine = Operand(rank, count, round);
  Values sum(count);
  Values all;
  for (std::size_t r = 0; r < p; ++r) {
    const Values theirs = Operand(r, count, round);
    all.insert(all.end(), theirs.begin(), theirs.end());
    for (std::size_t i = 0; i < count; ++i) {
      sum[i] += theirs[i];
    }
  }
  Values result(count);
  Status status = group[rank].Call({.kind = Kind::kAllReduce, .dtype = DType::kI32, .count = count},
                                   mine.data(), result.data());
  CheckCall(status, result, sum, "all_reduce");

  Values in_place = mine;
  status = group[rank].Call({.kind = Kind::kAllReduce, .dtype = DType::kI32, .count = count},
                            in_place.data(), in_place.data());
  CheckCall(status, in_place, sum, "all_reduce in place");

  Values gathered(p * count);
  status = group[rank].Call({.kind = Kind::kAllGather, .dtype = DType::kI32, .count = count},
                            mine.data(), gathered.data());
  CheckCall(status, gathered, all, "all_gather");

  // Rank r's block for rank t is `all` rotated, so that blocks differ.
  Values blocks;
  Values scattered(count);
  Values expected(count);
  for (std::size_t t = 0; t < p; ++t) {
    const Values block = Operand(rank + t, count, round);
    blocks.insert(blocks.end(), block.begin(), block.end());
    const Values theirs = Operand(t + rank, count, round);
    for (std::size_t i = 0; i < count; ++i) {
      expected[i] += theirs[i];
    }
  }
  status = group[rank].Call({.kind = Kind::kReduceScatter, .dtype = DType::kI32, .count = count},
                            blocks.data(), scattered.data());
  CheckCall(status, scattered, expected, "reduce_scatter");

  for (std::size_t distance = 1; distance < p; ++distance) {
    Values shifted(count);
    status = group[rank].Call(
        {.kind = Kind::kShift, .count = count * sizeof(std::int32_t), .from = distance},
        mine.data(), shifted.data());
    CheckCall(status, shifted, Operand((rank + p - distance) % p, count, round), "a shift");
  }
  if (p > 1) {  // XLA copies what a rank sends to itself
    SendAround(group, rank, count, round);
  }
}

void RunAll(Context& context, Group& group) {
  RunThreads(context, group.size(), [&](std::size_t rank) {
    for (std::size_t round = 0; round < 2; ++round) {
      for (const std::size_t count : {0, 1, 33, 5000, 150'000}) {
        EveryOperation(group, rank, count, round);
      }
    }
  });
}

void InOneProcess(Context& context) {
  for (const std::size_t p : {1, 2, 3, 4}) {
    Group group(p);
    RunAll(context, group);
  }
}

void AcrossProcesses(Context& context) {
  for (const bool can_read_peers : {false, true}) {
    Host host(2, {.can_read_peers = can_read_peers});
    Group one_each(host, {0, 1});
    RunAll(context, one_each);
    Group two_each(host, {0, 1, 1, 0});
    RunAll(context, two_each);
  }
  Host host(3);
  Group group(host, {2, 0, 1});
  RunAll(context, group);
}

/// Sends far more than a window holds, all at once: nobody may need what another does later.
void LargeRings(Context& context) {
  for (const bool can_read_peers : {false, true}) {
    Host host(3, {.num_lanes = 4, .window_bytes = 4096, .can_read_peers = can_read_peers});
    Group group(host, {0, 1, 2});
    RunThreads(context, 3, [&](std::size_t rank) {
      for (std::size_t round = 0; round < 4; ++round) {
        SendAround(group, rank, 150'000 + round, round);
      }
    });
  }
}

void ARankThatDoesNotCome(Context& context) {
  Watchdog::Get().SetTimeout(200'000'000);
  Group group(3);
  const Operation sum{.kind = Kind::kAllReduce, .dtype = DType::kI32, .count = 4};
  RunThreads(context, 2, [&](std::size_t rank) {
    Values values(4);
    const Status status = group[rank].Call(sum, values.data(), values.data());
    Check(status.message.find("all_reduce of XLA (sum): int32[4] (16 bytes), devices 100-102") !=
                  std::string::npos &&
              status.message.find("for rank 2") != std::string::npos,
          "the error names the call and the rank: " + status.message);
  });
  Values values(4);
  context.Expect(!group[2].Call(sum, values.data(), values.data()).ok(), "who comes late fails");
  const Operation other{.kind = Kind::kAllGather, .dtype = DType::kI32, .count = 1};
  context.Expect(!group[0].Call(other, values.data(), values.data()).ok(),
                 "as does every other call");
  Communicator::Reset();
  Watchdog::Get().SetTimeout(-1);
  RunAll(context, group);
}

/// XLA cuts an error off at 1,023 bytes.
void LongOriginsLeaveRoomForTheRank(Context& context) {
  Watchdog::Get().SetTimeout(200'000'000);
  Group group(40);
  for (int line = 1; line <= 6; ++line) {
    group.clique().Describe(Kind::kAllReduce, 4,
                            std::string(400, 'f') + " at train.py:" + std::to_string(line));
  }
  const Operation sum{.kind = Kind::kAllReduce, .dtype = DType::kI32, .count = 4};
  Values values(4);
  const std::string error = group[0].Call(sum, values.data(), values.data()).message;
  const std::string shown = error.substr(0, 1000);
  for (const char* const part : {"devices 100-139, for fff", "train.py:1,", "train.py:3: waited",
                                 "for rank 1 (partition 1), 2"}) {
    context.Expect(shown.find(part) != std::string::npos, std::string(part) + " is in " + shown);
  }
  Communicator::Reset();
  Watchdog::Get().SetTimeout(-1);
}

void AProcessThatFails(Context& context) {
  Host host(2);
  Group group(host, {0, 0, 1});
  const Operation sum{.kind = Kind::kAllReduce, .dtype = DType::kI32, .count = 4};
  RunThreads(context, 2, [&](std::size_t rank) {
    if (rank == 1) {  // waits with rank 0 for a process that gives up
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      host.job(1).session()->segment().Fail("process 1 gives up");
      return;
    }
    Values values(4);
    const Status status = group[0].Call(sum, values.data(), values.data());
    Check(status.message == "process 1 gives up", status.message);
  });
  Values values(4);
  context.Expect(!group[2].Call(sum, values.data(), values.data()).ok(), "and all calls there");
  host.Attach();
  Communicator::Reset();
  RunAll(context, group);
}

void WhatNobodyCanDo(Context& context) {
  Group group(1);
  Values values(4);
  const Status status =
      group[0].Call({.kind = Kind::kAllReduce, .dtype = DType::kC64, .op = ReduceOp::kMax},
                    values.data(), values.data());
  context.Expect(status.message.find("no max of complex64") != std::string::npos, status.message);
}

const Suite suite("communicator",
                  {{"InOneProcess", InOneProcess},
                   {"AcrossProcesses", AcrossProcesses},
                   {"LargeRings", LargeRings},
                   {"ARankThatDoesNotCome", ARankThatDoesNotCome},
                   {"LongOriginsLeaveRoomForTheRank", LongOriginsLeaveRoomForTheRank},
                   {"AProcessThatFails", AProcessThatFails},
                   {"WhatNobodyCanDo", WhatNobodyCanDo}});

}  // namespace
}  // namespace jaxcoll::testing::communicator_test

// tests/cpp/peer_sum_test.cc: the body of the kernels that sum over peer memory, on the host: a
// thread for each thread of a block, the blocks of a rank one after the other.
#include <algorithm>   // std::min
#include <array>       // std::array
#include <atomic>      // std::atomic, std::atomic_ref
#include <barrier>     // std::barrier
#include <bit>         // std::bit_cast
#include <chrono>      // std::chrono
#include <cmath>       // std::isnan, std::ldexp
#include <cstddef>     // std::byte, std::size_t
#include <cstdint>     // std::uint16_t, std::uint32_t
#include <cstdlib>     // std::abort
#include <cstring>     // std::memset
#include <functional>  // std::function
#include <limits>      // std::numeric_limits
#include <memory>      // std::make_unique, std::unique_ptr
#include <random>      // std::minstd_rand
#include <string>      // std::string, std::to_string
#include <thread>      // std::this_thread, std::thread
#include <vector>      // std::vector

#include "cuda/peer_call.h"
#include "cuda/peer_numbers.h"
#include "cuda/peer_sum.h"
#include "testing.h"

namespace jaxcoll::testing::peer_sum_test {
namespace {

using namespace jaxcoll::cuda;

/// What the threads of a block share.
struct HostBlock {
  explicit HostBlock(std::size_t num_threads) : barrier(static_cast<std::ptrdiff_t>(num_threads)) {}

  std::barrier<> barrier;
  std::array<std::atomic<bool>, 2> is_false{};  // of this time, and of the next
};

class HostTeam {
 public:
  HostTeam(HostBlock& shared, std::uint32_t thread, std::uint32_t num_threads, std::uint32_t block,
           std::uint32_t num_blocks)
      : shared_(shared),
        thread_(thread),
        num_threads_(num_threads),
        block_(block),
        num_blocks_(num_blocks) {}

  std::uint32_t thread() const { return thread_; }
  std::uint32_t num_threads() const { return num_threads_; }
  std::uint32_t block() const { return block_; }
  std::uint32_t num_blocks() const { return num_blocks_; }
  void Sync() { shared_.barrier.arrive_and_wait(); }
  bool SyncAll(bool value) {
    std::atomic<bool>& is_false = shared_.is_false.at(num_syncs_++ % 2);
    if (!value) {
      is_false = true;
    }
    Sync();
    return !is_false;
  }
  void Store(std::uint32_t& flag, std::uint32_t value) const {
    std::atomic_ref(flag).store(value, std::memory_order_release);
  }
  std::uint32_t Load(const std::uint32_t& flag) const {
    std::this_thread::yield();
    return std::atomic_ref(const_cast<std::uint32_t&>(flag)).load(std::memory_order_acquire);
  }
  std::uint32_t LoadFailure(const std::uint32_t& word) const {
    return std::atomic_ref(const_cast<std::uint32_t&>(word)).load(std::memory_order_relaxed);
  }
  void Trap() const { std::abort(); }  // no call here asks for it

 private:
  HostBlock& shared_;
  std::uint32_t thread_;
  std::uint32_t num_threads_;
  std::uint32_t block_;
  std::uint32_t num_blocks_;
  std::size_t num_syncs_ = 0;
};

enum class Way { kOneShot, kTwoShot };

template <typename Element>
void RunBlock(const PeerCall& call, Way way, HostTeam team) {
  const PeerSum<Element, HostTeam> sum(call, team);
  if (way == Way::kOneShot) {
    sum.OneShot();
  } else {
    sum.TwoShot();
  }
}

/// The windows of a group, and what all of its calls share.
struct Group {
  explicit Group(std::size_t num_ranks) {
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      windows.push_back(std::make_unique<PeerWindow>());
      std::memset(windows.back().get(), 0, sizeof(PeerWindow));
    }
  }

  PeerCall CallOf(std::size_t rank, std::uint32_t number, const void* operand, void* result,
                  std::size_t count) const {
    PeerCall call{
        .operand = operand,
        .result = result,
        .count = count,
        .rank = static_cast<std::uint32_t>(rank),
        .num_ranks = static_cast<std::uint32_t>(windows.size()),
        .number = number,
        .is_aligned =
            (std::bit_cast<std::uintptr_t>(operand) | std::bit_cast<std::uintptr_t>(result)) % 16 ==
                    0
                ? 1U
                : 0U,
        .has_failed = &has_failed,
        .raised = nullptr,
        .windows = {}};
    for (std::size_t i = 0; i < windows.size(); ++i) {
      call.windows[i] = windows[i].get();
    }
    return call;
  }

  std::vector<std::unique_ptr<PeerWindow>> windows;
  std::uint32_t has_failed = 0;
};

/// As a kernel of one rank.
template <typename Element>
void Launch(const PeerCall& call, Way way, std::uint32_t num_blocks, std::uint32_t num_threads) {
  for (std::uint32_t block = 0; block < num_blocks; ++block) {
    HostBlock shared(num_threads);
    std::vector<std::thread> threads;
    for (std::uint32_t thread = 1; thread < num_threads; ++thread) {
      threads.emplace_back([&, thread] {
        RunBlock<Element>(call, way, HostTeam(shared, thread, num_threads, block, num_blocks));
      });
    }
    RunBlock<Element>(call, way, HostTeam(shared, 0, num_threads, block, num_blocks));
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
}

void OnRanks(std::size_t count, const std::function<void(std::size_t)>& run) {
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] { run(rank); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

/// So that another order gives other bits.
template <typename Element>
typename Element::Stored Value(std::size_t call, std::size_t rank, std::size_t i) {
  const auto seed = static_cast<unsigned>(call * 7919 + rank * 104729 + i * 31 + 1);
  std::minstd_rand random(seed);
  random.discard(3);
  const auto number = static_cast<double>(random()) / 1e7 * (random() % 2 == 0 ? 1 : -1e-3);
  if constexpr (std::is_same_v<typename Element::Sum, float> &&
                !std::is_same_v<typename Element::Stored, float>) {
    return Element::Round(static_cast<float>(number));
  } else if constexpr (std::is_floating_point_v<typename Element::Sum>) {
    return static_cast<typename Element::Sum>(number);
  } else {
    return static_cast<typename Element::Stored>(random());
  }
}

template <typename Element>
typename Element::Stored Expected(std::size_t call, std::size_t num_ranks, std::size_t i) {
  typename Element::Sum sum = Element::Load(Value<Element>(call, 0, i));
  for (std::size_t rank = 1; rank < num_ranks; ++rank) {
    sum = static_cast<typename Element::Sum>(sum + Element::Load(Value<Element>(call, rank, i)));
  }
  return Element::Round(sum);
}

struct Case {
  std::size_t num_ranks;
  std::uint32_t num_threads;
  std::size_t offset;  ///< of operands and results, in elements
  std::uint32_t first_number;
};

/// Calls of many sizes, one after the other; ranks dawdle.
template <typename Element>
void CallsOf(Context& context, const Case& of, const std::vector<std::size_t>& counts) {
  using T = typename Element::Stored;
  using Bits = std::array<std::byte, sizeof(T)>;
  Group group(of.num_ranks);
  for (const auto& window : group.windows) {
    for (auto& flags : window->flags) {
      for (std::uint32_t& flag : flags) {
        flag = PeerFlag(of.first_number - 1, PeerStage::kSummed);
      }
    }
  }
  std::vector<std::vector<std::vector<T>>> results(of.num_ranks);
  OnRanks(of.num_ranks, [&](std::size_t rank) {
    std::minstd_rand random(static_cast<unsigned>(rank + 1));
    for (std::size_t call = 0; call < counts.size(); ++call) {
      std::vector<T> data(counts[call] + of.offset);
      for (std::size_t i = 0; i < counts[call]; ++i) {
        data[of.offset + i] = Value<Element>(call, rank, i);
      }
      if (random() % 4 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      }
      T* const at = data.data() + of.offset;  // in place
      const auto number = of.first_number + static_cast<std::uint32_t>(call);
      Launch<Element>(group.CallOf(rank, number, at, at, counts[call]),
                      call % 3 == 1 ? Way::kOneShot : Way::kTwoShot,
                      std::min(PeerBlocks(counts[call] * sizeof(T)), std::uint32_t{4}),
                      of.num_threads);
      data.erase(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(of.offset));
      results[rank].push_back(data);
    }
  });
  for (std::size_t rank = 0; rank < of.num_ranks; ++rank) {
    for (std::size_t call = 0; call < counts.size(); ++call) {
      bool is_right = true;
      for (std::size_t i = 0; i < counts[call]; ++i) {
        const T expected = Expected<Element>(call, of.num_ranks, i);
        is_right &= std::bit_cast<Bits>(expected) == std::bit_cast<Bits>(results[rank][call][i]);
      }
      context.Expect(is_right, [&] {
        return "call " + std::to_string(call) + " of rank " + std::to_string(rank) + " of " +
               std::to_string(of.num_ranks);
      });
    }
  }
}

const std::vector<std::size_t> many_counts{1, 7, 8, 9, 100, 3, 4097, 20'000, 16, 9000, 2, 5000};

void SumsAreInTheOrderOfRanks(Context& context) {
  for (const std::size_t num_ranks : {2U, 3U, 5U, 8U}) {
    for (const std::uint32_t num_threads : {1U, 3U}) {
      CallsOf<PlainElement<float>>(context, {num_ranks, num_threads, 0, 1}, many_counts);
    }
  }
}

void AllTypesAreSummed(Context& context) {
  const std::vector<std::size_t> counts{5, 33, 1000, 1};
  for (const std::size_t num_ranks : {2U, 3U}) {
    for (const std::size_t offset : {0U, 1U}) {
      const Case of{num_ranks, 2, offset, 1};
      CallsOf<PlainElement<std::uint8_t>>(context, of, counts);
      CallsOf<PlainElement<std::uint16_t>>(context, of, counts);
      CallsOf<PlainElement<std::uint32_t>>(context, of, counts);
      CallsOf<PlainElement<std::uint64_t>>(context, of, counts);
      CallsOf<PlainElement<double>>(context, of, counts);
      CallsOf<PlainElement<float>>(context, of, counts);
      CallsOf<F16Element>(context, of, counts);
      CallsOf<BF16Element>(context, of, counts);
    }
  }
}

void CallsMayBeMoreThanFlagsCount(Context& context) {
  for (const std::uint32_t first : {0x7fff'fffaU, 0xffff'fffaU}) {
    CallsOf<PlainElement<float>>(context, {3, 1, 0, first}, many_counts);
  }
  context.Expect(HasReached(0, 0xffff'ffff) && !HasReached(0xffff'ffff, 0) && HasReached(5, 5),
                 "which flag says more");
}

void TheLargestOperandFits(Context& context) {
  CallsOf<PlainElement<double>>(context, {2, 2, 0, 1},
                                {kPeerSlotBytes / 8, kPeerSlotBytes / 8 - 1, kPeerSlotBytes / 8});
}

void BlocksShareTheWork(Context& context) {
  for (const std::size_t count : {1U, 15U, 16U, 17U, 1000U, 4096U}) {
    for (const std::size_t parts : {1U, 2U, 3U, 8U}) {
      std::size_t end = 5;
      for (std::size_t i = 0; i < parts; ++i) {
        const PeerRange part = PeerPart({5, 5 + count}, 4, i, parts);
        context.Expect(part.first == end && part.end >= part.first, "where a part begins");
        context.Expect((part.first - 5) % 4 == 0 || part.first == part.end, "packs stay whole");
        end = part.end;
      }
      context.Expect(end == 5 + count, "where the last one ends");
    }
  }
  context.Expect(PeerBlocks(0) == 1 && PeerBlocks(16 * kPeerThreads) == 1 &&
                     PeerBlocks(16 * kPeerThreads + 1) == 2 &&
                     PeerBlocks(kPeerSlotBytes) == kMostPeerBlocks,
                 "how many there are");
}

void NobodyIsAwaitedOnceTheGroupHasFailed(Context& context) {
  for (const Way way : {Way::kOneShot, Way::kTwoShot}) {
    Group group(3);
    std::vector<std::vector<float>> data(3, std::vector<float>(4, 1.0F));
    std::atomic<int> num_ended{0};
    std::thread failing([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      context.Expect(num_ended == 0, "they wait for the third");
      std::atomic_ref(group.has_failed).store(1);
    });
    OnRanks(2, [&](std::size_t rank) {
      for (std::uint32_t number = 1; number <= 3; ++number) {  // the later ones end, too
        Launch<PlainElement<float>>(
            group.CallOf(rank, number, data[rank].data(), data[rank].data(), 4), way, 1, 2);
      }
      ++num_ended;
    });
    failing.join();
    context.Expect(num_ended == 2, "all have ended");
  }
}

// ---- Half precision -----------------------------------------------------------------------------

double HalfValue(std::uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10) & 31;
  const auto mantissa = static_cast<double>(bits & 1023);
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

void HalvesAreRoundedToNearest(Context& context) {
  bool loads = true;
  bool rounds = true;
  bool rounds_between = true;
  for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const double value = HalfValue(bits);
    loads &= static_cast<double>(F16Element::Load(half)) == value;
    loads &=
        static_cast<double>(F16Element::Load(static_cast<std::uint16_t>(half | 0x8000))) == -value;
    rounds &= F16Element::Round(static_cast<float>(value)) == half;
    const double next = bits + 1 == 0x7c00 ? 65536 : HalfValue(bits + 1);
    const auto middle = static_cast<float>((value + next) / 2);  // exact
    const auto even = static_cast<std::uint16_t>(bits + (bits & 1));
    rounds_between &= F16Element::Round(middle) == even;
    rounds_between &= F16Element::Round(std::nextafter(middle, 0.0F)) == half;
    rounds_between &= F16Element::Round(std::nextafter(-middle, -1e9F)) ==
                      static_cast<std::uint16_t>((bits + 1) | 0x8000);
  }
  context.Expect(loads, "a half as a float");
  context.Expect(rounds, "a float that is a half");
  context.Expect(rounds_between, "a float between halves");
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  context.Expect(F16Element::Round(1e30F) == 0x7c00 && F16Element::Round(-kInfinity) == 0xfc00 &&
                     F16Element::Load(0x7c00) == kInfinity,
                 "infinity");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  context.Expect(std::isnan(F16Element::Load(F16Element::Round(nan))) &&
                     std::isnan(BF16Element::Load(BF16Element::Round(nan))) &&
                     std::isnan(BF16Element::Load(
                         BF16Element::Round(std::bit_cast<float>(std::uint32_t{0x7fff'ffff})))),
                 "not a number");
  context.Expect(
      BF16Element::Round(std::bit_cast<float>(std::uint32_t{0x3f80'8000})) == 0x3f80 &&
          BF16Element::Round(std::bit_cast<float>(std::uint32_t{0x3f81'8000})) == 0x3f82 &&
          BF16Element::Round(std::bit_cast<float>(std::uint32_t{0x3f80'8001})) == 0x3f81 &&
          BF16Element::Round(std::numeric_limits<float>::max()) == 0x7f80,
      "bfloat16");
}

/// 2048 + 1 + 1 + 1: float16 has no 2049.
void SumsOfHalvesAreRoundedOnce(Context& context) {
  Group group(4);
  std::array<std::uint16_t, 4> data{F16Element::Round(2048), F16Element::Round(1),
                                    F16Element::Round(1), F16Element::Round(1)};
  OnRanks(4, [&](std::size_t rank) {
    Launch<F16Element>(group.CallOf(rank, 1, &data.at(rank), &data.at(rank), 1), Way::kOneShot, 1,
                       1);
  });
  for (const std::uint16_t sum : data) {
    context.Expect(sum == F16Element::Round(2051), "a sum");
  }
}

const Suite suite("peer_sum", {
                                  {"SumsAreInTheOrderOfRanks", SumsAreInTheOrderOfRanks},
                                  {"AllTypesAreSummed", AllTypesAreSummed},
                                  {"CallsMayBeMoreThanFlagsCount", CallsMayBeMoreThanFlagsCount},
                                  {"TheLargestOperandFits", TheLargestOperandFits},
                                  {"BlocksShareTheWork", BlocksShareTheWork},
                                  {"NobodyIsAwaitedOnceTheGroupHasFailed",
                                   NobodyIsAwaitedOnceTheGroupHasFailed},
                                  {"HalvesAreRoundedToNearest", HalvesAreRoundedToNearest},
                                  {"SumsOfHalvesAreRoundedOnce", SumsOfHalvesAreRoundedOnce},
                              });

}  // namespace
}  // namespace jaxcoll::testing::peer_sum_test

#include "host/copy_costs.h"

#include <sched.h>  // sched_yield

#include <algorithm>  // std::min
#include <atomic>     // std::atomic
#include <cstddef>    // std::byte, std::size_t
#include <cstdint>    // std::int64_t, std::uint64_t
#include <cstring>    // std::memcpy
#include <utility>    // std::swap
#include <vector>     // std::vector

#include "core/clock.h"
#include "core/relax.h"
#include "host/job.h"
#include "host/peer_memory.h"
#include "host/route.h"

namespace jaxcoll {
namespace {

// Large enough that the start of a call, and of a copy, hardly counts.
constexpr std::size_t kRehearsedBytes = std::size_t{1024} * 1024;
// A round of a window.
constexpr std::size_t kLeastPieceBytes = 4096;
// The least counts of these: the first touches memory, and other programs have the core at times.
constexpr int kRounds = 6;
constexpr std::int64_t kRehearsalNs = 1'000'000'000;
constexpr int kRehearsalLooks = 1000;
constexpr int kCrowdedRehearsalLooks = 5;
// In the place of a step: its process does not go on.
constexpr std::uint64_t kGone = ~std::uint64_t{0};

// One process's part. What it takes is what the next one leaves; the one before it takes from it.
class Rehearsal {
 public:
  explicit Rehearsal(const Session& session)
      : segment_(session.segment()),
        mine_(session.seat()),
        next_((mine_ + 1) % session.processes().size()),
        before_((mine_ + session.processes().size() - 1) % session.processes().size()),
        piece_bytes_(RoundBytes(segment_.shape().window_bytes)),
        looks_(session.is_crowded() ? kCrowdedRehearsalLooks : kRehearsalLooks),
        until_ns_(NowNs() + kRehearsalNs) {}

  CopyCosts Run() {
    if (piece_bytes_ < kLeastPieceBytes) {  // the job shares hardly any memory
      return {};
    }
    Times least{};
    for (int round = 0; round < kRounds; ++round) {
      Times times{};
      if (!ThroughWindows(times) || !ByReading(times)) {
        seat(mine_).rehearsed.store(kGone, std::memory_order_release);
        return {};
      }
      least = {.leaving_ns = std::min(least.leaving_ns, times.leaving_ns),
               .taking_ns = std::min(least.taking_ns, times.taking_ns),
               .reading_ns = std::min(least.reading_ns, times.reading_ns)};
      if (round == 0) {
        least = times;
      }
    }
    constexpr double kKiB = kRehearsedBytes / 1024.0;
    CopyCosts costs{.leaving = static_cast<double>(least.leaving_ns) / kKiB,
                    .taking = static_cast<double>(least.taking_ns) / kKiB};
    if (can_read_) {
      costs.reading = static_cast<double>(least.reading_ns) / kKiB;
    }
    return costs;
  }

 private:
  struct Times {
    std::int64_t leaving_ns;
    std::int64_t taking_ns;
    std::int64_t reading_ns;
  };

  [[nodiscard]] Seat& seat(std::size_t i) const { return segment_.seat(i); }

  // All go through the same steps.
  void Publish() { seat(mine_).rehearsed.store(++step_, std::memory_order_release); }

  [[nodiscard]] bool Await(std::size_t other, std::uint64_t step) const {
    for (int looks = 1;; ++looks) {
      const std::uint64_t seen = seat(other).rehearsed.load(std::memory_order_acquire);
      if (seen >= step) {
        return seen != kGone;
      }
      if (looks < looks_) {
        Relax();
      } else if (NowNs() > until_ns_) {
        return false;
      } else {
        sched_yield();
        looks = 0;
      }
    }
  }

  [[nodiscard]] std::byte* Slot(std::size_t of, std::size_t piece) const {
    return segment_.window(of, 0) + RoundBegin(piece, piece_bytes_);
  }

  bool ThroughWindows(Times& times) {
    const std::uint64_t first = step_;
    for (std::size_t at = 0, piece = 0; at < kRehearsedBytes; at += piece_bytes_, ++piece) {
      const std::size_t bytes = std::min(piece_bytes_, kRehearsedBytes - at);
      if (piece >= kRoundsInWindow &&  // it has taken what is there
          !Await(before_, first + 2 * (piece + 1 - kRoundsInWindow))) {
        return false;
      }
      const std::int64_t begin_ns = NowNs();
      std::memcpy(Slot(mine_, piece), from_.data() + at, bytes);
      times.leaving_ns += NowNs() - begin_ns;
      Publish();
      if (!Await(next_, step_)) {
        return false;
      }
      const std::int64_t left_ns = NowNs();
      std::memcpy(to_.data() + at, Slot(next_, piece), bytes);
      times.taking_ns += NowNs() - left_ns;
      Publish();
    }
    return Swap();
  }

  bool ByReading(Times& times) {
    seat(mine_).sample.store(from_.data(), std::memory_order_relaxed);
    Publish();
    if (!Await(next_, step_)) {
      return false;
    }
    const std::int64_t begin_ns = NowNs();
    can_read_ = ReadPeer(seat(next_).pid.load(std::memory_order_acquire), to_.data(),
                         seat(next_).sample.load(std::memory_order_relaxed),
                         {.rows = 1, .bytes = kRehearsedBytes, .from_step = 0, .to_step = 0}) &&
                can_read_;
    times.reading_ns += NowNs() - begin_ns;
    Publish();
    return Swap();
  }

  // What was a result is the next operand, when nobody takes from the last one any more.
  bool Swap() {
    std::swap(from_, to_);
    return Await(before_, step_);
  }

  const Segment& segment_;
  const std::size_t mine_;
  const std::size_t next_;
  const std::size_t before_;
  const std::size_t piece_bytes_;
  const int looks_;
  const std::int64_t until_ns_;
  std::vector<std::byte> from_ = std::vector<std::byte>(kRehearsedBytes);
  std::vector<std::byte> to_ = std::vector<std::byte>(kRehearsedBytes);
  std::uint64_t step_ = 0;
  bool can_read_ = true;
};

}  // namespace

CopyCosts MeasureCopies(const Session& session) { return Rehearsal(session).Run(); }

}  // namespace jaxcoll

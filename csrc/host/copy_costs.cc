#include "host/copy_costs.h"

#include <sched.h>  // sched_yield

#include <algorithm>  // std::max, std::min
#include <array>      // std::array
#include <atomic>     // std::atomic
#include <cstddef>    // std::byte, std::size_t
#include <cstdint>    // std::int64_t, std::uint64_t
#include <cstring>    // std::memcpy
#include <limits>     // std::numeric_limits
#include <utility>    // std::swap
#include <vector>     // std::vector

#include "core/align.h"
#include "core/clock.h"
#include "core/relax.h"
#include "host/job.h"
#include "host/peer_memory.h"
#include "host/route.h"
#include "kernels/copy.h"

namespace jaxcoll {
namespace {

// A round of a window.
constexpr std::size_t kLeastPieceBytes = 4096;
// Calls go round among about so many lanes.
constexpr int kLanes = 3;
// The least counts of these, since other programs have the core at times.
constexpr int kRounds = 2 * kLanes;
// Beforehand, memory is touched for the first time; and where the caches can hold it, so much goes
// round till they do. Rounds of 1 MiB then take half the time (2 cores of an AMD EPYC).
constexpr std::size_t kSettlingBytes = std::size_t{200} << 20;
// Of all processes: many a last-level cache of today. The same for all, as their rounds must be.
constexpr std::size_t kCachesBytes = std::size_t{32} << 20;
// Where processes share cores it would take long.
constexpr std::size_t kMostCrowdedBytes = std::size_t{4} << 20;
constexpr std::int64_t kMostRoundNs = 1'000'000'000;
constexpr int kRehearsalLooks = 1000;
constexpr int kCrowdedRehearsalLooks = 5;
// In the place of a step: its process does not go on.
constexpr std::uint64_t kGone = ~std::uint64_t{0};

// What is copied begins as XLA's buffers do. It matters: where a copy's target lies 1 to 31 bytes
// behind its source, in their pages, an AMD EPYC of the third generation takes ten times as long.
struct alignas(kCacheLine) Line {
  std::array<std::byte, kCacheLine> bytes;
};

// One process's part. What it takes is what the next one leaves; the one before it takes from it.
class Rehearsal {
 public:
  explicit Rehearsal(const Session& session)
      : segment_(session.segment()),
        mine_(session.seat()),
        next_((mine_ + 1) % session.processes().size()),
        before_((mine_ + session.processes().size() - 1) % session.processes().size()),
        piece_bytes_(PieceBytes(segment_.shape().window_bytes, 1, CopyCostsBySize::kBytes.back())),
        num_lanes_(std::min(kLanes, static_cast<int>(segment_.shape().num_lanes))),
        is_crowded_(session.is_crowded()),
        looks_(is_crowded_ ? kCrowdedRehearsalLooks : kRehearsalLooks) {}

  CopyCostsBySize Run() {
    if (piece_bytes_ < kLeastPieceBytes) {  // the job shares hardly any memory
      return {};
    }
    CopyCostsBySize costs;
    // From the largest on, which finds nothing in the caches that has settled there.
    bool all_come = true;
    for (std::size_t i = costs.each.size(); i-- > 0;) {
      const std::size_t bytes = CopyCostsBySize::kBytes[i];
      if (is_crowded_ && bytes > kMostCrowdedBytes) {
        continue;
      }
      all_come = all_come && Measure(bytes, costs.each[i]);
      if (!all_come) {
        costs.each[i] = i + 1 < costs.each.size() ? costs.each[i + 1] : CopyCosts{};
      }
    }
    if (is_crowded_) {
      costs.each.back() = costs.each[costs.each.size() - 2];
    }
    if (!all_come) {
      seat(mine_).rehearsed.store(kGone, std::memory_order_release);
    }
    return costs;
  }

 private:
  // False: not all have come.
  bool Measure(std::size_t bytes, CopyCosts& costs) {
    int num_uncounted =
        Fits(bytes) ? std::max(num_lanes_, static_cast<int>(kSettlingBytes / bytes)) : num_lanes_;
    bytes_ = bytes;
    from_.resize(bytes / kCacheLine);
    to_.resize(bytes / kCacheLine);
    constexpr double kNever = std::numeric_limits<double>::infinity();
    const CopyCosts nothing{.leaving = kNever, .taking = kNever, .reading = kNever};
    costs = nothing;
    // One way after the other: what another process has read is slower to write, either way.
    bool all_come = true;
    for (const CopyFn leave : {CopyFn{nullptr}, GetStreamCopy()}) {  // as calls do: copy_trials.h
      CopyCosts found = nothing;
      for (int round = 0; round < num_uncounted + kRounds && all_come; ++round) {
        found = round == num_uncounted ? nothing : found;
        lane_ = static_cast<std::size_t>(round % num_lanes_);
        all_come = ThroughWindows(leave, found);
      }
      if (found.leaving + found.taking < costs.leaving + costs.taking) {
        costs = found;
      }
      num_uncounted = num_lanes_;
    }
    for (int round = 0; round < kRounds && all_come; ++round) {
      all_come = ByReading(costs);
    }
    if (!can_read_) {
      costs.reading = kNever;
    }
    return all_come;
  }

  // Whether the caches can hold what all processes touch, beside other things.
  [[nodiscard]] bool Fits(std::size_t bytes) const {
    const SegmentShape& shape = segment_.shape();
    const std::size_t of_each =
        2 * bytes + static_cast<std::size_t>(num_lanes_) * shape.window_bytes;
    return shape.num_seats * of_each <= kCachesBytes;
  }

  // Notes what a round took, if it is the least.
  void Note(double& cost, std::int64_t took_ns) const {
    cost = std::min(cost, static_cast<double>(took_ns) * 1024 / static_cast<double>(bytes_));
  }

  [[nodiscard]] Seat& seat(std::size_t i) const { return segment_.seat(i); }
  [[nodiscard]] const std::byte* from() const { return from_.data()->bytes.data(); }
  [[nodiscard]] std::byte* to() { return to_.data()->bytes.data(); }

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
    return segment_.window(of, lane_) + RoundBegin(piece, piece_bytes_);
  }

  bool ThroughWindows(CopyFn leave, CopyCosts& costs) {
    until_ns_ = NowNs() + kMostRoundNs;
    const std::uint64_t first = step_;
    std::int64_t leaving_ns = 0;
    std::int64_t taking_ns = 0;
    for (std::size_t at = 0, piece = 0; at < bytes_; at += piece_bytes_, ++piece) {
      const std::size_t bytes = std::min(piece_bytes_, bytes_ - at);
      if (piece >= kRoundsInWindow &&  // it has taken what is there
          !Await(before_, first + 2 * (piece + 1 - kRoundsInWindow))) {
        return false;
      }
      const std::int64_t begin_ns = NowNs();
      Copy(Slot(mine_, piece), from() + at, bytes, leave);
      leaving_ns += NowNs() - begin_ns;
      Publish();
      if (!Await(next_, step_)) {
        return false;
      }
      const std::int64_t left_ns = NowNs();
      std::memcpy(to() + at, Slot(next_, piece), bytes);
      taking_ns += NowNs() - left_ns;
      Publish();
    }
    Note(costs.leaving, leaving_ns);
    Note(costs.taking, taking_ns);
    return Swap();
  }

  bool ByReading(CopyCosts& costs) {
    until_ns_ = NowNs() + kMostRoundNs;
    seat(mine_).sample.store(from(), std::memory_order_relaxed);
    Publish();
    if (!Await(next_, step_)) {
      return false;
    }
    const std::int64_t begin_ns = NowNs();
    can_read_ = ReadPeer(seat(next_).pid.load(std::memory_order_acquire), to(),
                         seat(next_).sample.load(std::memory_order_relaxed),
                         {.rows = 1, .bytes = bytes_, .from_step = 0, .to_step = 0}) &&
                can_read_;
    Note(costs.reading, NowNs() - begin_ns);
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
  const int num_lanes_;
  const bool is_crowded_;
  const int looks_;
  std::size_t bytes_ = 0;  // of each of these
  std::vector<Line> from_, to_;
  std::int64_t until_ns_ = 0;
  std::uint64_t step_ = 0;
  std::size_t lane_ = 0;
  bool can_read_ = true;
};

}  // namespace

CopyCostsBySize MeasureCopies(const Session& session) { return Rehearsal(session).Run(); }

}  // namespace jaxcoll

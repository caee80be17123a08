// host/segment.h: the memory that the processes of a host share in a job, and what stands in it.
//
//   header | seats (one a process) | lanes (some a process) | ended (a word for each seat and lane
//   a process) | windows (one a lane)
//
// A process writes to its own seat, lanes and windows alone, and to the header when it fails the
// job. Calls are matched by what stands in the lanes: a process that comes to a call takes a free
// lane, writes which call it is, and from then on publishes in the lane's word how far it has come.
// Whoever has looked at the lane says so when its own part of the call is over.
#pragma once

#include <array>        // std::array
#include <atomic>       // std::atomic
#include <bit>          // std::bit_ceil, std::countr_zero
#include <cstddef>      // std::byte, std::size_t
#include <cstdint>      // std::int64_t, std::uint64_t
#include <string>       // std::string
#include <string_view>  // std::string_view

#include "core/align.h"
#include "core/shared_text.h"
#include "core/status.h"

namespace jaxcoll {

/// Some of the first 256 seats, which one process writes and others may read meanwhile.
class SeatSet {
 public:
  void Clear() {
    for (auto& word : words_) {
      word.store(0, std::memory_order_relaxed);
    }
  }
  void Add(std::size_t seat) {
    if (seat < 64 * words_.size()) {
      words_[seat / 64].fetch_or(std::uint64_t{1} << seat % 64, std::memory_order_relaxed);
    }
  }
  [[nodiscard]] bool Has(std::size_t seat) const {
    return seat < 64 * words_.size() &&
           (words_[seat / 64].load(std::memory_order_relaxed) >> seat % 64 & 1) != 0;
  }

 private:
  std::array<std::atomic<std::uint64_t>, 4> words_{};
};

/// Which call of the job: the same on every process that takes part.
struct CallName {
  std::uint64_t group = 0;       ///< of the devices that take part, in rank order
  std::uint64_t site = 0;        ///< the site id that the lowering wrote into the program
                                 ///< (jaxcoll/_lowering.py, _site_id)
  std::uint64_t occurrence = 0;  ///< how many times this group has come to this site
  static constexpr unsigned kOccurrenceBits = 40;
  static constexpr std::uint64_t kMaxOccurrence = (std::uint64_t{1} << kOccurrenceBits) - 1;
  /// What stands for it in a lane's word. Never 0, which means no call.
  [[nodiscard]] std::uint64_t tag() const { return Tag(HashOf(group, site), occurrence); }
  /// The same in two steps, the first of which is the same for all calls of a site.
  [[nodiscard]] static std::uint64_t HashOf(std::uint64_t group, std::uint64_t site);
  [[nodiscard]] static std::uint64_t Tag(std::uint64_t hash, std::uint64_t occurrence);
  /// Where in which program it stands: the same for different calls in one place.
  [[nodiscard]] std::uint64_t place() const { return site >> 39; }
  friend bool operator==(const CallName&, const CallName&) = default;
};

/// One call in progress, or one that others may still be reading.
struct alignas(kCacheLine) Lane {
  /// Tag of the call above kProgressBits, completed steps below. 0: free, or being written.
  std::atomic<std::uint64_t> word;
  std::atomic<std::uint64_t> group, site;  ///< stable while `word` holds their tag
  /// The call's occurrence, and above it where in the window its data begins, in cache lines;
  /// stable as `group`.
  std::atomic<std::uint64_t> occurrence_and_begin;
  /// 0: its process does not wait in it. Less than 0: it has left the call since then, which others
  /// have not read yet.
  std::atomic<std::int64_t> waits_since_ns;
  /// Tags of the calls that this process has ended last for which it looked at lanes of the seats
  /// after its own; stable as `group`. So who looks at this line need not look at Segment::ended,
  /// which a core then can write without asking for it.
  std::array<std::atomic<std::uint64_t>, 3> has_ended;
  alignas(kCacheLine) SharedText<1016> text;  ///< of the call, while it waits
  SeatSet members;                            ///< for whom it waits

  static constexpr unsigned kProgressBits = 24;
  static constexpr std::uint64_t kMaxProgress = (std::uint64_t{1} << kProgressBits) - 1;

  [[nodiscard]] CallName name() const {
    return {.group = group.load(std::memory_order_relaxed),
            .site = site.load(std::memory_order_relaxed),
            .occurrence =
                occurrence_and_begin.load(std::memory_order_relaxed) & CallName::kMaxOccurrence};
  }
  [[nodiscard]] std::size_t begin() const {
    return (occurrence_and_begin.load(std::memory_order_relaxed) >> CallName::kOccurrenceBits) *
           kCacheLine;
  }
  void SetName(const CallName& name, std::size_t begin) {
    group.store(name.group, std::memory_order_relaxed);
    site.store(name.site, std::memory_order_relaxed);
    occurrence_and_begin.store(begin / kCacheLine << CallName::kOccurrenceBits | name.occurrence,
                               std::memory_order_relaxed);
  }
};

/// One process.
struct alignas(kCacheLine) Seat {
  // Whoever publishes something rings the bell of those that sleep.
  std::atomic<std::uint32_t> bell;  ///< a futex
  std::atomic<std::uint32_t> sleepers;
  /// None beyond has ever been used.
  alignas(kCacheLine) std::atomic<std::uint32_t> num_used_lanes;
  alignas(kCacheLine) std::atomic<std::int64_t> pid;  ///< 0: nobody has sat down yet
  std::atomic<std::int64_t> start_ticks;      ///< of the process, so that a reused pid shows
  std::atomic<std::int64_t> leaves_since_ns;  ///< 0: it is not about to exit
  std::atomic<std::int64_t> resets_since_ns;  ///< 0: it does not wait for a segment after this one
  std::atomic<const std::uint64_t*> probe;    ///< where the job's nonce stands in its memory
  // While copies are measured (host/copy_costs.h).
  alignas(kCacheLine) std::atomic<std::uint64_t> rehearsed;  ///< steps
  std::atomic<const std::byte*> sample;                      ///< what others read
};

/// The measures of a segment.
struct SegmentShape {
  std::size_t num_seats = 0;
  std::size_t num_lanes = 0;  ///< of each seat
  std::size_t window_bytes = 0;

  [[nodiscard]] std::size_t bytes() const;
  /// Cache lines of one seat's part of Segment::ended: a power of two, so that nothing divides.
  [[nodiscard]] std::size_t ended_lines() const {
    return std::bit_ceil(RoundedUp(num_lanes, kEndedInLine) / kEndedInLine);
  }
  /// Words from one seat's part to the next one's.
  [[nodiscard]] std::size_t ended_step() const { return ended_lines() * kEndedInLine; }

  static constexpr std::size_t kEndedInLine = kCacheLine / sizeof(std::uint64_t);
};

/// A mapping of the job's segment. Whoever holds one may touch it, whatever becomes of the others.
class Segment {
 public:
  /// Makes the empty file behind the descriptor `memory` the segment of the job `nonce`. All its
  /// memory is there when this returns.
  static Status Format(int memory, const SegmentShape& shape, std::uint64_t nonce);

  Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  /// Maps the segment of the job `nonce`; refuses any other.
  Status Map(int memory, std::uint64_t nonce);

  [[nodiscard]] const SegmentShape& shape() const { return shape_; }
  [[nodiscard]] std::uint64_t nonce() const;
  [[nodiscard]] Seat& seat(std::size_t i) const { return seats_[i]; }
  [[nodiscard]] Lane& lane(std::size_t seat, std::size_t i) const {
    return lanes_[seat * shape_.num_lanes + i];
  }
  /// Tag of the last call that the process at `seat` has ended for which it looked at a lane of
  /// the process at `other`.
  [[nodiscard]] std::atomic<std::uint64_t>& ended(std::size_t seat, std::size_t other,
                                                  std::size_t lane) const {
    // Lanes that are used in turn have words in different cache lines, so that a look at one does
    // not meet the write of the next.
    const std::size_t line = lane & (ended_lines_ - 1);
    return ended_[((seat * shape_.num_seats + other) * ended_lines_ + line) *
                      SegmentShape::kEndedInLine +
                  (lane >> std::countr_zero(ended_lines_))];
  }
  [[nodiscard]] std::byte* window(std::size_t seat, std::size_t lane) const {
    return windows_ + (seat * shape_.num_lanes + lane) * shape_.window_bytes;
  }

  /// What is longer than this of a cause is lost.
  static constexpr std::size_t kMaxCauseBytes = 6 * 4096;
  /// Fails the job for all, with the first cause that anybody gives, and wakes all that sleep.
  /// Returns false where somebody has failed it before.
  bool Fail(std::string_view cause) const;
  [[nodiscard]] bool failed() const { return state_->load(std::memory_order_seq_cst) != kSound; }
  /// The cause; waits a moment for whoever is writing it.
  [[nodiscard]] std::string failure() const;

  void Ring(std::size_t seat) const;

 private:
  struct Header;

  enum : std::uint32_t { kSound = 0, kFailing = 1, kFailed = 2 };

  std::byte* base_ = nullptr;
  SegmentShape shape_;
  std::size_t ended_lines_ = 0;  // its
  Header* header_ = nullptr;
  std::atomic<std::uint32_t>* state_ = nullptr;  // in the header
  Seat* seats_ = nullptr;
  Lane* lanes_ = nullptr;
  std::atomic<std::uint64_t>* ended_ = nullptr;
  std::byte* windows_ = nullptr;
};

}  // namespace jaxcoll

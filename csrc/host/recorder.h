// host/recorder.h: one entry per call and device, in a fixed ring, always on.
//
// Written by the threads that make and resume calls, without locks; read at any time by anybody. A
// reader can meet an entry that is being written: `sequence` is stored last on begin, so an entry
// whose sequence changed while it was read is dropped.
#pragma once

#include <array>    // std::array
#include <atomic>   // std::atomic
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <vector>   // std::vector

namespace jaxcoll {

/// The five moments of a call on one device, in nanoseconds of core/clock.h; 0: not reached.
enum class Moment : std::size_t {
  kArrived = 0,  ///< this device called
  kOpened = 1,   ///< the first device of the group called
  kMet = 2,      ///< the last device of the group called
  kMoved = 3,    ///< all data is in place
  kResumed = 4,  ///< this device's program went on
};
inline constexpr std::size_t kNumMoments = 5;

/// A finished or unfinished call, as a reader sees it.
struct CallRecord {
  std::int64_t device = 0;
  std::uint64_t sequence = 0;  ///< of this device, from 1
  std::uint64_t site = 0;      ///< the site id that the lowering wrote into the program
  std::int64_t run = 0;
  std::int64_t iteration = 0;
  std::array<std::int64_t, kNumMoments> moments_ns{};
};

class Recorder {
 public:
  static constexpr std::size_t kCapacity = 4096;    ///< calls kept per device
  static constexpr std::size_t kMaxDevices = 2048;  ///< XLA's limit per process

  class Entry {
   public:
    void Set(Moment moment, std::int64_t ns) {
      moments_ns_[static_cast<std::size_t>(moment)].store(ns, std::memory_order_relaxed);
    }

   private:
    friend class Recorder;
    std::atomic<std::uint64_t> sequence_{0};
    std::atomic<std::uint64_t> site_{0};
    std::atomic<std::int64_t> run_{0};
    std::atomic<std::int64_t> iteration_{0};
    std::array<std::atomic<std::int64_t>, kNumMoments> moments_ns_{};
  };

  /// The process's recorder; never destroyed.
  static Recorder& Get();

  /// Starts the next entry of `device` (any ordinal; taken modulo kMaxDevices). The reference stays
  /// valid for ever; kCapacity calls later it holds another call.
  Entry& Begin(std::int64_t device, std::uint64_t site, std::int64_t run, std::int64_t iteration,
               std::int64_t now_ns);

  /// Calls begun so far by all devices.
  [[nodiscard]] std::uint64_t num_calls() const;

  /// The entries of all devices, by device and sequence.
  [[nodiscard]] std::vector<CallRecord> Snapshot() const;

 private:
  struct Ring {
    std::atomic<std::uint64_t> next{0};
    std::array<Entry, kCapacity> entries;
  };

  Ring& RingOf(std::size_t device);

  std::array<std::atomic<Ring*>, kMaxDevices> rings_{};
};

}  // namespace jaxcoll

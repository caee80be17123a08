// host/recorder.h: one entry per call and device in the process's black box, always.
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

#include "host/black_box.h"

namespace jaxcoll {

/// What a device is about to do.
struct CallStart {
  std::uint64_t site = 0;   ///< the site id that the lowering wrote into the program
  std::uint64_t group = 0;  ///< of the devices that take part, in rank order
  std::int64_t rank = 0;    ///< in the group
  std::int64_t run = 0;
  std::int64_t iteration = 0;
  std::int64_t now_ns = 0;
};

/// A finished or unfinished call, as a reader sees it.
struct CallRecord {
  std::int64_t device = 0;
  std::uint64_t sequence = 0;  ///< of this device, from 1
  std::uint64_t site = 0;
  std::uint64_t group = 0;
  std::int64_t rank = 0;
  /// The same for all ranks that meet. Positive: across processes, by group and site. Negative: of
  /// this process alone. 0: the device has not met anybody.
  std::int64_t execution = 0;
  std::int64_t run = 0;
  std::int64_t iteration = 0;
  std::array<std::int64_t, kNumMoments> moments_ns{};
};

class Recorder {
 public:
  using Entry = BlackBox::Entry;

  static constexpr std::size_t kCapacity = BlackBox::kCapacity;  ///< calls kept per device
  static constexpr std::size_t kMaxDevices = 2048;               ///< XLA's limit per process

  /// The process's recorder; never destroyed.
  static Recorder& Get();

  /// How records name a device, whose number among all of a job has that of its process in it.
  static constexpr std::int64_t DeviceInRecords(std::int64_t device) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(device) % kMaxDevices);
  }

  /// Starts the next entry of `device` (any number; see DeviceInRecords). The reference stays
  /// valid for ever; kCapacity calls later it holds another call.
  Entry& Begin(std::int64_t device, const CallStart& start);

  /// The entry of that sequence, or null where it holds another call by now.
  Entry* Find(std::int64_t device, std::uint64_t sequence);

  /// Calls begun so far by all devices.
  [[nodiscard]] std::uint64_t num_calls() const;

 private:
  BlackBox::Ring& RingOf(std::size_t device);

  std::array<std::atomic<BlackBox::Ring*>, kMaxDevices> rings_{};
};

/// The latest entries of all devices in a black box, at most so many of each, by device and
/// sequence.
std::vector<CallRecord> RecordsIn(const BlackBox& box,
                                  std::size_t most_of_each = BlackBox::kCapacity);

}  // namespace jaxcoll

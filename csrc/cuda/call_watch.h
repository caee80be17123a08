// cuda/call_watch.h: how far a device is with the calls that were put on its stream.
#pragma once

#include <array>     // std::array
#include <atomic>    // std::atomic
#include <cstddef>   // std::size_t
#include <cstdint>   // std::int64_t, std::uint64_t
#include <mutex>     // std::mutex
#include <optional>  // std::optional

#include "core/status.h"
#include "cuda/libraries.h"
#include "cuda/recording.h"

namespace jaxcoll::cuda {

/// A call that has begun on the device and not ended.
struct LateCall {
  std::uint64_t site;
  std::int64_t waited_ns;  ///< since it was first seen to have begun, or was excused
  bool is_first;           ///< of its site
  std::int64_t open_ns;    ///< since it was first seen to have begun, whoever was excused
  std::size_t number;      ///< of the seat's calls
  std::int64_t execution;  ///< see RecordedCall
};

/// Two events for each of the latest calls, made once. A call is late by the time since it began on
/// the device: what the device computes before does not count. When all slots are taken, the next
/// calls go unwatched until one is free; the oldest, which holds up the others, is always watched.
/// The watch also says in the flight recorder that calls have ended.
///
/// One thread calls, another one looks, and neither waits for the other: to record an event can
/// take as long as a device is stuck.
class CallWatch {
 public:
  CallWatch() = default;
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;
  ~CallWatch() = default;

  /// Makes the events, of the current device.
  Status Create(const Libraries& libraries);

  /// Before a call is put on the stream; returns its slot, or kUnwatched. Nobody sees the end of
  /// one that is not watched: in the recorder it ends at once.
  std::size_t Begin(const Libraries& libraries, Stream stream, std::uint64_t site,
                    bool is_first = false, const RecordedCall& recorded = {});
  /// After it.
  void End(const Libraries& libraries, Stream stream, std::size_t slot);

  /// From the watching thread: the oldest call, if it has begun and not ended.
  std::optional<LateCall> Look(const Libraries& libraries, std::int64_t now_ns);
  /// From there, too: its wait begins now.
  void Excuse(std::int64_t now_ns) { oldest_wait_ns_ = now_ns; }

  /// When the group has failed, before anything is aborted, which ends calls as well: those that
  /// have not ended by now have failed.
  void Close(const Libraries& libraries);

  static constexpr std::size_t kSlots = 512;
  static constexpr std::size_t kUnwatched = kSlots;

 private:
  struct Slot {
    Event begun = nullptr;
    Event ended = nullptr;
    std::uint64_t site = 0;
    bool is_first = false;
    RecordedCall recorded;
    std::atomic<bool> is_on_stream{false};  // both events are recorded
  };

  [[nodiscard]] Slot& SlotOf(std::size_t call) { return slots_[call % kSlots]; }
  /// Whether a call has ended, well or not, which is recorded then.
  static bool HasEnded(const Libraries& libraries, const Slot& slot);

  std::array<Slot, kSlots> slots_{};
  std::atomic<std::size_t> num_begun_{0};  // who calls counts these,
  std::atomic<std::size_t> num_ended_{0};  // who looks these: the slots between are in use
  std::mutex look_mutex_;                  // of who looks and who closes
  std::int64_t oldest_begun_ns_ = 0;       // when that was first seen to have begun; 0: not yet
  std::int64_t oldest_wait_ns_ = 0;        // when its wait began: then, or when it was excused
};

}  // namespace jaxcoll::cuda

// cuda/recording.h: calls in the process's flight recorder (csrc/host/recorder.h), which is the
// extension's: this library is one of its own, and is given functions.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <string>   // std::string

namespace jaxcoll::cuda {

/// As csrc/host/recorder_door.h has them; null where there is no extension.
struct RecorderFunctions {
  std::uint64_t (*begin)(std::int64_t device, std::uint64_t site, std::uint64_t group,
                         std::int64_t rank, std::int64_t execution, std::int64_t run,
                         std::int64_t iteration, std::int64_t now_ns) = nullptr;
  void (*end)(std::int64_t device, std::uint64_t sequence, std::int64_t now_ns,
              int has_failed) = nullptr;
  void (*write_last_call)(std::int64_t device, char* text, std::size_t bytes) = nullptr;
  void (*write_dump_text)(char* text, std::size_t bytes) = nullptr;
};

/// Before programs run. All of the functions, or none.
void SetRecorder(const RecorderFunctions& functions);

/// What is known of a call when it begins.
struct RecordedStart {
  std::int64_t device = 0;  ///< its global id
  std::uint64_t site = 0;
  std::uint64_t group = 0;
  std::int64_t rank = 0;
  std::int64_t execution = 0;  ///< see CallRecord in csrc/host/recorder.h
  std::int64_t run = 0;
  std::int64_t iteration = 0;
};

/// One call of one device: begun when it is put on the stream. Which other devices have called is
/// not known then, so a call stands there as met at once.
class RecordedCall {
 public:
  RecordedCall() = default;
  explicit RecordedCall(const RecordedStart& start);

  /// As RecordedStart::execution.
  [[nodiscard]] std::int64_t execution() const { return execution_; }

  /// The device has done it, as somebody sees now. The last of these two counts.
  void End() const;
  /// What it computes is lost.
  void Fail() const;

 private:
  std::int64_t device_ = 0;
  std::int64_t execution_ = 0;
  std::uint64_t sequence_ = 0;  // 0: it is not recorded
};

/// What a device does, and did last; empty where nothing is recorded.
std::string LastCallText(std::int64_t device);
/// What errors say of dumps, after a line break, or nothing.
std::string DumpText();

}  // namespace jaxcoll::cuda

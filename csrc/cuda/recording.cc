#include "cuda/recording.h"

#include <array>  // std::array

#include "core/clock.h"

namespace jaxcoll::cuda {
namespace {

constexpr std::size_t kRecordedTextBytes = 4096;

RecorderFunctions& Functions() {
  static RecorderFunctions functions;
  return functions;
}

}  // namespace

void SetRecorder(const RecorderFunctions& functions) { Functions() = functions; }

RecordedCall::RecordedCall(const RecordedStart& start)
    : device_(start.device), execution_(start.execution) {
  if (Functions().begin != nullptr) {
    sequence_ = Functions().begin(start.device, start.site, start.group, start.rank,
                                  start.execution, start.run, start.iteration, NowNs());
  }
}

void RecordedCall::End() const {
  if (sequence_ != 0) {
    Functions().end(device_, sequence_, NowNs(), /*has_failed=*/0);
  }
}

void RecordedCall::Fail() const {
  if (sequence_ != 0) {
    Functions().end(device_, sequence_, NowNs(), /*has_failed=*/1);
  }
}

std::string LastCallText(std::int64_t device) {
  std::array<char, kRecordedTextBytes> text{};
  if (Functions().write_last_call != nullptr) {
    Functions().write_last_call(device, text.data(), text.size());
  }
  return text.data();
}

std::string DumpText() {
  std::array<char, kRecordedTextBytes> text{};
  if (Functions().write_dump_text != nullptr) {
    Functions().write_dump_text(text.data(), text.size());
  }
  return text.data();
}

}  // namespace jaxcoll::cuda

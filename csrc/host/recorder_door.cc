#include "host/recorder_door.h"

#include <algorithm>  // std::min
#include <atomic>     // std::memory_order_relaxed
#include <string>     // std::string

#include "core/clock.h"
#include "host/black_box.h"
#include "host/diagnosis.h"
#include "host/recorder.h"

namespace jaxcoll {
namespace {

void Write(const std::string& from, char* text, std::size_t bytes) {
  text[from.copy(text, std::min(from.size(), bytes - 1))] = '\0';
}

}  // namespace

std::uint64_t RecordBegin(std::int64_t device, std::uint64_t site, std::uint64_t group,
                          std::int64_t rank, std::int64_t execution, std::int64_t run,
                          std::int64_t iteration, std::int64_t now_ns) {
  Recorder::Entry& entry = Recorder::Get().Begin(device, {.site = site,
                                                          .group = group,
                                                          .rank = rank,
                                                          .run = run,
                                                          .iteration = iteration,
                                                          .now_ns = now_ns});
  entry.execution.store(execution, std::memory_order_relaxed);
  entry.Set(Moment::kOpened, now_ns);
  entry.Set(Moment::kMet, now_ns);
  return entry.sequence.load(std::memory_order_relaxed);
}

void RecordEnd(std::int64_t device, std::uint64_t sequence, std::int64_t now_ns, int has_failed) {
  Recorder::Entry* const entry = Recorder::Get().Find(device, sequence);
  if (entry == nullptr) {
    return;
  }
  if (has_failed == 0) {
    entry->Set(Moment::kMoved, now_ns);
  }
  entry->Set(Moment::kResumed, now_ns);
}

void WriteLastCall(std::int64_t device, char* text, std::size_t bytes) {
  Write(LastCallText(BlackBox::Get(), {device}, NowNs()), text, bytes);
}

void WriteDumpText(char* text, std::size_t bytes) { Write(DumpText(), text, bytes); }

}  // namespace jaxcoll

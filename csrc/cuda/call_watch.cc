#include "cuda/call_watch.h"

namespace jaxcoll::cuda {

Status CallWatch::Create(const Libraries& libraries) {
  const Runtime& runtime = libraries.runtime;
  for (Slot& slot : slots_) {
    for (Event* const event : {&slot.begun, &slot.ended}) {
      if (const int error = runtime.event_create_with_flags(event, kEventDisableTiming);
          error != kCudaSuccess) {
        return libraries.OfRuntime("cudaEventCreateWithFlags", error);
      }
    }
  }
  return {};
}

std::size_t CallWatch::Begin(const Libraries& libraries, Stream stream, std::uint64_t site) {
  const std::lock_guard<SpinLock> guard(lock_);
  if (used_ == kSlots) {
    return kUnwatched;
  }
  const std::size_t at = (oldest_ + used_) % kSlots;
  Slot& slot = slots_[at];
  if (libraries.runtime.event_record(slot.begun, stream) != kCudaSuccess) {
    return kUnwatched;
  }
  slot.site = site;
  slot.begun_ns = 0;
  slot.is_on_stream = false;
  ++used_;
  return at;
}

void CallWatch::End(const Libraries& libraries, Stream stream, std::size_t slot) {
  if (slot == kUnwatched) {
    return;
  }
  const std::lock_guard<SpinLock> guard(lock_);
  slots_[slot].is_on_stream =
      libraries.runtime.event_record(slots_[slot].ended, stream) == kCudaSuccess;
}

std::optional<LateCall> CallWatch::Look(const Libraries& libraries, std::int64_t now_ns) {
  const std::lock_guard<SpinLock> guard(lock_);
  while (used_ > 0) {
    Slot& slot = slots_[oldest_];
    const Runtime& runtime = libraries.runtime;
    if (slot.is_on_stream && runtime.event_query(slot.ended) != kCudaErrorNotReady) {
      oldest_ = (oldest_ + 1) % kSlots;
      --used_;
      continue;
    }
    if (slot.begun_ns == 0 && runtime.event_query(slot.begun) != kCudaErrorNotReady) {
      slot.begun_ns = now_ns;
    }
    if (slot.begun_ns == 0) {
      return std::nullopt;
    }
    return LateCall{.site = slot.site, .waited_ns = now_ns - slot.begun_ns};
  }
  return std::nullopt;
}

}  // namespace jaxcoll::cuda

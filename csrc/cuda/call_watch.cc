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

std::size_t CallWatch::Begin(const Libraries& libraries, Stream stream, std::uint64_t site,
                             bool is_first) {
  const std::size_t call = num_begun_.load(std::memory_order_relaxed);
  if (call - num_ended_.load(std::memory_order_acquire) == kSlots) {
    return kUnwatched;
  }
  Slot& slot = SlotOf(call);
  if (libraries.runtime.event_record(slot.begun, stream) != kCudaSuccess) {
    return kUnwatched;
  }
  slot.site = site;
  slot.is_first = is_first;
  slot.is_on_stream.store(false, std::memory_order_relaxed);
  num_begun_.store(call + 1, std::memory_order_release);
  return call % kSlots;
}

void CallWatch::End(const Libraries& libraries, Stream stream, std::size_t slot) {
  if (slot == kUnwatched) {
    return;
  }
  const int error = libraries.runtime.event_record(slots_[slot].ended, stream);
  slots_[slot].is_on_stream.store(error == kCudaSuccess, std::memory_order_release);
}

std::optional<LateCall> CallWatch::Look(const Libraries& libraries, std::int64_t now_ns) {
  const Runtime& runtime = libraries.runtime;
  for (std::size_t call = num_ended_.load(std::memory_order_relaxed);
       call != num_begun_.load(std::memory_order_acquire); ++call) {
    const Slot& slot = SlotOf(call);
    if (slot.is_on_stream.load(std::memory_order_acquire) &&
        runtime.event_query(slot.ended) != kCudaErrorNotReady) {
      oldest_begun_ns_ = 0;
      num_ended_.store(call + 1, std::memory_order_release);
      continue;
    }
    if (oldest_begun_ns_ == 0 && runtime.event_query(slot.begun) != kCudaErrorNotReady) {
      oldest_begun_ns_ = now_ns;
    }
    if (oldest_begun_ns_ == 0) {
      return std::nullopt;
    }
    return LateCall{
        .site = slot.site, .waited_ns = now_ns - oldest_begun_ns_, .is_first = slot.is_first};
  }
  return std::nullopt;
}

}  // namespace jaxcoll::cuda

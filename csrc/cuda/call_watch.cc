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
                             bool is_first, const RecordedCall& recorded) {
  const std::size_t call = num_begun_.load(std::memory_order_relaxed);
  Slot& slot = SlotOf(call);
  if (call - num_ended_.load(std::memory_order_acquire) == kSlots ||
      libraries.runtime.event_record(slot.begun, stream) != kCudaSuccess) {
    recorded.End();
    return kUnwatched;
  }
  slot.site = site;
  slot.is_first = is_first;
  slot.recorded = recorded;
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

bool CallWatch::HasEnded(const Libraries& libraries, const Slot& slot) {
  if (!slot.is_on_stream.load(std::memory_order_acquire)) {
    return false;
  }
  const int error = libraries.runtime.event_query(slot.ended);
  if (error == kCudaSuccess) {
    slot.recorded.End();
  } else if (error != kCudaErrorNotReady) {
    slot.recorded.Fail();
  }
  return error != kCudaErrorNotReady;
}

std::optional<LateCall> CallWatch::Look(const Libraries& libraries, std::int64_t now_ns) {
  const std::lock_guard<std::mutex> lock(look_mutex_);
  for (std::size_t call = num_ended_.load(std::memory_order_relaxed);
       call != num_begun_.load(std::memory_order_acquire); ++call) {
    const Slot& slot = SlotOf(call);
    if (HasEnded(libraries, slot)) {
      oldest_begun_ns_ = 0;
      num_ended_.store(call + 1, std::memory_order_release);
      continue;
    }
    if (oldest_begun_ns_ == 0 && libraries.runtime.event_query(slot.begun) != kCudaErrorNotReady) {
      oldest_begun_ns_ = now_ns;
      oldest_wait_ns_ = now_ns;
    }
    if (oldest_begun_ns_ == 0) {
      return std::nullopt;
    }
    return LateCall{.site = slot.site,
                    .waited_ns = now_ns - oldest_wait_ns_,
                    .is_first = slot.is_first,
                    .open_ns = now_ns - oldest_begun_ns_,
                    .number = call,
                    .execution = slot.recorded.execution()};
  }
  return std::nullopt;
}

void CallWatch::Close(const Libraries& libraries) {
  const std::lock_guard<std::mutex> lock(look_mutex_);
  const std::size_t num_begun = num_begun_.load(std::memory_order_acquire);
  for (std::size_t call = num_ended_.load(std::memory_order_relaxed); call != num_begun; ++call) {
    const Slot& slot = SlotOf(call);
    if (!HasEnded(libraries, slot)) {
      slot.recorded.Fail();
    }
  }
  num_ended_.store(num_begun, std::memory_order_release);
}

}  // namespace jaxcoll::cuda

#include "host/recorder.h"

#include <algorithm>  // std::min
#include <memory>     // std::make_unique

namespace jaxcoll {

Recorder& Recorder::Get() {
  static Recorder* const recorder =
      new Recorder();  // leaked: threads record until the process ends
  return *recorder;
}

Recorder::Ring& Recorder::RingOf(std::size_t device) {
  Ring* ring = rings_[device].load(std::memory_order_acquire);
  if (ring == nullptr) {
    auto made = std::make_unique<Ring>();
    if (rings_[device].compare_exchange_strong(ring, made.get(), std::memory_order_acq_rel)) {
      ring = made.release();
    }
  }
  return *ring;
}

Recorder::Entry& Recorder::Begin(std::int64_t device, std::uint64_t site, std::int64_t run,
                                 std::int64_t iteration, std::int64_t now_ns) {
  Ring& ring = RingOf(static_cast<std::size_t>(device) % kMaxDevices);
  const std::uint64_t sequence = ring.next.fetch_add(1, std::memory_order_relaxed) + 1;
  Entry& entry = ring.entries[(sequence - 1) % kCapacity];
  entry.sequence_.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  entry.site_.store(site, std::memory_order_relaxed);
  entry.run_.store(run, std::memory_order_relaxed);
  entry.iteration_.store(iteration, std::memory_order_relaxed);
  for (auto& moment : entry.moments_ns_) {
    moment.store(0, std::memory_order_relaxed);
  }
  entry.Set(Moment::kArrived, now_ns);
  entry.sequence_.store(sequence, std::memory_order_release);
  return entry;
}

std::uint64_t Recorder::num_calls() const {
  std::uint64_t calls = 0;
  for (const auto& ring : rings_) {
    if (const Ring* r = ring.load(std::memory_order_acquire); r != nullptr) {
      calls += r->next.load(std::memory_order_relaxed);
    }
  }
  return calls;
}

std::vector<CallRecord> Recorder::Snapshot() const {
  std::vector<CallRecord> records;
  for (std::size_t device = 0; device < kMaxDevices; ++device) {
    const Ring* ring = rings_[device].load(std::memory_order_acquire);
    if (ring == nullptr) {
      continue;
    }
    const std::uint64_t last = ring->next.load(std::memory_order_acquire);
    const std::uint64_t first = last - std::min<std::uint64_t>(last, kCapacity);
    for (std::uint64_t i = first; i < last; ++i) {
      const Entry& entry = ring->entries[i % kCapacity];
      CallRecord record;
      record.sequence = entry.sequence_.load(std::memory_order_acquire);
      record.device = static_cast<std::int64_t>(device);
      record.site = entry.site_.load(std::memory_order_relaxed);
      record.run = entry.run_.load(std::memory_order_relaxed);
      record.iteration = entry.iteration_.load(std::memory_order_relaxed);
      for (std::size_t m = 0; m < kNumMoments; ++m) {
        record.moments_ns[m] = entry.moments_ns_[m].load(std::memory_order_relaxed);
      }
      std::atomic_thread_fence(std::memory_order_acquire);
      if (record.sequence == i + 1 &&
          entry.sequence_.load(std::memory_order_relaxed) == record.sequence) {
        records.push_back(record);
      }
    }
  }
  return records;
}

}  // namespace jaxcoll

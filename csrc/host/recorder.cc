#include "host/recorder.h"

#include <algorithm>  // std::min, std::sort
#include <tuple>      // std::tie

namespace jaxcoll {

Recorder& Recorder::Get() {
  static Recorder* const recorder =
      new Recorder();  // leaked: threads record until the process ends
  return *recorder;
}

BlackBox::Ring& Recorder::RingOf(std::size_t device) {
  BlackBox::Ring* ring = rings_[device].load(std::memory_order_acquire);
  if (ring == nullptr) {
    ring = &BlackBox::Get().NewRing(static_cast<std::int64_t>(device));
    rings_[device].store(ring, std::memory_order_release);
  }
  return *ring;
}

Recorder::Entry& Recorder::Begin(std::int64_t device, const CallStart& start) {
  BlackBox::Ring& ring = RingOf(static_cast<std::size_t>(DeviceInRecords(device)));
  const std::uint64_t sequence = ring.next.fetch_add(1, std::memory_order_relaxed) + 1;
  Entry& entry = ring.entries[(sequence - 1) % kCapacity];
  entry.sequence.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  entry.site.store(start.site, std::memory_order_relaxed);
  entry.group.store(start.group, std::memory_order_relaxed);
  entry.rank.store(start.rank, std::memory_order_relaxed);
  entry.execution.store(0, std::memory_order_relaxed);
  entry.run.store(start.run, std::memory_order_relaxed);
  entry.iteration.store(start.iteration, std::memory_order_relaxed);
  for (auto& moment : entry.moments_ns) {
    moment.store(0, std::memory_order_relaxed);
  }
  entry.Set(Moment::kArrived, start.now_ns);
  entry.sequence.store(sequence, std::memory_order_release);
  const Entry& next = ring.entries[sequence % kCapacity];  // two lines that no cache has any more
  __builtin_prefetch(&next, 1);
  __builtin_prefetch(&next.moments_ns.back(), 1);
  return entry;
}

Recorder::Entry* Recorder::Find(std::int64_t device, std::uint64_t sequence) {
  BlackBox::Ring& ring = RingOf(static_cast<std::size_t>(DeviceInRecords(device)));
  Entry& entry = ring.entries[(sequence - 1) % kCapacity];
  return entry.sequence.load(std::memory_order_relaxed) == sequence ? &entry : nullptr;
}

std::uint64_t Recorder::num_calls() const {
  const BlackBox& box = BlackBox::Get();
  std::uint64_t calls = 0;
  for (std::size_t i = 0; i < box.num_rings(); ++i) {
    calls += box.ring(i).next.load(std::memory_order_relaxed);
  }
  return calls;
}

std::vector<CallRecord> RecordsIn(const BlackBox& box, std::size_t most_of_each) {
  std::vector<CallRecord> records;
  for (std::size_t i = 0; i < box.num_rings(); ++i) {
    const BlackBox::Ring& ring = box.ring(i);
    const std::uint64_t last = ring.next.load(std::memory_order_acquire);
    const std::uint64_t first = last - std::min<std::uint64_t>(last, most_of_each);
    for (std::uint64_t at = first; at < last; ++at) {
      const BlackBox::Entry& entry = ring.entries[at % BlackBox::kCapacity];
      CallRecord record;
      record.sequence = entry.sequence.load(std::memory_order_acquire);
      record.device = ring.device.load(std::memory_order_relaxed);
      record.site = entry.site.load(std::memory_order_relaxed);
      record.group = entry.group.load(std::memory_order_relaxed);
      record.rank = entry.rank.load(std::memory_order_relaxed);
      record.execution = entry.execution.load(std::memory_order_relaxed);
      record.run = entry.run.load(std::memory_order_relaxed);
      record.iteration = entry.iteration.load(std::memory_order_relaxed);
      for (std::size_t m = 0; m < kNumMoments; ++m) {
        record.moments_ns[m] = entry.moments_ns[m].load(std::memory_order_relaxed);
      }
      std::atomic_thread_fence(std::memory_order_acquire);
      if (record.sequence == at + 1 &&
          entry.sequence.load(std::memory_order_relaxed) == record.sequence) {
        records.push_back(record);
      }
    }
  }
  std::sort(records.begin(), records.end(), [](const CallRecord& a, const CallRecord& b) {
    return std::tie(a.device, a.sequence) < std::tie(b.device, b.sequence);
  });
  return records;
}

}  // namespace jaxcoll

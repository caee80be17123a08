#include "cuda/block_seat.h"

#include "cuda/peer_flags.h"

namespace jaxcoll::cuda {

Status BlockSeat::Create(const Libraries& libraries, const PeerSignals& signals, std::size_t rank,
                         std::size_t num_ranks, const std::array<std::byte*, kMostPeers>& windows,
                         Stream stream) {
  signals_ = signals;
  rank_ = rank;
  num_ranks_ = num_ranks;
  windows_ = windows;
  if (const int error = libraries.runtime.event_create_with_flags(&done_, kEventDisableTiming);
      error != kCudaSuccess) {
    return libraries.OfRuntime("cudaEventCreateWithFlags", error);
  }
  std::uint32_t& unused = WindowOf(rank_).freed[rank_];
  for (const Function kernel : {signals_.say, signals_.await}) {
    Status status = Signal(libraries, stream, kernel, {.value = 0}, unused, unused);
    if (!status.ok()) {
      return status;
    }
  }
  for (const std::size_t neighbour : {before(), after()}) {
    if (Status status =
            Copy(libraries, stream, &WindowOf(neighbour).tried[rank_], &unused, sizeof(unused));
        !status.ok()) {
      return status;
    }
  }
  const int error = libraries.runtime.stream_synchronize(stream);
  return error == kCudaSuccess ? Status{} : libraries.OfRuntime("cudaStreamSynchronize", error);
}

Status BlockSeat::Begin(const Libraries& libraries, Stream stream) {
  if (number_ != 0 && stream != stream_) {  // a device does one call after the other
    if (const int error = libraries.runtime.stream_wait_event(stream, done_, 0);
        error != kCudaSuccess) {
      return libraries.OfRuntime("cudaStreamWaitEvent", error);
    }
  }
  stream_ = stream;
  ++number_;
  return {};
}

Status BlockSeat::AwaitRoom(const Libraries& libraries, Stream stream) const {
  BlockWindow& own = WindowOf(rank_);
  return Signal(libraries, stream, signals_.await, {.value = number_ - 1}, own.freed[before()],
                own.freed[after()]);
}

Status BlockSeat::Send(const Libraries& libraries, Stream stream, const void* block,
                       std::size_t bytes, std::size_t to, std::size_t offset,
                       std::size_t arrival) const {
  Status status = Copy(libraries, stream, SlotsOf(to) + offset, block, bytes);
  std::uint32_t& flag = WindowOf(to).arrived[arrival];
  return status.ok() ? Signal(libraries, stream, signals_.say, {.value = number_}, flag, flag)
                     : status;
}

Status BlockSeat::AwaitArrival(const Libraries& libraries, Stream stream,
                               std::size_t arrival) const {
  std::uint32_t& flag = WindowOf(rank_).arrived[arrival];
  return Signal(libraries, stream, signals_.await, {.value = number_, .is_exact = true}, flag,
                flag);
}

Status BlockSeat::End(const Libraries& libraries, Stream stream) {
  Status status = Signal(libraries, stream, signals_.say, {.value = number_},
                         WindowOf(before()).freed[rank_], WindowOf(after()).freed[rank_]);
  if (const int error = libraries.runtime.event_record(done_, stream);
      error != kCudaSuccess && status.ok()) {
    status = libraries.OfRuntime("cudaEventRecord", error);
  }
  return status;
}

Status BlockSeat::Copy(const Libraries& libraries, Stream stream, void* to, const void* from,
                       std::size_t bytes) {
  const int error = libraries.runtime.memcpy_async(to, from, bytes, kMemcpyDeviceToDevice, stream);
  return error == kCudaSuccess ? Status{} : libraries.OfRuntime("cudaMemcpyAsync", error);
}

Status BlockSeat::Signal(const Libraries& libraries, Stream stream, Function kernel,
                         const Said& said, std::uint32_t& flag, std::uint32_t& other) const {
  PeerSignal signal{.flags = {&flag, &other},
                    .num_flags = &flag == &other ? 1U : 2U,
                    .value = said.value,
                    .is_exact = said.is_exact ? 1U : 0U,
                    .has_failed = signals_.ended,
                    .raised = signals_.raised};
  return LaunchPeerKernel(libraries, kernel, 1, PeerSignal::kMostFlags, stream, &signal);
}

}  // namespace jaxcoll::cuda

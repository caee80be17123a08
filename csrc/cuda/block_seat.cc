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
    if (Status status = Signal(libraries, stream, kernel, 0, unused, unused); !status.ok()) {
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
  return Signal(libraries, stream, signals_.await, number_ - 1, own.freed[before()],
                own.freed[after()]);
}

Status BlockSeat::Send(const Libraries& libraries, Stream stream, const void* block,
                       std::size_t bytes, std::size_t to, std::size_t offset,
                       std::size_t arrival) const {
  if (const int error = libraries.runtime.memcpy_async(SlotsOf(to) + offset, block, bytes,
                                                       kMemcpyDeviceToDevice, stream);
      error != kCudaSuccess) {
    return libraries.OfRuntime("cudaMemcpyAsync", error);
  }
  std::uint32_t& flag = WindowOf(to).arrived[arrival];
  return Signal(libraries, stream, signals_.say, number_, flag, flag);
}

Status BlockSeat::AwaitArrival(const Libraries& libraries, Stream stream,
                               std::size_t arrival) const {
  std::uint32_t& flag = WindowOf(rank_).arrived[arrival];
  return Signal(libraries, stream, signals_.await, number_, flag, flag);
}

Status BlockSeat::End(const Libraries& libraries, Stream stream) {
  Status status = Signal(libraries, stream, signals_.say, number_, WindowOf(before()).freed[rank_],
                         WindowOf(after()).freed[rank_]);
  if (const int error = libraries.runtime.event_record(done_, stream);
      error != kCudaSuccess && status.ok()) {
    status = libraries.OfRuntime("cudaEventRecord", error);
  }
  return status;
}

Status BlockSeat::Signal(const Libraries& libraries, Stream stream, Function kernel,
                         std::uint32_t value, std::uint32_t& flag, std::uint32_t& other) const {
  PeerSignal signal{.flags = {&flag, &other},
                    .num_flags = &flag == &other ? 1U : 2U,
                    .value = value,
                    .has_failed = signals_.ended};
  return LaunchPeerKernel(libraries, kernel, 1, PeerSignal::kMostFlags, stream, &signal);
}

}  // namespace jaxcoll::cuda

#include "cuda/block_path.h"

#include "cuda/collectives.h"

namespace jaxcoll::cuda {

Status Follow(const Libraries& libraries, Stream to, Stream from, Event event) {
  if (const int error = libraries.runtime.event_record(event, from); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaEventRecord", error);
  }
  const int error = libraries.runtime.stream_wait_event(to, event, 0);
  return error == kCudaSuccess ? Status{} : libraries.OfRuntime("cudaStreamWaitEvent", error);
}

Status BlockPath::Begin(Event begun) {
  Status status = blocks_ != nullptr ? blocks_->Begin(libraries_, stream_) : Status{};
  if (status.ok()) {
    status = Follow(begun);
  }
  if (status.ok() && blocks_ != nullptr) {
    status = blocks_->AwaitRoom(libraries_, seat_.side_stream);
  }
  return status;
}

Status BlockPath::Exchange(std::span<const Parcel> parcels, Event done) const {
  const Stream side = seat_.side_stream;
  Status status;
  if (blocks_ == nullptr) {
    status = seat_.comm.InGroup(libraries_, [&] {
      for (const Parcel& parcel : parcels) {
        Status put = Send(libraries_, seat_, side, parcel.sent, parcel.bytes, parcel.to);
        if (put.ok()) {
          put = Receive(libraries_, seat_, side, parcel.received, parcel.bytes, parcel.from);
        }
        if (!put.ok()) {
          return put;
        }
      }
      return Status{};
    });
    const int error = libraries_.runtime.event_record(done, side);
    return error == kCudaSuccess || !status.ok() ? status
                                                 : libraries_.OfRuntime("cudaEventRecord", error);
  }
  for (const Parcel& parcel : parcels) {
    if (parcel.relayed && status.ok()) {
      status = blocks_->AwaitArrival(libraries_, side, *parcel.relayed);
    }
    if (status.ok()) {
      status = blocks_->Send(libraries_, side, parcel.sent, parcel.bytes, parcel.to, parcel.offset,
                             parcel.arrival);
    }
  }
  return status;
}

Status BlockPath::Await(std::size_t arrival, Event done) const {
  if (blocks_ != nullptr) {
    return blocks_->AwaitArrival(libraries_, stream_, arrival);
  }
  const int error = libraries_.runtime.stream_wait_event(stream_, done, 0);
  return error == kCudaSuccess ? Status{} : libraries_.OfRuntime("cudaStreamWaitEvent", error);
}

// By NCCL a step's sends end with its arrivals, which were awaited.
Status BlockPath::End(Event ended) {
  if (blocks_ == nullptr) {
    return {};
  }
  Status status = cuda::Follow(libraries_, stream_, seat_.side_stream, ended);
  return status.ok() ? blocks_->End(libraries_, stream_) : status;
}

}  // namespace jaxcoll::cuda

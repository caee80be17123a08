#include "cuda/collectives.h"

namespace jaxcoll::cuda {
namespace {

Status Checked(const Libraries& libraries, const Seat& seat, const char* function, int result) {
  return HasTaken(result) ? Status{} : libraries.OfNccl(function, result, seat.comm.handle());
}

Status Copy(const Libraries& libraries, void* to, const void* from, std::size_t bytes,
            Stream stream) {
  if (to == from || bytes == 0) {
    return {};
  }
  const int error = libraries.runtime.memcpy_async(to, from, bytes, kMemcpyDeviceToDevice, stream);
  return error == kCudaSuccess ? Status{} : libraries.OfRuntime("cudaMemcpyAsync", error);
}

}  // namespace

Status Send(const Libraries& libraries, const Seat& seat, Stream stream, const void* data,
            std::size_t bytes, std::size_t to) {
  return Checked(libraries, seat, "ncclSend",
                 libraries.nccl.send(data, bytes, NcclType::kI8, static_cast<int>(to),
                                     seat.comm.handle(), stream));
}

Status Receive(const Libraries& libraries, const Seat& seat, Stream stream, void* data,
               std::size_t bytes, std::size_t from) {
  return Checked(libraries, seat, "ncclRecv",
                 libraries.nccl.receive(data, bytes, NcclType::kI8, static_cast<int>(from),
                                        seat.comm.handle(), stream));
}

Status AllReduce::Enqueue(const Libraries& libraries, const Seat& seat, Stream stream,
                          std::span<const void* const> operands,
                          std::span<void* const> results) const {
  if (IsOverPeers(seat)) {
    return SumOverPeers(libraries, seat, stream, operands, results);
  }
  return seat.comm.InGroup(libraries, [&] {
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      const Leaf& leaf = leaves_[i];
      if (leaf.count == 0) {
        continue;
      }
      Status status =
          Checked(libraries, seat, "ncclAllReduce",
                  libraries.nccl.all_reduce(operands[i], results[i],
                                            leaf.count * leaf.reduction.parts, leaf.reduction.type,
                                            leaf.reduction.op, seat.comm.handle(), stream));
      if (!status.ok()) {
        return status;
      }
    }
    return Status{};
  });
}

Status AllReduce::SumOverPeers(const Libraries& libraries, const Seat& seat, Stream stream,
                               std::span<const void* const> operands,
                               std::span<void* const> results) const {
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    const Leaf& leaf = leaves_[i];
    if (leaf.count == 0) {
      continue;
    }
    Status status = seat.peers->Sum(libraries, stream, leaf.reduction.type, operands[i], results[i],
                                    leaf.count * leaf.reduction.parts);
    if (!status.ok()) {
      return status;
    }
  }
  return {};
}

Status OneToOne::Enqueue(const Libraries& libraries, const Seat& seat, Stream stream,
                         std::span<const void* const> operands,
                         std::span<void* const> results) const {
  if (result_bytes_ == 0) {
    return {};
  }
  if (Status status = PutLocal(libraries, seat, stream, operands[0], results[0]); !status.ok()) {
    return status;
  }
  return seat.comm.InGroup(libraries,
                           [&] { return Put(libraries, seat, stream, operands[0], results[0]); });
}

Status AllGather::Put(const Libraries& libraries, const Seat& seat, Stream stream,
                      const void* operand, void* result) const {
  return Checked(libraries, seat, "ncclAllGather",
                 libraries.nccl.all_gather(operand, result, bytes_, NcclType::kI8,
                                           seat.comm.handle(), stream));
}

Status ReduceScatter::Put(const Libraries& libraries, const Seat& seat, Stream stream,
                          const void* operand, void* result) const {
  return Checked(
      libraries, seat, "ncclReduceScatter",
      libraries.nccl.reduce_scatter(operand, result, count_ * reduction_.parts, reduction_.type,
                                    reduction_.op, seat.comm.handle(), stream));
}

Status AllToAll::PutLocal(const Libraries& libraries, const Seat& seat, Stream stream,
                          const void* operand, void* result) const {
  const std::size_t own = seat.rank * bytes_;
  return Copy(libraries, static_cast<std::byte*>(result) + own,
              static_cast<const std::byte*>(operand) + own, bytes_, stream);
}

Status AllToAll::Put(const Libraries& libraries, const Seat& seat, Stream stream,
                     const void* operand, void* result) const {
  const auto* const from = static_cast<const std::byte*>(operand);
  auto* const to = static_cast<std::byte*>(result);
  for (std::size_t step = 1; step < seat.num_ranks; ++step) {
    // Not all ranks begin with the same peer.
    const std::size_t peer = (seat.rank + step) % seat.num_ranks;
    Status status = Send(libraries, seat, stream, from + peer * bytes_, bytes_, peer);
    if (status.ok()) {
      status = Receive(libraries, seat, stream, to + peer * bytes_, bytes_, peer);
    }
    if (!status.ok()) {
      return status;
    }
  }
  return {};
}

Status Permute::PutLocal(const Libraries& libraries, const Seat& seat, Stream stream,
                         const void* operand, void* result) const {
  const int source = sources_[seat.rank];
  if (source >= 0) {
    return source == static_cast<int>(seat.rank) ? Copy(libraries, result, operand, bytes_, stream)
                                                 : Status{};
  }
  const int error = libraries.runtime.memset_async(result, 0, bytes_, stream);
  return error == kCudaSuccess ? Status{} : libraries.OfRuntime("cudaMemsetAsync", error);
}

Status Permute::Put(const Libraries& libraries, const Seat& seat, Stream stream,
                    const void* operand, void* result) const {
  const int rank = static_cast<int>(seat.rank);
  const int source = sources_[seat.rank];
  for (std::size_t target = 0; target < sources_.size(); ++target) {
    if (sources_[target] != rank || target == seat.rank) {
      continue;
    }
    if (Status status = Send(libraries, seat, stream, operand, bytes_, target); !status.ok()) {
      return status;
    }
  }
  if (source < 0 || source == rank) {
    return {};
  }
  return Receive(libraries, seat, stream, result, bytes_, static_cast<std::size_t>(source));
}

Status Broadcast::Put(const Libraries& libraries, const Seat& seat, Stream stream,
                      const void* operand, void* result) const {
  return Checked(libraries, seat, "ncclBroadcast",
                 libraries.nccl.broadcast(operand, result, bytes_, NcclType::kI8, root_,
                                          seat.comm.handle(), stream));
}

}  // namespace jaxcoll::cuda

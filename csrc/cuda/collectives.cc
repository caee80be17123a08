#include "cuda/collectives.h"

namespace jaxcoll::cuda {
namespace {

Status Checked(const Libraries& libraries, const Seat& seat, const char* function, int result) {
  return result == kNcclSuccess ? Status{} : libraries.OfNccl(function, result, seat.comm);
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

Status AllReduce::Enqueue(const Libraries& libraries, const Seat& seat, Stream stream,
                          std::span<const void* const> operands,
                          std::span<void* const> results) const {
  return InGroup(libraries, seat, [&] {
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      const Leaf& leaf = leaves_[i];
      if (leaf.count == 0) {
        continue;
      }
      const int result =
          libraries.nccl.all_reduce(operands[i], results[i], leaf.count * leaf.reduction.parts,
                                    leaf.reduction.type, leaf.reduction.op, seat.comm, stream);
      if (result != kNcclSuccess) {
        return libraries.OfNccl("ncclAllReduce", result, seat.comm);
      }
    }
    return Status{};
  });
}

Status OneToOne::Enqueue(const Libraries& libraries, const Seat& seat, Stream stream,
                         std::span<const void* const> operands,
                         std::span<void* const> results) const {
  if (result_bytes_ == 0) {
    return {};
  }
  return Put(libraries, seat, stream, operands[0], results[0]);
}

Status AllGather::Put(const Libraries& libraries, const Seat& seat, Stream stream,
                      const void* operand, void* result) const {
  return Checked(
      libraries, seat, "ncclAllGather",
      libraries.nccl.all_gather(operand, result, bytes_, NcclType::kI8, seat.comm, stream));
}

Status ReduceScatter::Put(const Libraries& libraries, const Seat& seat, Stream stream,
                          const void* operand, void* result) const {
  return Checked(libraries, seat, "ncclReduceScatter",
                 libraries.nccl.reduce_scatter(operand, result, count_ * reduction_.parts,
                                               reduction_.type, reduction_.op, seat.comm, stream));
}

Status AllToAll::Put(const Libraries& libraries, const Seat& seat, Stream stream,
                     const void* operand, void* result) const {
  const auto* const from = static_cast<const std::byte*>(operand);
  auto* const to = static_cast<std::byte*>(result);
  const std::size_t own = seat.rank * bytes_;
  if (Status status = Copy(libraries, to + own, from + own, bytes_, stream); !status.ok()) {
    return status;
  }
  return InGroup(libraries, seat, [&] {
    for (std::size_t step = 1; step < seat.num_ranks; ++step) {
      // Not all ranks begin with the same peer.
      const std::size_t peer = (seat.rank + step) % seat.num_ranks;
      const int rank = static_cast<int>(peer);
      if (const int sent = libraries.nccl.send(from + peer * bytes_, bytes_, NcclType::kI8, rank,
                                               seat.comm, stream);
          sent != kNcclSuccess) {
        return libraries.OfNccl("ncclSend", sent, seat.comm);
      }
      if (const int received = libraries.nccl.receive(to + peer * bytes_, bytes_, NcclType::kI8,
                                                      rank, seat.comm, stream);
          received != kNcclSuccess) {
        return libraries.OfNccl("ncclRecv", received, seat.comm);
      }
    }
    return Status{};
  });
}

Status Permute::Put(const Libraries& libraries, const Seat& seat, Stream stream,
                    const void* operand, void* result) const {
  const int rank = static_cast<int>(seat.rank);
  const int source = sources_[seat.rank];
  if (source == rank) {
    if (Status status = Copy(libraries, result, operand, bytes_, stream); !status.ok()) {
      return status;
    }
  } else if (source < 0) {
    if (const int error = libraries.runtime.memset_async(result, 0, bytes_, stream);
        error != kCudaSuccess) {
      return libraries.OfRuntime("cudaMemsetAsync", error);
    }
  }
  return InGroup(libraries, seat, [&] {
    for (std::size_t target = 0; target < sources_.size(); ++target) {
      if (sources_[target] != rank || target == seat.rank) {
        continue;
      }
      if (const int sent = libraries.nccl.send(operand, bytes_, NcclType::kI8,
                                               static_cast<int>(target), seat.comm, stream);
          sent != kNcclSuccess) {
        return libraries.OfNccl("ncclSend", sent, seat.comm);
      }
    }
    if (source < 0 || source == rank) {
      return Status{};
    }
    return Checked(
        libraries, seat, "ncclRecv",
        libraries.nccl.receive(result, bytes_, NcclType::kI8, source, seat.comm, stream));
  });
}

Status Broadcast::Put(const Libraries& libraries, const Seat& seat, Stream stream,
                      const void* operand, void* result) const {
  return Checked(
      libraries, seat, "ncclBroadcast",
      libraries.nccl.broadcast(operand, result, bytes_, NcclType::kI8, root_, seat.comm, stream));
}

}  // namespace jaxcoll::cuda

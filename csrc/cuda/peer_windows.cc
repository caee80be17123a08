#include "cuda/peer_windows.h"

#include <algorithm>  // std::copy_n, std::min

namespace jaxcoll::cuda {
namespace {

// CUDA shares whole blocks of this size between processes: else other allocations would go along.
constexpr std::size_t kSharedBytes = 2 << 20;

Status EnableAccess(const Libraries& libraries, int peer) {
  const int error = libraries.runtime.device_enable_peer_access(peer, 0);
  return error == kCudaSuccess || error == kCudaErrorPeerAccessAlreadyEnabled
             ? Status{}
             : libraries.OfRuntime("cudaDeviceEnablePeerAccess", error);
}

/// Of a window of another process, for the current device.
Status Open(const Libraries& libraries, int viewer, const PeerOffer& offer, std::byte*& window) {
  // The other process may have another number for the device, and a device of which this one has
  // none can be mapped, too.
  int ordinal = viewer;
  if (libraries.ipc.device_get_by_pci_bus_id(&ordinal, offer.bus_id.data()) == kCudaSuccess &&
      ordinal != viewer) {
    int can = 0;
    if (const int error = libraries.runtime.device_can_access_peer(&can, viewer, ordinal);
        error != kCudaSuccess) {
      return libraries.OfRuntime("cudaDeviceCanAccessPeer", error);
    }
    if (can == 0) {
      return Internal("CUDA says that their devices can't");
    }
  }
  void* memory = nullptr;
  if (const int error =
          libraries.ipc.open_mem_handle(&memory, offer.handle, kIpcMemLazyEnablePeerAccess);
      error != kCudaSuccess) {
    return libraries.OfRuntime("cudaIpcOpenMemHandle", error);
  }
  window = static_cast<std::byte*>(memory);
  return {};
}

}  // namespace

PeerText ToPeerText(const std::string& problem) {
  PeerText text{};
  std::copy_n(problem.begin(), std::min(problem.size(), text.size() - 1), text.begin());
  return text;
}

void PeerWindows::Offer(const Libraries& libraries, const LocalRank& of, std::size_t bytes,
                        bool is_shared, PeerOffer& offer) {
  Status status = Make(libraries, of, bytes, is_shared);
  if (status.ok() && is_shared) {
    status = Describe(libraries, of, offer);
  }
  if (!status.ok()) {
    offer.problem = ToPeerText("rank " + std::to_string(of.rank) + ": " + status.message);
  }
}

Status PeerWindows::Make(const Libraries& libraries, const LocalRank& of, std::size_t bytes,
                         bool is_shared) {
  const Runtime& runtime = libraries.runtime;
  if (const int error = runtime.set_device(of.ordinal); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaSetDevice", error);
  }
  void* memory = nullptr;
  const std::size_t whole = (bytes + kSharedBytes - 1) / kSharedBytes * kSharedBytes;
  if (const int error = runtime.malloc(&memory, is_shared ? whole : bytes); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaMalloc", error);
  }
  own_.at(of.rank) = {.window = static_cast<std::byte*>(memory), .ordinal = of.ordinal};
  if (const int error = runtime.memset_async(memory, 0, bytes, of.stream); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaMemsetAsync", error);
  }
  const int error = runtime.stream_synchronize(of.stream);
  return error == kCudaSuccess ? Status{} : libraries.OfRuntime("cudaStreamSynchronize", error);
}

Status PeerWindows::Describe(const Libraries& libraries, const LocalRank& of,
                             PeerOffer& offer) const {
  if (const int error = libraries.ipc.device_get_pci_bus_id(
          offer.bus_id.data(), static_cast<int>(offer.bus_id.size()), of.ordinal);
      error != kCudaSuccess) {
    return libraries.OfRuntime("cudaDeviceGetPCIBusId", error);
  }
  const int error = libraries.ipc.get_mem_handle(&offer.handle, own_.at(of.rank).window);
  return error == kCudaSuccess ? Status{} : libraries.OfRuntime("cudaIpcGetMemHandle", error);
}

Status PeerWindows::Map(const Libraries& libraries, const LocalRank& viewer,
                        const std::vector<PeerOffer>& offers,
                        std::array<std::byte*, kMostPeers>& windows) const {
  if (const int error = libraries.runtime.set_device(viewer.ordinal); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaSetDevice", error);
  }
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    const Own& own = own_.at(rank);
    windows.at(rank) = own.window;
    Status status;
    if (own.window == nullptr) {
      status = Open(libraries, viewer.ordinal, offers[rank], windows.at(rank));
    } else if (own.ordinal != viewer.ordinal) {
      status = EnableAccess(libraries, own.ordinal);
    }
    if (!status.ok()) {
      status.message =
          "can't reach the memory of rank " + std::to_string(rank) + ": " + status.message;
      return status;
    }
  }
  return {};
}

}  // namespace jaxcoll::cuda

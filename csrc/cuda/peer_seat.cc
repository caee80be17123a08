#include "cuda/peer_seat.h"

#include <bit>     // std::bit_cast
#include <string>  // std::string, std::to_string

namespace jaxcoll::cuda {
namespace {

/// As cuda/peer_kernels.cu names its kernels; null: NCCL alone has the type.
const char* NameOf(NcclType type) {
  switch (type) {
    case NcclType::kI8:
    case NcclType::kU8:
      return "i8";
    case NcclType::kI32:
    case NcclType::kU32:
      return "i32";
    case NcclType::kI64:
    case NcclType::kU64:
      return "i64";
    case NcclType::kF16:
      return "f16";
    case NcclType::kBF16:
      return "bf16";
    case NcclType::kF32:
      return "f32";
    case NcclType::kF64:
      return "f64";
  }
  return nullptr;
}

std::size_t BytesOf(NcclType type) {
  switch (type) {
    case NcclType::kI8:
    case NcclType::kU8:
      return 1;
    case NcclType::kF16:
    case NcclType::kBF16:
      return 2;
    case NcclType::kI32:
    case NcclType::kU32:
    case NcclType::kF32:
      return 4;
    case NcclType::kI64:
    case NcclType::kU64:
    case NcclType::kF64:
      return 8;
  }
  return 0;
}

bool IsAligned(const void* data) { return std::bit_cast<std::uintptr_t>(data) % 16 == 0; }

Status OfDriver(const char* function, int error) {
  return Internal(std::string(function) + ": CUDA error " + std::to_string(error));
}

}  // namespace

Status LaunchPeerKernel(const Libraries& libraries, Function kernel, std::uint32_t num_blocks,
                        std::uint32_t num_threads, Stream stream, void* parameter) {
  const int error = libraries.driver.launch_kernel(kernel, num_blocks, 1, 1, num_threads, 1, 1, 0,
                                                   stream, &parameter, nullptr);
  return error == kCudaSuccess ? Status{} : OfDriver("cuLaunchKernel", error);
}

bool PeerSeat::Fits(NcclType type, std::size_t count) {
  return count <= kPeerSlotBytes / BytesOf(type);
}

Status PeerSeat::Create(const Libraries& libraries, const void* image, std::size_t rank,
                        std::size_t num_ranks, const std::array<std::byte*, kMostPeers>& windows) {
  call_.rank = static_cast<std::uint32_t>(rank);
  call_.num_ranks = static_cast<std::uint32_t>(num_ranks);
  for (std::size_t peer = 0; peer < num_ranks; ++peer) {
    call_.windows[peer] = reinterpret_cast<PeerWindow*>(windows.at(peer));
  }
  if (Status status = LoadKernels(libraries, image); !status.ok()) {
    return status;
  }
  const int error = libraries.runtime.event_create_with_flags(&done_, kEventDisableTiming);
  return error == kCudaSuccess ? Status{} : libraries.OfRuntime("cudaEventCreateWithFlags", error);
}

Status PeerSeat::LoadKernels(const Libraries& libraries, const void* image) {
  Module module = nullptr;
  if (const int error = libraries.driver.module_load_data(&module, image); error != kCudaSuccess) {
    return OfDriver("cuModuleLoadData", error);
  }
  int error = kCudaSuccess;
  const auto find = [&](const std::string& name, Function& kernel) {
    if (error == kCudaSuccess) {
      error = libraries.driver.module_get_function(&kernel, module, name.c_str());
    }
  };
  find("jaxcoll_say", signals_.say);
  find("jaxcoll_await", signals_.await);
  for (std::size_t type = 0; type < kNumTypes; ++type) {
    if (const char* const name = NameOf(static_cast<NcclType>(type)); name != nullptr) {
      find(std::string("jaxcoll_one_shot_") + name, kernels_[type].one_shot);
      find(std::string("jaxcoll_two_shot_") + name, kernels_[type].two_shot);
    }
  }
  return error == kCudaSuccess ? Status{} : OfDriver("cuModuleGetFunction", error);
}

Status PeerSeat::Sum(const Libraries& libraries, Stream stream, NcclType type, const void* operand,
                     void* result, std::size_t count) {
  const Runtime& runtime = libraries.runtime;
  if (call_.number != 0 && stream != stream_) {  // a device does one call after the other
    if (const int error = runtime.stream_wait_event(stream, done_, 0); error != kCudaSuccess) {
      return libraries.OfRuntime("cudaStreamWaitEvent", error);
    }
  }
  stream_ = stream;
  call_.operand = operand;
  call_.result = result;
  call_.count = count;
  ++call_.number;
  call_.is_aligned = IsAligned(operand) && IsAligned(result) ? 1 : 0;
  const std::size_t bytes = count * BytesOf(type);
  const Kernels& kernels = kernels_[static_cast<std::size_t>(type)];
  if (Status status =
          LaunchPeerKernel(libraries, bytes <= kOneShotBytes ? kernels.one_shot : kernels.two_shot,
                           PeerBlocks(bytes), kPeerThreads, stream, &call_);
      !status.ok()) {
    return status;
  }
  const int error = runtime.event_record(done_, stream);
  return error == kCudaSuccess ? Status{} : libraries.OfRuntime("cudaEventRecord", error);
}

}  // namespace jaxcoll::cuda

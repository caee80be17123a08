#include "cuda/peer_memory.h"

#include <atomic>  // std::atomic_ref
#include <bit>     // std::bit_cast
#include <chrono>  // std::chrono
#include <random>  // std::random_device
#include <thread>  // std::this_thread

#include "core/clock.h"

namespace jaxcoll::cuda {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(1);
constexpr std::int64_t kPatienceNs = 2'000'000'000;

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

bool PeerSeat::Fits(NcclType type, std::size_t count) {
  return count <= kPeerSlotBytes / BytesOf(type);
}

Status PeerSeat::LoadKernels(const Libraries& libraries, const void* image) {
  Module module = nullptr;
  if (const int error = libraries.driver.module_load_data(&module, image); error != kCudaSuccess) {
    return OfDriver("cuModuleLoadData", error);
  }
  for (std::size_t type = 0; type < kNumTypes; ++type) {
    const char* const name = NameOf(static_cast<NcclType>(type));
    if (name == nullptr) {
      continue;
    }
    const auto find = [&](const char* prefix, Function& kernel) {
      return libraries.driver.module_get_function(&kernel, module,
                                                  (std::string(prefix) + name).c_str());
    };
    int error = find("jaxcoll_one_shot_", kernels_[type].one_shot);
    if (error == kCudaSuccess) {
      error = find("jaxcoll_two_shot_", kernels_[type].two_shot);
    }
    if (error != kCudaSuccess) {
      return OfDriver("cuModuleGetFunction", error);
    }
  }
  return {};
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
  auto* parameter = static_cast<void*>(&call_);  // is copied
  if (const int error = libraries.driver.launch_kernel(
          bytes <= kOneShotBytes ? kernels.one_shot : kernels.two_shot, PeerBlocks(bytes), 1, 1,
          kPeerThreads, 1, 1, 0, stream, &parameter, nullptr);
      error != kCudaSuccess) {
    return OfDriver("cuLaunchKernel", error);
  }
  const int error = runtime.event_record(done_, stream);
  return error == kCudaSuccess ? Status{} : libraries.OfRuntime("cudaEventRecord", error);
}

std::string PeerMemory::Problem(const Libraries& libraries, const std::vector<int>& ordinals) {
  if (ordinals.size() > kMostPeers) {
    return "a group of " + std::to_string(ordinals.size()) + " ranks, more than " +
           std::to_string(kMostPeers);
  }
  for (const int device : ordinals) {
    for (const int peer : ordinals) {
      int can = 1;
      const int error = device == peer
                            ? kCudaSuccess
                            : libraries.runtime.device_can_access_peer(&can, device, peer);
      if (error != kCudaSuccess || can == 0) {
        return "device " + std::to_string(device) + " can't read the memory of device " +
               std::to_string(peer);
      }
    }
  }
  return "";
}

Status PeerMemory::Create(const Libraries& libraries, const void* image,
                          const std::vector<Rank>& ranks, const std::uint32_t* ended,
                          std::int64_t timeout_ns) {
  Status status = MakeWindows(libraries, ranks);
  if (status.ok()) {
    status = MakeSeats(libraries, image, ranks);
  }
  if (status.ok()) {
    status = Probe(libraries, ranks, timeout_ns);
  }
  for (const auto& seat : seats_) {
    seat->call_.has_failed = ended;
  }
  is_usable_ = status.ok();
  return status;
}

Status PeerMemory::MakeWindows(const Libraries& libraries, const std::vector<Rank>& ranks) {
  const Runtime& runtime = libraries.runtime;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (const int error = runtime.set_device(ranks[r].ordinal); error != kCudaSuccess) {
      return libraries.OfRuntime("cudaSetDevice", error);
    }
    void* memory = nullptr;
    if (const int error = runtime.malloc(&memory, sizeof(PeerWindow)); error != kCudaSuccess) {
      return libraries.OfRuntime("cudaMalloc", error);
    }
    windows_[r] = static_cast<PeerWindow*>(memory);
    if (const int error = runtime.memset_async(memory, 0, sizeof(PeerWindow), ranks[r].stream);
        error != kCudaSuccess) {
      return libraries.OfRuntime("cudaMemsetAsync", error);
    }
    if (const int error = runtime.stream_synchronize(ranks[r].stream); error != kCudaSuccess) {
      return libraries.OfRuntime("cudaStreamSynchronize", error);
    }
    for (const Rank& peer : ranks) {
      if (peer.ordinal == ranks[r].ordinal) {
        continue;
      }
      const int error = runtime.device_enable_peer_access(peer.ordinal, 0);
      if (error != kCudaSuccess && error != kCudaErrorPeerAccessAlreadyEnabled) {
        return libraries.OfRuntime("cudaDeviceEnablePeerAccess", error);
      }
    }
  }
  return {};
}

Status PeerMemory::MakeSeats(const Libraries& libraries, const void* image,
                             const std::vector<Rank>& ranks) {
  const Runtime& runtime = libraries.runtime;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    PeerSeat& seat = *seats_.emplace_back(std::make_unique<PeerSeat>());
    seat.ordinal_ = ranks[r].ordinal;
    seat.call_.rank = static_cast<std::uint32_t>(r);
    seat.call_.num_ranks = static_cast<std::uint32_t>(ranks.size());
    for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
      seat.call_.windows[peer] = windows_[peer];
    }
    if (const int error = runtime.set_device(seat.ordinal_); error != kCudaSuccess) {
      return libraries.OfRuntime("cudaSetDevice", error);
    }
    if (Status status = seat.LoadKernels(libraries, image); !status.ok()) {
      return status;
    }
    if (const int error = runtime.event_create_with_flags(&seat.done_, kEventDisableTiming);
        error != kCudaSuccess) {
      return libraries.OfRuntime("cudaEventCreateWithFlags", error);
    }
  }
  return {};
}

// Rank r adds a number of its own as element r, and zeros: the sum has the numbers of all ranks.
Status PeerMemory::Probe(const Libraries& libraries, const std::vector<Rank>& ranks,
                         std::int64_t timeout_ns) {
  const Runtime& runtime = libraries.runtime;
  struct Sheet {  // in the host's memory, which all devices read and write
    std::uint32_t has_failed;
    std::uint32_t numbers[kMostPeers][kMostPeers];
    std::uint32_t sums[kMostPeers][kMostPeers];
  };
  void* memory = nullptr;  // never freed, as the windows
  if (const int error =
          runtime.host_alloc(&memory, sizeof(Sheet), kHostAllocPortable | kHostAllocMapped);
      error != kCudaSuccess) {
    return libraries.OfRuntime("cudaHostAlloc", error);
  }
  auto& sheet = *new (memory) Sheet{};
  std::random_device random;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    sheet.numbers[r][r] = random() | 1;
  }
  Status status;
  for (std::size_t r = 0; r < ranks.size() && status.ok(); ++r) {
    seats_[r]->call_.has_failed = &sheet.has_failed;
    const int error = runtime.set_device(ranks[r].ordinal);
    status = error == kCudaSuccess ? seats_[r]->Sum(libraries, ranks[r].stream, NcclType::kU32,
                                                    sheet.numbers[r], sheet.sums[r], ranks.size())
                                   : libraries.OfRuntime("cudaSetDevice", error);
  }
  const std::int64_t until_ns = NowNs() + timeout_ns;
  for (const Rank& rank : ranks) {
    int error = kCudaErrorNotReady;
    while ((error = runtime.stream_query(rank.stream)) == kCudaErrorNotReady) {
      const bool is_late = timeout_ns >= 0 && NowNs() >= until_ns;
      if (!status.ok() || is_late) {
        std::atomic_ref(sheet.has_failed).store(1);  // then the kernels end
        status = status.ok() ? Internal("the probe of peer memory has not ended") : status;
      }
      if (is_late && NowNs() >= until_ns + kPatienceNs) {
        return status;  // the device is stuck
      }
      std::this_thread::sleep_for(kLookEvery);
    }
    if (error != kCudaSuccess && status.ok()) {
      status = libraries.OfRuntime("the probe of peer memory", error);
    }
  }
  for (std::size_t r = 0; r < ranks.size() && status.ok(); ++r) {
    for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
      if (sheet.sums[r][peer] != sheet.numbers[peer][peer]) {
        status =
            Internal("device " + std::to_string(ranks[r].ordinal) + " has not read what device " +
                     std::to_string(ranks[peer].ordinal) + " has written");
      }
    }
  }
  return status;
}

}  // namespace jaxcoll::cuda

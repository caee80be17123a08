#include "cuda/peer_probe.h"

#include <atomic>   // std::atomic_ref
#include <chrono>   // std::chrono
#include <cstddef>  // std::size_t
#include <string>   // std::to_string
#include <thread>   // std::this_thread

#include "core/clock.h"

namespace jaxcoll::cuda {
namespace {

constexpr auto kQueryEvery = std::chrono::milliseconds(1);
constexpr std::int64_t kPatienceNs = 2'000'000'000;

// In the host's memory, which all devices read and write.
struct Sheet {
  std::uint32_t has_failed;
  std::uint32_t numbers[kMostPeers][kMostPeers];
  std::uint32_t sums[kMostPeers][kMostPeers];
};

Status Put(const Libraries& libraries, const LocalRank& of, PeerSeat& seat, Sheet& sheet,
           const std::vector<std::uint32_t>& numbers) {
  // As element `rank`, among zeros: the sum has the numbers of all ranks.
  sheet.numbers[of.rank][of.rank] = numbers[of.rank];
  seat.EndAt(&sheet.has_failed);
  const int error = libraries.runtime.set_device(of.ordinal);
  return error == kCudaSuccess
             ? seat.Sum(libraries, of.stream, NcclType::kU32, sheet.numbers[of.rank],
                        sheet.sums[of.rank], numbers.size())
             : libraries.OfRuntime("cudaSetDevice", error);
}

}  // namespace

Status ProbePeers(const Libraries& libraries, const std::vector<LocalRank>& local,
                  const std::vector<std::unique_ptr<PeerSeat>>& seats,
                  const std::vector<std::uint32_t>& numbers, std::int64_t timeout_ns) {
  const Runtime& runtime = libraries.runtime;
  void* memory = nullptr;  // never freed, as the windows
  if (const int error =
          runtime.host_alloc(&memory, sizeof(Sheet), kHostAllocPortable | kHostAllocMapped);
      error != kCudaSuccess) {
    return libraries.OfRuntime("cudaHostAlloc", error);
  }
  auto& sheet = *new (memory) Sheet{};
  Status status;
  for (std::size_t i = 0; i < local.size() && status.ok(); ++i) {
    status = Put(libraries, local[i], *seats[i], sheet, numbers);
  }
  const std::int64_t until_ns = NowNs() + timeout_ns;
  for (const LocalRank& rank : local) {
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
      std::this_thread::sleep_for(kQueryEvery);
    }
    if (error != kCudaSuccess && status.ok()) {
      status = libraries.OfRuntime("the probe of peer memory", error);
    }
  }
  for (std::size_t i = 0; i < local.size() && status.ok(); ++i) {
    for (std::size_t peer = 0; peer < numbers.size(); ++peer) {
      if (sheet.sums[local[i].rank][peer] != numbers[peer]) {
        status = Internal("rank " + std::to_string(local[i].rank) + " has not read what rank " +
                          std::to_string(peer) + " has written");
      }
    }
  }
  return status;
}

}  // namespace jaxcoll::cuda

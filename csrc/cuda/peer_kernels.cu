// cuda/peer_kernels.cu: the kernels that sum over peer memory, and those that say or await flags.
// Compiled where nvcc is, into an image that libjaxcoll_cuda.so carries; cuda/peer_image.h.
#include "cuda/peer_call.h"
#include "cuda/peer_flags.h"
#include "cuda/peer_sum.h"

namespace {

using namespace jaxcoll::cuda;

/// The threads of a block. Flags are of the scope of the system: of other devices, other processes.
class DeviceTeam {
 public:
  JAXCOLL_ON_DEVICE std::uint32_t thread() const { return threadIdx.x; }
  JAXCOLL_ON_DEVICE std::uint32_t num_threads() const { return blockDim.x; }
  JAXCOLL_ON_DEVICE std::uint32_t block() const { return blockIdx.x; }
  JAXCOLL_ON_DEVICE std::uint32_t num_blocks() const { return gridDim.x; }

  // The fence is of each thread's own writes: one after the barrier, by who stores the flag, would
  // do by PTX's model, which takes what was seen through a barrier along.
  JAXCOLL_ON_DEVICE void Sync() const {
    __threadfence_system();
    __syncthreads();
  }
  JAXCOLL_ON_DEVICE bool SyncAll(bool value) const { return __syncthreads_and(value ? 1 : 0) != 0; }
  JAXCOLL_ON_DEVICE void Store(std::uint32_t& flag, std::uint32_t value) const {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&flag), "r"(value) : "memory");
  }
  JAXCOLL_ON_DEVICE std::uint32_t Load(const std::uint32_t& flag) const {
    std::uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(&flag) : "memory");
    return value;
  }
  JAXCOLL_ON_DEVICE std::uint32_t LoadFailure(const std::uint32_t& word) const {
    std::uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(&word) : "memory");
    return value;
  }
  JAXCOLL_ON_DEVICE void Trap() const { asm volatile("trap;"); }
};

}  // namespace

#define JAXCOLL_PEER_SUM(name, ...)                                                          \
  extern "C" __global__ void __launch_bounds__(kPeerThreads)                                 \
      jaxcoll_one_shot_##name(const __grid_constant__ PeerCall call) {                       \
    DeviceTeam team;                                                                         \
    PeerSum<__VA_ARGS__, DeviceTeam>(call, team).OneShot();                                  \
  }                                                                                          \
  extern "C" __global__ void __launch_bounds__(kPeerThreads)                                 \
      jaxcoll_two_shot_##name(const __grid_constant__ PeerCall call) {                       \
    DeviceTeam team;                                                                         \
    PeerSum<__VA_ARGS__, DeviceTeam>(call, team).TwoShot();                                  \
  }

JAXCOLL_PEER_SUM(i8, PlainElement<std::uint8_t>)
JAXCOLL_PEER_SUM(i32, PlainElement<std::uint32_t>)
JAXCOLL_PEER_SUM(i64, PlainElement<std::uint64_t>)
JAXCOLL_PEER_SUM(f16, F16Element)
JAXCOLL_PEER_SUM(bf16, BF16Element)
JAXCOLL_PEER_SUM(f32, PlainElement<float>)
JAXCOLL_PEER_SUM(f64, PlainElement<double>)

extern "C" __global__ void jaxcoll_say(const __grid_constant__ PeerSignal signal) {
  DeviceTeam team;
  SayFlags(signal, team);
}
extern "C" __global__ void jaxcoll_await(const __grid_constant__ PeerSignal signal) {
  DeviceTeam team;
  AwaitFlags(signal, team);
}

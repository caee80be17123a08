#include "cuda/failing.h"

#include <string>  // std::string, std::to_string

namespace jaxcoll::cuda {
namespace {

// The driver compiles it for the device.
constexpr char kCheck[] = R"(.version 6.3
.target sm_70
.address_size 64
.visible .entry jaxcoll_check(.param .u64 flag)
{
  .reg .pred %failed;
  .reg .u32 %value;
  .reg .u64 %address;
  ld.param.u64 %address, [flag];
  ld.volatile.u32 %value, [%address];
  setp.ne.u32 %failed, %value, 0;
  @%failed trap;
  ret;
}
)";

Status OfCheck(const char* function, int error) {
  return Internal(std::string(function) + ": CUDA error " + std::to_string(error) +
                  " (JAXCOLL_CUDA_TRAP=0 does without this check)");
}

}  // namespace

Status FailureFlag::Create(const Libraries& libraries) {
  void* memory = nullptr;
  if (const int error = libraries.runtime.host_alloc(&memory, 2 * sizeof(*words_),
                                                     kHostAllocPortable | kHostAllocMapped);
      error != kCudaSuccess) {
    return libraries.OfRuntime("cudaHostAlloc", error);
  }
  words_ = static_cast<std::uint32_t*>(memory);
  std::atomic_ref(words_[0]).store(0);
  std::atomic_ref(words_[1]).store(0);
  return {};
}

Status FailureCheck::Create(const Libraries& libraries) {
  Module module = nullptr;
  if (const int error = libraries.driver.module_load_data(&module, kCheck); error != kCudaSuccess) {
    return OfCheck("cuModuleLoadData", error);
  }
  if (const int error = libraries.driver.module_get_function(&kernel_, module, "jaxcoll_check");
      error != kCudaSuccess) {
    return OfCheck("cuModuleGetFunction", error);
  }
  return {};
}

Status FailureCheck::Enqueue(const Libraries& libraries, const FailureFlag& flag,
                             Stream stream) const {
  if (kernel_ == nullptr) {
    return {};
  }
  std::uint32_t* word = flag.word();
  auto* parameter = static_cast<void*>(&word);
  const int error =
      libraries.driver.launch_kernel(kernel_, 1, 1, 1, 1, 1, 1, 0, stream, &parameter, nullptr);
  return error == kCudaSuccess ? Status{} : OfCheck("cuLaunchKernel", error);
}

}  // namespace jaxcoll::cuda

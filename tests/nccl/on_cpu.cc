// The handlers for GPUs on XLA's CPU devices, which have no streams and no "initialize" stage: with
// the libraries of tests/cpp/fake_cuda.cc, programs lowered for CUDA compute on the CPU.
#include <cstdint>  // std::int32_t

#include "ffi/cuda/state.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcoll::cuda {
namespace {

namespace ffi = xla::ffi;

ffi::Error OnCpu(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary /*attributes*/, SiteState* state, std::int32_t device) {
  if (ffi::Error error = Initialize(state, nullptr, device); error.failure()) {
    return error;
  }
  return Execute(operands, results, state, nullptr, device);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxcollCudaOnCpu, OnCpu,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs()
                                  .Ctx<ffi::State<SiteState>>()
                                  .Ctx<ffi::DeviceOrdinal>());

}  // namespace jaxcoll::cuda

extern "C" __attribute__((visibility("default"))) const void* jaxcoll_cuda_on_cpu() {
  return reinterpret_cast<const void*>(jaxcoll::cuda::JaxcollCudaOnCpu);
}

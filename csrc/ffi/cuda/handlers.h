// ffi/cuda/handlers.h: every handler symbol of platform CUDA, and their names in lowered programs.
// Each op has its own instantiate handler; all share the other two stages.
#pragma once

#include <array>  // std::array

#include "xla/ffi/api/api.h"
#include "xla/ffi/api/c_api.h"

namespace jaxcoll::cuda {

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollCudaInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollCudaExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollCudaAllReduce);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollCudaAllGather);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollCudaReduceScatter);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollCudaAllToAll);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollCudaPpermute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollCudaBroadcast);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxcollCudaRingMatmul);

struct Target {
  const char* name;
  XLA_FFI_Error* (*instantiate)(XLA_FFI_CallFrame*);
};

inline constexpr std::array<Target, 8> kTargets{{
    {"jaxcoll_cuda_all_reduce", JaxcollCudaAllReduce},
    {"jaxcoll_cuda_all_gather", JaxcollCudaAllGather},
    {"jaxcoll_cuda_reduce_scatter", JaxcollCudaReduceScatter},
    {"jaxcoll_cuda_all_to_all", JaxcollCudaAllToAll},
    {"jaxcoll_cuda_ppermute", JaxcollCudaPpermute},
    {"jaxcoll_cuda_broadcast", JaxcollCudaBroadcast},
    {"jaxcoll_cuda_all_gather_matmul", JaxcollCudaRingMatmul},
    {"jaxcoll_cuda_matmul_reduce_scatter", JaxcollCudaRingMatmul},
}};

}  // namespace jaxcoll::cuda

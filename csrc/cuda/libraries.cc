#include "cuda/libraries.h"

#include <dlfcn.h>  // dlopen, dlsym, dlerror

namespace jaxcoll::cuda {
namespace {

// With CUDA 12 came what JAX needs, too.
constexpr int kMinRuntime = 12000;
// The first with NCCL_LAUNCH_ORDER_IMPLICIT, without which a call of ours and one of XLA's on the
// same devices can wait for each other. For NcclConfig and the functions 2.18 would do.
constexpr int kMinNccl = 22600;
// 2.28.7 has brought ncclCommRevoke; what it does was read from here on.
constexpr int kMinNcclThatRevokes = 22900;

/// An opened library, and why it can't be used.
class Library {
 public:
  explicit Library(const std::vector<std::string>& paths) : problem_("no path is known") {
    for (const std::string& path : paths) {
      handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
      if (handle_ != nullptr) {
        problem_.clear();
        return;
      }
    }
    std::string errors;
    for (const std::string& path : paths) {
      handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (handle_ != nullptr) {
        problem_.clear();
        return;
      }
      const char* const error = dlerror();  // NOLINT(concurrency-mt-unsafe): of this thread
      errors += (errors.empty() ? "" : "; ") + (error == nullptr ? path : std::string(error));
      problem_ = errors;
    }
  }

  template <typename Function>
  void Find(const char* name, Function*& function) {
    if (!problem_.empty()) {
      return;
    }
    void* const symbol = dlsym(handle_, name);
    if (symbol == nullptr) {
      problem_ = std::string(name) + " is missing";
    }
    function = reinterpret_cast<Function*>(symbol);
  }

  [[nodiscard]] const std::string& problem() const { return problem_; }

 private:
  void* handle_ = nullptr;
  std::string problem_;
};

std::string FindRuntime(const std::vector<std::string>& paths, Runtime& runtime) {
  Library library(paths);
  library.Find("cudaRuntimeGetVersion", runtime.runtime_get_version);
  library.Find("cudaDriverGetVersion", runtime.driver_get_version);
  library.Find("cudaGetErrorString", runtime.get_error_string);
  library.Find("cudaGetLastError", runtime.get_last_error);
  library.Find("cudaGetDevice", runtime.get_device);
  library.Find("cudaSetDevice", runtime.set_device);
  library.Find("cudaDeviceGetStreamPriorityRange", runtime.device_get_stream_priority_range);
  library.Find("cudaStreamCreateWithPriority", runtime.stream_create_with_priority);
  library.Find("cudaStreamSynchronize", runtime.stream_synchronize);
  library.Find("cudaStreamQuery", runtime.stream_query);
  library.Find("cudaStreamWaitEvent", runtime.stream_wait_event);
  library.Find("cudaEventCreateWithFlags", runtime.event_create_with_flags);
  library.Find("cudaEventRecord", runtime.event_record);
  library.Find("cudaEventQuery", runtime.event_query);
  library.Find("cudaMalloc", runtime.malloc);
  library.Find("cudaMemcpyAsync", runtime.memcpy_async);
  library.Find("cudaMemsetAsync", runtime.memset_async);
  library.Find("cudaThreadExchangeStreamCaptureMode", runtime.thread_exchange_capture_mode);
  library.Find("cudaHostAlloc", runtime.host_alloc);
  library.Find("cudaDeviceCanAccessPeer", runtime.device_can_access_peer);
  library.Find("cudaDeviceEnablePeerAccess", runtime.device_enable_peer_access);
  return library.problem();
}

std::string FindIpc(const std::vector<std::string>& paths, Ipc& ipc) {
  Library library(paths);
  library.Find("cudaDeviceGetPCIBusId", ipc.device_get_pci_bus_id);
  library.Find("cudaDeviceGetByPCIBusId", ipc.device_get_by_pci_bus_id);
  library.Find("cudaIpcGetMemHandle", ipc.get_mem_handle);
  library.Find("cudaIpcOpenMemHandle", ipc.open_mem_handle);
  return library.problem();
}

std::string FindDriver(const std::vector<std::string>& paths, Driver& driver) {
  Library library(paths);
  library.Find("cuModuleLoadData", driver.module_load_data);
  library.Find("cuModuleGetFunction", driver.module_get_function);
  library.Find("cuLaunchKernel", driver.launch_kernel);
  return library.problem();
}

std::string FindNccl(const std::vector<std::string>& paths, Nccl& nccl) {
  Library library(paths);
  library.Find("ncclGetVersion", nccl.get_version);
  library.Find("ncclGetErrorString", nccl.get_error_string);
  library.Find("ncclGetLastError", nccl.get_last_error);
  library.Find("ncclGetUniqueId", nccl.get_unique_id);
  library.Find("ncclCommInitRankConfig", nccl.comm_init_rank_config);
  library.Find("ncclCommAbort", nccl.comm_abort);
  library.Find("ncclCommGetAsyncError", nccl.comm_get_async_error);
  library.Find("ncclGroupStart", nccl.group_start);
  library.Find("ncclGroupEnd", nccl.group_end);
  library.Find("ncclAllReduce", nccl.all_reduce);
  library.Find("ncclBroadcast", nccl.broadcast);
  library.Find("ncclReduceScatter", nccl.reduce_scatter);
  library.Find("ncclAllGather", nccl.all_gather);
  library.Find("ncclSend", nccl.send);
  library.Find("ncclRecv", nccl.receive);
  return library.problem();
}

std::string FindRevoke(const std::vector<std::string>& paths, Nccl& nccl) {
  Library library(paths);
  library.Find("ncclCommRevoke", nccl.comm_revoke);
  return library.problem();
}

std::string FindBlas(const std::vector<std::string>& paths, Blas& blas) {
  Library library(paths);
  library.Find("cublasLtGetVersion", blas.get_version);
  library.Find("cublasLtCreate", blas.create);
  library.Find("cublasLtMatmulDescCreate", blas.description_create);
  library.Find("cublasLtMatmulDescSetAttribute", blas.description_set);
  library.Find("cublasLtMatmulDescDestroy", blas.description_destroy);
  library.Find("cublasLtMatrixLayoutCreate", blas.layout_create);
  library.Find("cublasLtMatrixLayoutSetAttribute", blas.layout_set);
  library.Find("cublasLtMatrixLayoutDestroy", blas.layout_destroy);
  library.Find("cublasLtMatmulPreferenceCreate", blas.preference_create);
  library.Find("cublasLtMatmulPreferenceSetAttribute", blas.preference_set);
  library.Find("cublasLtMatmulPreferenceDestroy", blas.preference_destroy);
  library.Find("cublasLtMatmulAlgoGetHeuristic", blas.get_heuristic);
  library.Find("cublasLtMatmul", blas.matmul);
  return library.problem();
}

std::string CudaVersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

std::string NcclVersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

Status Libraries::Open(const LibraryPaths& paths) {
  if (const std::string problem = FindRuntime(paths.runtime, runtime); !problem.empty()) {
    return Internal("CUDA's runtime can't be used (" + problem + ")");
  }
  ipc_problem = FindIpc(paths.runtime, ipc);
  if (const int error = runtime.runtime_get_version(&runtime_version); error != kCudaSuccess) {
    return OfRuntime("cudaRuntimeGetVersion", error);
  }
  if (const int error = runtime.driver_get_version(&driver_version); error != kCudaSuccess) {
    return OfRuntime("cudaDriverGetVersion", error);
  }
  if (runtime_version < kMinRuntime) {
    return Internal("CUDA's runtime is " + CudaVersionText(runtime_version) + ", older than " +
                    CudaVersionText(kMinRuntime));
  }
  if (driver_version == 0) {
    return Internal("no NVIDIA driver was found");
  }
  if (const std::string problem = FindDriver(paths.driver, driver); !problem.empty()) {
    return Internal("CUDA's driver can't be used (" + problem + ")");
  }
  if (const std::string problem = FindNccl(paths.nccl, nccl); !problem.empty()) {
    return Internal("NCCL can't be used (" + problem + ")");
  }
  if (const int result = nccl.get_version(&nccl_version); result != kNcclSuccess) {
    return OfNccl("ncclGetVersion", result);
  }
  if (nccl_version < kMinNccl) {
    return Internal("NCCL is " + NcclVersionText(nccl_version) + ", older than " +
                    NcclVersionText(kMinNccl));
  }
  if (nccl_version < kMinNcclThatRevokes) {
    nccl.comm_revoke = nullptr;
  } else if (const std::string problem = FindRevoke(paths.nccl, nccl); !problem.empty()) {
    return Internal("NCCL can't be used (" + problem + ")");
  }
  blas_problem = FindBlas(paths.blas, blas);
  if (blas_problem.empty()) {
    blas_version = static_cast<int>(blas.get_version());
  }
  return {};
}

Status Libraries::OfRuntime(const char* function, int error) const {
  return Internal(std::string(function) + ": " + runtime.get_error_string(error) + " (CUDA error " +
                  std::to_string(error) + ")");
}

Status Libraries::OfNccl(const char* function, int result, NcclComm comm) const {
  std::string text = std::string(function) + ": " + nccl.get_error_string(result);
  if (const char* const last = nccl.get_last_error(comm); last != nullptr && *last != '\0') {
    text += ": " + std::string(last);
  }
  return Internal(text + " (NCCL error " + std::to_string(result) + ")");
}

}  // namespace jaxcoll::cuda

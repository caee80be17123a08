// tests/cpp/cuda_abi_test.cc: csrc/cuda/abi.h against NVIDIA's headers, where these are. To compile
// it is the test.
#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>      // offsetof
#include <type_traits>  // std::is_enum_v, std::is_pointer_v

#include "cuda/abi.h"

namespace jaxcoll::cuda {
namespace {

// Whether a function may be called as if it were the other: as many arguments, each passed the same
// way, and the same way of returning.
template <typename A, typename B>
constexpr bool kPassedAlike =
    std::is_same_v<A, B> ||
    (sizeof(A) == sizeof(B) && ((std::is_pointer_v<A> && std::is_pointer_v<B>) ||
                                (std::is_enum_v<A> || std::is_integral_v<A>) ==
                                    (std::is_enum_v<B> || std::is_integral_v<B>)));
template <typename Ours, typename Theirs>
constexpr bool kCallable = false;
template <typename R, typename... A, typename S, typename... B>
  requires(sizeof...(A) == sizeof...(B))
constexpr bool kCallable<R (*)(A...), S (*)(B...)> =
    kPassedAlike<R, S> && (kPassedAlike<A, B> && ...);
template <typename R, typename S>
constexpr bool kCallable<R (*)(), S (*)()> = kPassedAlike<R, S>;

#define SAME(member, function) static_assert(kCallable<decltype(member), decltype(&(function))>)
#define EQUAL(ours, theirs) static_assert(static_cast<long>(ours) == static_cast<long>(theirs))

SAME(Runtime::runtime_get_version, cudaRuntimeGetVersion);
SAME(Runtime::driver_get_version, cudaDriverGetVersion);
SAME(Runtime::get_error_string, cudaGetErrorString);
SAME(Runtime::get_last_error, cudaGetLastError);
SAME(Runtime::get_device, cudaGetDevice);
SAME(Runtime::set_device, cudaSetDevice);
SAME(Runtime::device_get_stream_priority_range, cudaDeviceGetStreamPriorityRange);
SAME(Runtime::stream_create_with_priority, cudaStreamCreateWithPriority);
SAME(Runtime::stream_synchronize, cudaStreamSynchronize);
SAME(Runtime::stream_query, cudaStreamQuery);
static_assert(kCallable<decltype(Runtime::malloc), cudaError_t (*)(void**, size_t)>);
static_assert(kCallable<decltype(Runtime::stream_wait_event),
                        cudaError_t (*)(cudaStream_t, cudaEvent_t, unsigned)>);
static_assert(
    kCallable<decltype(Runtime::event_create_with_flags), cudaError_t (*)(cudaEvent_t*, unsigned)>);
SAME(Runtime::event_query, cudaEventQuery);
static_assert(
    kCallable<decltype(Runtime::event_record), cudaError_t (*)(cudaEvent_t, cudaStream_t)>);
static_assert(kCallable<decltype(Runtime::memcpy_async),
                        cudaError_t (*)(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t)>);
static_assert(
    kCallable<decltype(Runtime::memset_async), cudaError_t (*)(void*, int, size_t, cudaStream_t)>);
static_assert(kCallable<decltype(Runtime::host_alloc), cudaError_t (*)(void**, size_t, unsigned)>);
static_assert(
    kCallable<decltype(Runtime::device_can_access_peer), cudaError_t (*)(int*, int, int)>);
static_assert(
    kCallable<decltype(Runtime::device_enable_peer_access), cudaError_t (*)(int, unsigned)>);
SAME(Ipc::device_get_pci_bus_id, cudaDeviceGetPCIBusId);
SAME(Ipc::device_get_by_pci_bus_id, cudaDeviceGetByPCIBusId);
static_assert(
    kCallable<decltype(Ipc::get_mem_handle), cudaError_t (*)(cudaIpcMemHandle_t*, void*)>);
static_assert(std::is_same_v<decltype(&cudaIpcOpenMemHandle),
                             cudaError_t (*)(void**, cudaIpcMemHandle_t, unsigned)>);
static_assert(sizeof(IpcHandle) == sizeof(cudaIpcMemHandle_t) &&
              alignof(IpcHandle) == alignof(cudaIpcMemHandle_t));
SAME(Driver::module_load_data, cuModuleLoadData);
SAME(Driver::module_get_function, cuModuleGetFunction);
SAME(Driver::launch_kernel, cuLaunchKernel);
EQUAL(kCudaSuccess, CUDA_SUCCESS);
static_assert(kCallable<decltype(Runtime::thread_exchange_capture_mode),
                        cudaError_t (*)(cudaStreamCaptureMode*)>);
EQUAL(kCaptureModeRelaxed, cudaStreamCaptureModeRelaxed);
EQUAL(kHostAllocPortable, cudaHostAllocPortable);
EQUAL(kHostAllocMapped, cudaHostAllocMapped);
EQUAL(kIpcMemLazyEnablePeerAccess, cudaIpcMemLazyEnablePeerAccess);
EQUAL(kCudaErrorPeerAccessAlreadyEnabled, cudaErrorPeerAccessAlreadyEnabled);
EQUAL(kCudaSuccess, cudaSuccess);
EQUAL(kCudaErrorNotReady, cudaErrorNotReady);
EQUAL(kEventDisableTiming, cudaEventDisableTiming);
EQUAL(kStreamNonBlocking, cudaStreamNonBlocking);
EQUAL(kMemcpyDeviceToDevice, cudaMemcpyDeviceToDevice);

SAME(Nccl::get_version, ncclGetVersion);
SAME(Nccl::get_error_string, ncclGetErrorString);
SAME(Nccl::get_last_error, ncclGetLastError);
SAME(Nccl::get_unique_id, ncclGetUniqueId);
SAME(Nccl::comm_init_rank_config, ncclCommInitRankConfig);
SAME(Nccl::comm_abort, ncclCommAbort);
#if NCCL_VERSION_CODE >= 22900
SAME(Nccl::comm_revoke, ncclCommRevoke);
EQUAL(kNcclRevokeDefault, NCCL_REVOKE_DEFAULT);
#endif
SAME(Nccl::comm_get_async_error, ncclCommGetAsyncError);
SAME(Nccl::group_start, ncclGroupStart);
SAME(Nccl::group_end, ncclGroupEnd);
SAME(Nccl::all_reduce, ncclAllReduce);
SAME(Nccl::broadcast, ncclBroadcast);
SAME(Nccl::reduce_scatter, ncclReduceScatter);
SAME(Nccl::all_gather, ncclAllGather);
SAME(Nccl::send, ncclSend);
SAME(Nccl::receive, ncclRecv);
EQUAL(kNcclSuccess, ncclSuccess);
EQUAL(kNcclInProgress, ncclInProgress);
EQUAL(NcclType::kI8, ncclInt8);
EQUAL(NcclType::kU8, ncclUint8);
EQUAL(NcclType::kI32, ncclInt32);
EQUAL(NcclType::kU32, ncclUint32);
EQUAL(NcclType::kI64, ncclInt64);
EQUAL(NcclType::kU64, ncclUint64);
EQUAL(NcclType::kF16, ncclFloat16);
EQUAL(NcclType::kF32, ncclFloat32);
EQUAL(NcclType::kF64, ncclFloat64);
EQUAL(NcclType::kBF16, ncclBfloat16);
EQUAL(NcclOp::kSum, ncclSum);
EQUAL(NcclOp::kProd, ncclProd);
EQUAL(NcclOp::kMax, ncclMax);
EQUAL(NcclOp::kMin, ncclMin);
EQUAL(NcclOp::kAvg, ncclAvg);
// The first fields of NCCL's, however many it has by now.
#define SAME_FIELD(ours, theirs)                                               \
  static_assert(offsetof(NcclConfig, ours) == offsetof(ncclConfig_t, theirs)); \
  static_assert(sizeof(NcclConfig::ours) == sizeof(ncclConfig_t::theirs))
SAME_FIELD(size, size);
SAME_FIELD(magic, magic);
SAME_FIELD(version, version);
SAME_FIELD(blocking, blocking);
SAME_FIELD(cga_cluster_size, cgaClusterSize);
SAME_FIELD(min_ctas, minCTAs);
SAME_FIELD(max_ctas, maxCTAs);
SAME_FIELD(net_name, netName);
SAME_FIELD(split_share, splitShare);
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
EQUAL(NcclConfig{}.magic, NCCL_API_MAGIC);
EQUAL(NcclConfig{}.version, NCCL_VERSION(2, 18, 0));
EQUAL(NcclConfig::kUndefined, NCCL_CONFIG_UNDEF_INT);
static_assert(sizeof(NcclId) == sizeof(ncclUniqueId) && alignof(NcclId) == alignof(ncclUniqueId));

SAME(Blas::get_version, cublasLtGetVersion);
SAME(Blas::create, cublasLtCreate);
SAME(Blas::description_create, cublasLtMatmulDescCreate);
SAME(Blas::description_set, cublasLtMatmulDescSetAttribute);
SAME(Blas::description_destroy, cublasLtMatmulDescDestroy);
SAME(Blas::layout_create, cublasLtMatrixLayoutCreate);
SAME(Blas::layout_set, cublasLtMatrixLayoutSetAttribute);
SAME(Blas::layout_destroy, cublasLtMatrixLayoutDestroy);
SAME(Blas::preference_create, cublasLtMatmulPreferenceCreate);
SAME(Blas::preference_set, cublasLtMatmulPreferenceSetAttribute);
SAME(Blas::preference_destroy, cublasLtMatmulPreferenceDestroy);
SAME(Blas::get_heuristic, cublasLtMatmulAlgoGetHeuristic);
SAME(Blas::matmul, cublasLtMatmul);
EQUAL(kBlasSuccess, CUBLAS_STATUS_SUCCESS);
EQUAL(BlasType::kF32, CUDA_R_32F);
EQUAL(BlasType::kF64, CUDA_R_64F);
EQUAL(BlasType::kF16, CUDA_R_16F);
EQUAL(BlasType::kBF16, CUDA_R_16BF);
EQUAL(BlasCompute::kF32, CUBLAS_COMPUTE_32F);
EQUAL(BlasCompute::kF64, CUBLAS_COMPUTE_64F);
EQUAL(BlasCompute::kF32FastTF32, CUBLAS_COMPUTE_32F_FAST_TF32);
EQUAL(BlasOp::kN, CUBLAS_OP_N);
EQUAL(BlasOp::kT, CUBLAS_OP_T);
EQUAL(BlasDescription::kTransA, CUBLASLT_MATMUL_DESC_TRANSA);
EQUAL(BlasDescription::kTransB, CUBLASLT_MATMUL_DESC_TRANSB);
EQUAL(BlasLayout::kBatchCount, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
EQUAL(BlasLayout::kStridedBatchOffset, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
EQUAL(BlasPreference::kMaxWorkspaceBytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
EQUAL(BlasPreference::kMinAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
EQUAL(BlasPreference::kMinAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
EQUAL(BlasPreference::kMinAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
EQUAL(BlasPreference::kMinAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(sizeof(BlasAlgorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(BlasHeuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(BlasHeuristic, workspace_bytes) ==
              offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(BlasHeuristic, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));

}  // namespace
}  // namespace jaxcoll::cuda

// cuda/abi.h: the C interfaces of CUDA's runtime and driver, NCCL and cuBLASLt, as far as they are
// called.
//
// Declared here, not taken from NVIDIA's headers: they are large packages that differ from release
// to release, and whoever builds jaxcoll need not have them. The libraries keep these parts stable
// within a major version. Where the headers are, tests/cpp/cuda_abi_test.cc compares.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int32_t, std::int64_t, std::uint64_t
#include <limits>   // std::numeric_limits

// NOLINTBEGIN(readability-identifier-naming): pointers to types of others
struct CUstream_st;
struct CUevent_st;
struct CUfunc_st;
struct CUmod_st;
struct ncclComm;
// NOLINTEND(readability-identifier-naming)

namespace jaxcoll::cuda {

using Stream = CUstream_st*;
using Event = CUevent_st*;
using NcclComm = ncclComm*;

// ---- CUDA runtime -------------------------------------------------------------------------------

inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaErrorNotReady = 600;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr int kMemcpyDeviceToDevice = 3;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr unsigned kHostAllocMapped = 2;
inline constexpr int kCudaErrorPeerAccessAlreadyEnabled = 704;

struct Runtime {
  int (*runtime_get_version)(int* version);
  int (*driver_get_version)(int* version);
  const char* (*get_error_string)(int error);
  int (*get_last_error)();  // of the thread; forgets it
  int (*get_device)(int* device);
  int (*set_device)(int device);
  int (*device_get_stream_priority_range)(int* least, int* greatest);
  int (*stream_create_with_priority)(Stream* stream, unsigned flags, int priority);
  int (*stream_synchronize)(Stream stream);
  int (*stream_query)(Stream stream);
  int (*stream_wait_event)(Stream stream, Event event, unsigned flags);
  int (*event_create_with_flags)(Event* event, unsigned flags);
  int (*event_record)(Event event, Stream stream);
  int (*event_query)(Event event);
  int (*malloc)(void** data, std::size_t bytes);
  int (*memcpy_async)(void* to, const void* from, std::size_t bytes, int kind, Stream stream);
  int (*memset_async)(void* to, int value, std::size_t bytes, Stream stream);
  int (*thread_exchange_capture_mode)(int* mode);
  int (*host_alloc)(void** data, std::size_t bytes, unsigned flags);
  int (*device_can_access_peer)(int* can, int device, int peer);
  int (*device_enable_peer_access)(int peer, unsigned flags);
};

/// cudaIpcMemHandle_t; passed by value.
struct IpcHandle {
  std::array<char, 64> bytes;
};
inline constexpr unsigned kIpcMemLazyEnablePeerAccess = 1;

/// Of the runtime, too: memory of other processes.
struct Ipc {
  int (*device_get_pci_bus_id)(char* text, int bytes, int device);
  int (*device_get_by_pci_bus_id)(int* device, const char* text);
  int (*get_mem_handle)(IpcHandle* handle, void* memory);
  int (*open_mem_handle)(void** memory, IpcHandle handle, unsigned flags);
};

// ---- CUDA driver --------------------------------------------------------------------------------

using Module = CUmod_st*;
using Function = CUfunc_st*;

struct Driver {
  int (*module_load_data)(Module* module, const void* image);
  int (*module_get_function)(Function* function, Module module, const char* name);
  int (*launch_kernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                       Stream stream, void** parameters, void** extra);
};

// ---- NCCL ---------------------------------------------------------------------------------------

inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclInProgress = 7;
inline constexpr int kNcclRevokeDefault = 0;

/// ncclDataType_t.
enum class NcclType : int {
  kI8 = 0,
  kU8 = 1,
  kI32 = 2,
  kU32 = 3,
  kI64 = 4,
  kU64 = 5,
  kF16 = 6,
  kF32 = 7,
  kF64 = 8,
  kBF16 = 9,
};

/// ncclRedOp_t.
enum class NcclOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

/// ncclUniqueId; passed by value.
struct NcclId {
  std::array<char, 128> bytes;
};

/// ncclConfig_t as NCCL 2.18 has it; later versions take the size and version for what they are.
struct NcclConfig {
  static constexpr int kUndefined = std::numeric_limits<int>::min();

  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};

struct Nccl {
  int (*get_version)(int* version);
  const char* (*get_error_string)(int result);
  const char* (*get_last_error)(NcclComm comm);
  int (*get_unique_id)(NcclId* id);
  int (*comm_init_rank_config)(NcclComm* comm, int num_ranks, NcclId id, int rank,
                               NcclConfig* config);
  int (*comm_abort)(NcclComm comm);
  int (*comm_revoke)(NcclComm comm, int flags);  // null before NCCL 2.29
  int (*comm_get_async_error)(NcclComm comm, int* error);
  int (*group_start)();
  int (*group_end)();
  int (*all_reduce)(const void* send, void* receive, std::size_t count, NcclType type, NcclOp op,
                    NcclComm comm, Stream stream);
  int (*broadcast)(const void* send, void* receive, std::size_t count, NcclType type, int root,
                   NcclComm comm, Stream stream);
  int (*reduce_scatter)(const void* send, void* receive, std::size_t receive_count, NcclType type,
                        NcclOp op, NcclComm comm, Stream stream);
  int (*all_gather)(const void* send, void* receive, std::size_t send_count, NcclType type,
                    NcclComm comm, Stream stream);
  int (*send)(const void* data, std::size_t count, NcclType type, int peer, NcclComm comm,
              Stream stream);
  int (*receive)(void* data, std::size_t count, NcclType type, int peer, NcclComm comm,
                 Stream stream);
};

// ---- cuBLASLt -----------------------------------------------------------------------------------

inline constexpr int kBlasSuccess = 0;

/// cudaDataType.
enum class BlasType : int { kF32 = 0, kF64 = 1, kF16 = 2, kBF16 = 14 };
/// cublasComputeType_t.
enum class BlasCompute : int { kF32 = 68, kF64 = 70, kF32FastTF32 = 77 };
/// cublasOperation_t.
enum class BlasOp : std::int32_t { kN = 0, kT = 1 };
/// cublasLtMatmulDescAttributes_t.
enum class BlasDescription : int { kTransA = 3, kTransB = 4 };
/// cublasLtMatrixLayoutAttribute_t.
enum class BlasLayout : int { kBatchCount = 5, kStridedBatchOffset = 6 };
/// cublasLtMatmulPreferenceAttributes_t.
enum class BlasPreference : int {
  kMaxWorkspaceBytes = 1,
  kMinAlignmentA = 5,  // in bytes, as those of B, C and D
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};

/// cublasLtMatmulAlgo_t.
struct BlasAlgorithm {
  std::array<std::uint64_t, 8> data;
};
/// cublasLtMatmulHeuristicResult_t.
struct BlasHeuristic {
  BlasAlgorithm algorithm;
  std::size_t workspace_bytes;
  int state;
  float waves;
  std::array<int, 4> reserved;
};

using BlasHandle = void*;
using BlasObject = void*;  // a description, a layout or a preference

struct Blas {
  std::size_t (*get_version)();
  int (*create)(BlasHandle* handle);
  int (*description_create)(BlasObject* description, BlasCompute compute, BlasType scale);
  int (*description_set)(BlasObject description, BlasDescription attribute, const void* value,
                         std::size_t bytes);
  int (*description_destroy)(BlasObject description);
  int (*layout_create)(BlasObject* layout, BlasType type, std::uint64_t rows, std::uint64_t columns,
                       std::int64_t leading);
  int (*layout_set)(BlasObject layout, BlasLayout attribute, const void* value, std::size_t bytes);
  int (*layout_destroy)(BlasObject layout);
  int (*preference_create)(BlasObject* preference);
  int (*preference_set)(BlasObject preference, BlasPreference attribute, const void* value,
                        std::size_t bytes);
  int (*preference_destroy)(BlasObject preference);
  int (*get_heuristic)(BlasHandle handle, BlasObject description, BlasObject a, BlasObject b,
                       BlasObject c, BlasObject d, BlasObject preference, int requested,
                       BlasHeuristic* results, int* returned);
  int (*matmul)(BlasHandle handle, BlasObject description, const void* alpha, const void* a,
                BlasObject layout_a, const void* b, BlasObject layout_b, const void* beta,
                const void* c, BlasObject layout_c, void* d, BlasObject layout_d,
                const BlasAlgorithm* algorithm, void* workspace, std::size_t workspace_bytes,
                Stream stream);
};

}  // namespace jaxcoll::cuda

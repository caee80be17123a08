// cuda/libraries.h: CUDA's runtime and driver, NCCL and cuBLASLt, found when a program needs them.
//
// jaxcoll links none of them. JAX has opened its own copies before a program can run on a GPU; to
// open the same files again gives the same libraries.
#pragma once

#include <string>  // std::string
#include <vector>  // std::vector

#include "core/status.h"
#include "cuda/abi.h"

namespace jaxcoll::cuda {

/// Where to look: of each library some paths or names for dlopen. The first that is open already
/// counts, wherever JAX has found it; else the first that opens.
struct LibraryPaths {
  std::vector<std::string> runtime;
  std::vector<std::string> driver;
  std::vector<std::string> nccl;
  std::vector<std::string> blas;
};

/// The functions, and the versions as the libraries give them (13000, 22707, 130200).
struct Libraries {
  Runtime runtime{};
  Ipc ipc{};
  Driver driver{};
  Nccl nccl{};
  Blas blas{};
  int runtime_version = 0;
  int driver_version = 0;
  int nccl_version = 0;
  int blas_version = 0;
  std::string ipc_problem;   ///< why memory can't be shared between processes; NCCL works without
  std::string blas_problem;  ///< why cuBLASLt is missing; the collectives work without

  /// Whether a thread that waits inside NCCL can be freed, so that it may wait there.
  [[nodiscard]] bool can_revoke() const { return nccl.comm_revoke != nullptr; }

  /// Opens the libraries and checks versions; never closes them.
  Status Open(const LibraryPaths& paths);

  /// The error of a CUDA or NCCL function that did not return 0.
  [[nodiscard]] Status OfRuntime(const char* function, int error) const;
  [[nodiscard]] Status OfNccl(const char* function, int result, NcclComm comm = nullptr) const;
};

/// Whether NCCL has taken a call: it may still work on it.
inline bool HasTaken(int result) { return result == kNcclSuccess || result == kNcclInProgress; }

/// As in "2.27.7" for NCCL's 22707.
std::string NcclVersionText(int version);

}  // namespace jaxcoll::cuda

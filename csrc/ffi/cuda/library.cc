// ffi/cuda/library.cc: what Python calls (jaxcoll/_cuda.py), as C functions.
//
// libjaxcoll_cuda.so is a library of its own, without Python: the extension knows nothing of it,
// and processes without a GPU never open it. Functions that return an int return 0, or 1 with the
// reason in `text`, a buffer of `bytes`.
#include <algorithm>  // std::min
#include <cstddef>    // std::size_t
#include <cstdint>    // std::int32_t, std::int64_t, std::uint64_t
#include <sstream>    // std::istringstream
#include <string>     // std::getline, std::string
#include <vector>     // std::vector

#include "core/status.h"
#include "cuda/engine.h"
#include "cuda/peer_image.h"
#include "cuda/recording.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/state.h"

using jaxcoll::Status;
using jaxcoll::cuda::Engine;

namespace {

void Write(const std::string& from, char* text, std::size_t bytes) {
  const std::size_t length = std::min(from.size(), bytes - 1);
  from.copy(text, length);
  text[length] = '\0';
}

std::vector<std::string> Lines(const char* text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  return lines;
}

}  // namespace

// NOLINTBEGIN(readability-identifier-naming): names of a C interface
extern "C" {

#define JAXCOLL_EXPORT __attribute__((visibility("default")))

/// Opens the libraries; paths are a line each.
JAXCOLL_EXPORT int jaxcoll_cuda_open(const char* runtime, const char* driver, const char* nccl,
                                     const char* blas, char* text, std::size_t bytes) {
  const Status status = Engine::Get().Open({.runtime = Lines(runtime),
                                            .driver = Lines(driver),
                                            .nccl = Lines(nccl),
                                            .blas = Lines(blas)});
  Write(status.message, text, bytes);
  return status.ok() ? 0 : 1;
}

/// The versions of CUDA's runtime, the driver, NCCL and cuBLASLt.
JAXCOLL_EXPORT void jaxcoll_cuda_versions(int* four) {
  const jaxcoll::cuda::Libraries& libraries = Engine::Get().libraries();
  four[0] = libraries.runtime_version;
  four[1] = libraries.driver_version;
  four[2] = libraries.nccl_version;
  four[3] = libraries.blas_version;
}

/// Why matrices can't be multiplied, or nothing.
JAXCOLL_EXPORT void jaxcoll_cuda_blas_problem(char* text, std::size_t bytes) {
  Write(Engine::Get().libraries().blas_problem, text, bytes);
}

/// The local devices: their global ids, and CUDA's numbers of them.
JAXCOLL_EXPORT void jaxcoll_cuda_set_devices(const std::int64_t* ids, const std::int32_t* ordinals,
                                             std::size_t count) {
  std::vector<jaxcoll::cuda::Clique::LocalDevice> devices;
  for (std::size_t i = 0; i < count; ++i) {
    devices.push_back({.id = ids[i], .ordinal = ordinals[i]});
  }
  Engine::Get().SetDevices(devices);
}

/// See jaxcoll::cuda::Callbacks; each null or to be there for ever.
JAXCOLL_EXPORT void jaxcoll_cuda_set_callbacks(
    int (*exchange)(const std::int64_t*, std::size_t, std::int64_t, std::int64_t, void*,
                    std::size_t, char*, std::size_t),
    void (*site_text)(std::uint64_t, char*, std::size_t), int (*is_anyone_excused)(),
    void (*gone)(const std::int64_t*, std::size_t, std::int64_t, char*, std::size_t),
    void (*absent)(const std::int64_t*, std::size_t, std::uint64_t, std::uint64_t, std::int64_t,
                   char*, std::size_t),
    void (*tell)(const std::int64_t*, std::size_t, std::int64_t, const char*),
    void (*report)(const char*), void (*notice)(const char*)) {
  Engine::Get().SetCallbacks({.exchange = exchange,
                              .site_text = site_text,
                              .is_anyone_excused = is_anyone_excused,
                              .gone = gone,
                              .absent = absent,
                              .tell = tell,
                              .report = report,
                              .notice = notice});
}

/// See jaxcoll::cuda::RecorderFunctions; these are there for ever.
JAXCOLL_EXPORT void jaxcoll_cuda_set_recorder(
    std::uint64_t (*begin)(std::int64_t, std::uint64_t, std::uint64_t, std::int64_t, std::int64_t,
                           std::int64_t, std::int64_t, std::int64_t),
    void (*end)(std::int64_t, std::uint64_t, std::int64_t, int),
    void (*write_last_call)(std::int64_t, char*, std::size_t),
    void (*write_dump_text)(char*, std::size_t)) {
  jaxcoll::cuda::SetRecorder({.begin = begin,
                              .end = end,
                              .write_last_call = write_last_call,
                              .write_dump_text = write_dump_text});
}

/// In nanoseconds; < 0: none.
JAXCOLL_EXPORT void jaxcoll_cuda_set_timeout(std::int64_t timeout_ns) {
  Engine::Get().SetTimeout(timeout_ns);
}

/// The same where others may compile the program.
JAXCOLL_EXPORT void jaxcoll_cuda_set_compile_timeout(std::int64_t timeout_ns) {
  Engine::Get().SetCompileTimeout(timeout_ns);
}

/// Whether programs fail on the device whose calls were aborted (1, as without this call), or go on
/// with garbage (0).
JAXCOLL_EXPORT void jaxcoll_cuda_set_traps(int traps) { Engine::Get().SetTraps(traps != 0); }

/// Whether small sums may go over peer memory (1), if there are kernels for it; without this call
/// they may not.
JAXCOLL_EXPORT void jaxcoll_cuda_set_peers(int peers) {
  Engine::Get().SetPeerImage(peers == 0 ? nullptr : jaxcoll::cuda::PeerImage());
}

/// The same number for processes that can share memory; before programs run.
JAXCOLL_EXPORT void jaxcoll_cuda_set_host(std::uint64_t host) { Engine::Get().SetHost(host); }

/// Why memory can't be shared between processes, or nothing.
JAXCOLL_EXPORT void jaxcoll_cuda_ipc_problem(char* text, std::size_t bytes) {
  Write(Engine::Get().libraries().ipc_problem, text, bytes);
}

/// Why small sums of some devices, global ids in rank order, don't go over peer memory, or nothing.
JAXCOLL_EXPORT void jaxcoll_cuda_peer_problem(const std::int64_t* ids, std::size_t count,
                                              char* text, std::size_t bytes) {
  Write(Engine::Get().PeerProblem({ids, ids + count}), text, bytes);
}

JAXCOLL_EXPORT void jaxcoll_cuda_reset() { Engine::Get().Reset(); }

/// See jaxcoll::cuda::Engine::SetGeneration; < 0: not known yet.
JAXCOLL_EXPORT void jaxcoll_cuda_set_generation(std::int64_t generation) {
  Engine::Get().SetGeneration(generation < 0 ? Engine::kBetween : generation);
}

/// Before the process ends.
JAXCOLL_EXPORT void jaxcoll_cuda_stop() { Engine::Get().Stop(); }

JAXCOLL_EXPORT std::uint64_t jaxcoll_cuda_num_calls() { return Engine::Get().num_calls(); }

/// The i-th target: its name, or null after the last, and its stages.
JAXCOLL_EXPORT const char* jaxcoll_cuda_target(std::size_t i, const void** instantiate,
                                               const void** initialize, const void** execute) {
  if (i >= jaxcoll::cuda::kTargets.size()) {
    return nullptr;
  }
  *instantiate = reinterpret_cast<const void*>(jaxcoll::cuda::kTargets[i].instantiate);
  *initialize = reinterpret_cast<const void*>(jaxcoll::cuda::JaxcollCudaInitialize);
  *execute = reinterpret_cast<const void*>(jaxcoll::cuda::JaxcollCudaExecute);
  return jaxcoll::cuda::kTargets[i].name;
}

/// The type of the state that XLA keeps for a call site.
JAXCOLL_EXPORT void jaxcoll_cuda_type(const void** id, const void** info) {
  *id = &jaxcoll::cuda::SiteState::id;
  *info = &jaxcoll::cuda::SiteState::info;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)

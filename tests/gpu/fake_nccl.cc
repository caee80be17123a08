// What benchmarks/raw_nccl.py calls, on ordinary memory and in one process: declared here as in
// NVIDIA's headers, so that the calls really pass through a C interface.
#include <cstdlib>  // std::calloc
#include <cstring>  // std::memcpy, std::memset
#include <vector>   // std::vector

// NOLINTBEGIN(readability-identifier-naming): names of others
#define EXPORT extern "C" __attribute__((visibility("default")))

struct UniqueId {
  char internal[128];
};
struct Comm {
  int rank;
  int size;
};
struct Call {
  const float* from;
  float* to;
  std::size_t count;
};

namespace {
int device = -1;
int depth = 0;
std::vector<Call> calls;
constexpr int kInvalidArgument = 4;
}  // namespace

EXPORT const char* cudaGetErrorString(int /*error*/) { return "invalid argument"; }
EXPORT int cudaSetDevice(int ordinal) {
  device = ordinal;
  return 0;
}
EXPORT int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  *stream = &device;
  return flags == 1 ? 0 : kInvalidArgument;
}
EXPORT int cudaStreamSynchronize(void* stream) { return stream == &device ? 0 : kInvalidArgument; }
EXPORT int cudaMalloc(void** data, std::size_t bytes) {
  *data = std::calloc(bytes, 1);
  return 0;
}
EXPORT int cudaMemset(void* data, int value, std::size_t bytes) {
  std::memset(data, value, bytes);
  return 0;
}
EXPORT int cudaMemcpy(void* to, const void* from, std::size_t bytes, int /*kind*/) {
  std::memcpy(to, from, bytes);
  return 0;
}
EXPORT int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind, void* stream) {
  std::memcpy(to, from, bytes);
  return kind == 3 && stream == &device ? 0 : kInvalidArgument;
}

EXPORT const char* ncclGetErrorString(int /*error*/) { return "invalid usage"; }
EXPORT int ncclGetUniqueId(UniqueId* id) {
  std::memset(id->internal, 'a', sizeof(id->internal));
  return 0;
}
EXPORT int ncclCommInitRank(Comm** comm, int size, UniqueId id, int rank) {
  *comm = new Comm{.rank = rank, .size = size};
  return id.internal[0] == 'a' && id.internal[127] == 'a' && rank < size ? 0 : kInvalidArgument;
}
EXPORT int ncclGroupStart() {
  ++depth;
  return 0;
}
// All local ranks' sums of one leaf each.
EXPORT int ncclGroupEnd() {
  --depth;
  std::vector<float> total;
  for (const Call& call : calls) {
    total.resize(call.count);
    for (std::size_t i = 0; i < call.count; ++i) {
      total[i] += call.from[i];
    }
  }
  for (const Call& call : calls) {
    std::memcpy(call.to, total.data(), call.count * sizeof(float));
  }
  calls.clear();
  return 0;
}
EXPORT int ncclAllReduce(const void* from, void* to, std::size_t count, int type, int op,
                         Comm* comm, void* stream) {
  if (type != 7 || op != 0 || depth != 1 || comm->rank != device || stream != &device) {
    return type == 9 ? 0 : kInvalidArgument;  // of bfloat16 nothing is computed
  }
  calls.push_back({static_cast<const float*>(from), static_cast<float*>(to), count});
  return 0;
}
EXPORT int ncclAllGather(const void* from, void* to, std::size_t count, int type, Comm* comm,
                         void* stream) {
  std::memcpy(static_cast<char*>(to) + static_cast<std::size_t>(comm->rank) * count, from, count);
  return type == 1 && stream == &device ? 0 : kInvalidArgument;
}
EXPORT int ncclReduceScatter(const void* /*from*/, void* /*to*/, std::size_t /*count*/, int type,
                             int op, Comm* /*comm*/, void* stream) {
  return type == 7 && op == 0 && stream == &device ? 0 : kInvalidArgument;
}
// NOLINTEND(readability-identifier-naming)

// mpi/shim.cc: the library that stands where XLA expects an MPI: libjaxcoll_mpi.so.
//
// jaxlib loads the library named by MPITRAMPOLINE_LIB and looks up all of names.inc. Handles are
// uintptr_t and integer constants are int, of any value that we like; since both are read from the
// address of a symbol, one word of memory serves as either. Functions that XLA does not call return
// an error that names them.
#include <cstdint>  // std::int64_t, std::uintptr_t
#include <cstring>  // std::strncpy

#include "core/types.h"
#include "mpi/calls.h"

#define JAXCOLL_EXPORT __attribute__((visibility("default")))

namespace {

using Handle = std::uintptr_t;

// The value of every constant: its place in the table, so that all differ and MPI_SUCCESS is 0.
enum Constant : Handle {
#define CALLED(name)
#define UNUSED(name)
#define CONSTANT(name) k##name,
#include "mpi/names.inc"
#undef CONSTANT
#undef UNUSED
#undef CALLED
};

// Of the interface: the size of the buffer for an error's text.
constexpr std::size_t kMaxErrorString = 1024;

// Before the engine is connected every call fails.
constexpr jaxcoll::MpiCalls kNotConnected = {
    .split = [](int, int, void**) { return -1; },
    .rank = [](const void*) { return 0; },
    .size = [](const void*) { return 1; },
    .all_reduce = [](void*, const void*, void*, std::int64_t, int, int) { return -1; },
    .all_gather = [](void*, const void*, void*, std::int64_t, int) { return -1; },
    .reduce_scatter = [](void*, const void*, void*, std::int64_t, int, int) { return -1; },
    .exchange = [](void*, const void*, int, void*, int, std::int64_t) { return -1; },
    .send = [](void*, const void*, std::int64_t, int, void**) { return -1; },
    .receive = [](void*, void*, std::int64_t, int, void**) { return -1; },
    .wait = [](void*) { return -1; },
    .refuse = [](const char*) { return -1; },
    .error_text =
        [](int) { return "jaxcoll.CollectiveError: jaxcoll.initialize() was not called"; },
};

const jaxcoll::MpiCalls* calls = &kNotConnected;
int is_in_use = 0;

int TypeOf(Handle datatype) {
  using jaxcoll::DType;
  switch (datatype) {
    case kINT8_T:
      return static_cast<int>(DType::kI8);
    case kINT16_T:
      return static_cast<int>(DType::kI16);
    case kINT32_T:
      return static_cast<int>(DType::kI32);
    case kINT64_T:
      return static_cast<int>(DType::kI64);
    case kUINT8_T:
    case kBYTE:
      return static_cast<int>(DType::kU8);
    case kUINT16_T:
      return static_cast<int>(DType::kU16);
    case kUINT32_T:
      return static_cast<int>(DType::kU32);
    case kUINT64_T:
      return static_cast<int>(DType::kU64);
    case kFLOAT:
      return static_cast<int>(DType::kF32);
    case kDOUBLE:
      return static_cast<int>(DType::kF64);
    case kC_COMPLEX:
      return static_cast<int>(DType::kC64);
    case kC_DOUBLE_COMPLEX:
      return static_cast<int>(DType::kC128);
    default:
      return -1;
  }
}

int OpOf(Handle op) {
  using jaxcoll::ReduceOp;
  switch (op) {
    case kSUM:
      return static_cast<int>(ReduceOp::kSum);
    case kPROD:
      return static_cast<int>(ReduceOp::kProd);
    case kMIN:
      return static_cast<int>(ReduceOp::kMin);
    case kMAX:
      return static_cast<int>(ReduceOp::kMax);
    default:
      return -1;
  }
}

void* Pointer(Handle handle) {
  return reinterpret_cast<void*>(handle);  // NOLINT(performance-no-int-to-ptr): it was one
}

}  // namespace

// NOLINTBEGIN(readability-identifier-naming): the names are the interface's
extern "C" {

JAXCOLL_EXPORT void jaxcoll_mpi_connect(const jaxcoll::MpiCalls* engine) { calls = engine; }
JAXCOLL_EXPORT int jaxcoll_mpi_is_in_use() { return is_in_use; }

JAXCOLL_EXPORT extern const int mpiabi_version_major = 2;
JAXCOLL_EXPORT extern const int mpiabi_version_minor = 10;
JAXCOLL_EXPORT extern const int mpiabi_version_patch = 0;
JAXCOLL_EXPORT extern const int mpiwrapper_version_major = 2;
JAXCOLL_EXPORT extern const int mpiwrapper_version_minor = 10;
JAXCOLL_EXPORT extern const int mpiwrapper_version_patch = 0;

// MPItrampoline calls it when it has loaded this library.
JAXCOLL_EXPORT void mpiwrapper_export_fortran_constants_() { is_in_use = 1; }
JAXCOLL_EXPORT int MPIXABI_Query_cuda_support() { return 0; }
JAXCOLL_EXPORT int MPIXABI_Query_hip_support() { return 0; }
JAXCOLL_EXPORT int MPIXABI_Query_ze_support() { return 0; }

#define CALLED(name)
#define UNUSED(name) \
  JAXCOLL_EXPORT int MPIABI_##name() { return calls->refuse("MPI_" #name); }
#define CONSTANT(name) JAXCOLL_EXPORT extern const Handle MPIABI_##name = k##name;
#include "mpi/names.inc"
#undef CONSTANT
#undef UNUSED
#undef CALLED

JAXCOLL_EXPORT int MPIABI_Init_thread(int* /*argc*/, char*** /*argv*/, int /*required*/,
                                      int* provided) {
  *provided = static_cast<int>(kTHREAD_MULTIPLE);
  return 0;
}

JAXCOLL_EXPORT int MPIABI_Finalize() { return 0; }

// XLA makes communicators on threads that say yes.
JAXCOLL_EXPORT int MPIABI_Is_thread_main(int* flag) {
  *flag = 1;
  return 0;
}

JAXCOLL_EXPORT int MPIABI_Comm_split(Handle /*world*/, int color, int key, Handle* communicator) {
  void* made = nullptr;
  const int error = calls->split(color, key, &made);
  *communicator = reinterpret_cast<Handle>(made);
  return error;
}

JAXCOLL_EXPORT int MPIABI_Comm_free(Handle* communicator) {
  *communicator = kCOMM_NULL;  // the engine keeps it: others may be in its last call
  return 0;
}

// XLA only logs those of the world.
JAXCOLL_EXPORT int MPIABI_Comm_rank(Handle communicator, int* rank) {
  *rank = communicator == kCOMM_WORLD ? 0 : calls->rank(Pointer(communicator));
  return 0;
}

JAXCOLL_EXPORT int MPIABI_Comm_size(Handle communicator, int* size) {
  *size = communicator == kCOMM_WORLD ? 1 : calls->size(Pointer(communicator));
  return 0;
}

JAXCOLL_EXPORT int MPIABI_Allreduce(const void* send, void* receive, int count, Handle datatype,
                                    Handle op, Handle communicator) {
  return calls->all_reduce(Pointer(communicator), send, receive, count, TypeOf(datatype), OpOf(op));
}

JAXCOLL_EXPORT int MPIABI_Allgather(const void* send, int count, Handle datatype, void* receive,
                                    int /*receive_count*/, Handle /*receive_datatype*/,
                                    Handle communicator) {
  return calls->all_gather(Pointer(communicator), send, receive, count, TypeOf(datatype));
}

// XLA's counts are all the same.
JAXCOLL_EXPORT int MPIABI_Reduce_scatter(const void* send, void* receive, const int* counts,
                                         Handle datatype, Handle op, Handle communicator) {
  return calls->reduce_scatter(Pointer(communicator), send, receive, counts[0], TypeOf(datatype),
                               OpOf(op));
}

JAXCOLL_EXPORT int MPIABI_Sendrecv(const void* send, int count, Handle datatype, int to,
                                   int /*send_tag*/, void* receive, int receive_count,
                                   Handle receive_datatype, int from, int /*receive_tag*/,
                                   Handle communicator, void* /*status*/) {
  if (datatype != kBYTE || receive_datatype != kBYTE || count != receive_count) {
    return calls->refuse("MPI_Sendrecv of other data than bytes, or of two sizes");
  }
  return calls->exchange(Pointer(communicator), send, to, receive, from, count);
}

JAXCOLL_EXPORT int MPIABI_Isend(const void* data, int count, Handle datatype, int to, int /*tag*/,
                                Handle communicator, Handle* request) {
  if (datatype != kBYTE) {
    return calls->refuse("MPI_Isend of other data than bytes");
  }
  void* made = nullptr;
  const int error = calls->send(Pointer(communicator), data, count, to, &made);
  *request = reinterpret_cast<Handle>(made);
  return error;
}

JAXCOLL_EXPORT int MPIABI_Irecv(void* data, int count, Handle datatype, int from, int /*tag*/,
                                Handle communicator, Handle* request) {
  if (datatype != kBYTE) {
    return calls->refuse("MPI_Irecv of other data than bytes");
  }
  void* made = nullptr;
  const int error = calls->receive(Pointer(communicator), data, count, from, &made);
  *request = reinterpret_cast<Handle>(made);
  return error;
}

JAXCOLL_EXPORT int MPIABI_Wait(Handle* request, void* /*status*/) {
  const int error = calls->wait(Pointer(*request));
  *request = kREQUEST_NULL;
  return error;
}

JAXCOLL_EXPORT int MPIABI_Error_string(int error, char* text, int* length) {
  std::strncpy(text, calls->error_text(error), kMaxErrorString - 1);
  text[kMaxErrorString - 1] = '\0';
  *length = static_cast<int>(std::strlen(text));
  return 0;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)

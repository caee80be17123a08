// mpi/calls.h: what the library that XLA loads as its MPI (shim.cc) asks of the engine (door.cc).
//
// A C interface: the two are separate libraries, which the extension connects.
#pragma once

#include <cstdint>  // std::int64_t

namespace jaxcoll {

/// Functions of the engine. Those that return an int return 0 or the number of an error.
struct MpiCalls {
  int (*split)(int color, int key, void** communicator);
  int (*rank)(const void* communicator);
  int (*size)(const void* communicator);
  /// `dtype` and `op` are numbers of core/types.h, -1 for one that it does not have.
  int (*all_reduce)(void* communicator, const void* send, void* receive, std::int64_t count,
                    int dtype, int op);
  int (*all_gather)(void* communicator, const void* send, void* receive, std::int64_t count,
                    int dtype);
  int (*reduce_scatter)(void* communicator, const void* send, void* receive, std::int64_t count,
                        int dtype, int op);
  int (*exchange)(void* communicator, const void* send, int to, void* receive, int from,
                  std::int64_t bytes);
  int (*send)(void* communicator, const void* data, std::int64_t bytes, int to, void** request);
  int (*receive)(void* communicator, void* data, std::int64_t bytes, int from, void** request);
  int (*wait)(void* request);
  /// A function that does not exist here was called, or with arguments that XLA never gives.
  int (*refuse)(const char* function);
  /// The text stays.
  const char* (*error_text)(int error);
};

/// The name of the shim's function that takes the calls.
inline constexpr char kConnectName[] = "jaxcoll_mpi_connect";

}  // namespace jaxcoll

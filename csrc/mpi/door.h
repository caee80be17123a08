// mpi/door.h: the engine behind the library that XLA takes for its MPI.
//
// XLA makes a communicator for each of its groups of devices, when the first collective of a group
// runs, by MPI_Comm_split(world, color = first device, key = rank). That tells too little: groups
// of several meshes may begin with the same device. So the group is told here before (Expect), and
// a program that does nothing but one all-reduce over it makes XLA ask for its communicators; that
// all-reduce itself goes nowhere.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t
#include <string>   // std::string
#include <vector>   // std::vector

#include "mpi/calls.h"

namespace jaxcoll {

/// A group of XLA's devices, in the order of its ranks, and their processes.
struct ExpectedClique {
  std::vector<std::int64_t> devices;
  std::vector<std::int64_t> processes;
};

/// Opens the library at `path`, which jaxlib may have opened before, and connects it. Returns why
/// that failed, or nothing.
std::string ConnectMpi(const std::string& path);

/// Until the next call of this, communicators are those of one of `cliques`, which differ in their
/// first device; none: asking for one is an error. Returns how many were made since the last call.
/// `is_of_job`: the devices may be in other processes of the job.
std::size_t ExpectCommunicators(const std::vector<ExpectedClique>& cliques, bool is_of_job);

/// See Clique::Describe; of the clique with these devices, where it was expected once.
void DescribeCalls(const std::vector<std::int64_t>& devices, int kind, std::size_t count,
                   const std::string& origin);

}  // namespace jaxcoll

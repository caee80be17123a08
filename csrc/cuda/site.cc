#include "cuda/site.h"

#include <algorithm>  // std::find
#include <string>     // std::to_string

#include "core/small_array.h"

namespace jaxcoll::cuda {
namespace {

// Leaves of a tree whose pointers need no allocation.
constexpr std::size_t kFewBuffers = 32;

}  // namespace

Status Site::Initialize(int ordinal, Stream stream) {
  if (ordinal < 0 || ordinal >= kMaxOrdinals) {
    return Internal("CUDA device " + std::to_string(ordinal) + " is beyond the " +
                    std::to_string(kMaxOrdinals) + " that jaxcoll knows");
  }
  Place& place = places_[static_cast<std::size_t>(ordinal)];
  if (place.generation != engine_.generation()) {
    if (Status status = Enter(place, ordinal); !status.ok()) {
      return status;
    }
  }
  if (Status status = place.clique->Join(ordinal, stream, engine_.timeout_ns()); !status.ok()) {
    return status;
  }
  return place.is_prepared ? Status{} : Prepare(place, ordinal);
}

Status Site::Enter(Place& place, int ordinal) {
  const std::int64_t generation = engine_.generation();
  const std::int64_t id = engine_.IdOf(ordinal);
  for (const std::vector<std::int64_t>& group : groups_) {
    if (std::find(group.begin(), group.end(), id) != group.end()) {
      place.clique = engine_.Find(group);
      place.generation = generation;
      place.is_prepared = false;
      return {};
    }
  }
  return Internal("CUDA device " + std::to_string(ordinal) + " (id " + std::to_string(id) +
                  ") is in none of the groups");
}

Status Site::Prepare(Place& place, int ordinal) {
  const Libraries& libraries = engine_.libraries();
  const std::lock_guard<std::mutex> lock(prepare_mutex_);
  int before = 0;
  if (const int error = libraries.runtime.get_device(&before); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaGetDevice", error);
  }
  if (const int error = libraries.runtime.set_device(ordinal); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaSetDevice", error);
  }
  Status status = operation_->Prepare(libraries, place.clique->SeatOf(ordinal));
  if (const int error = libraries.runtime.set_device(before); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaSetDevice", error);
  }
  place.is_prepared = status.ok();
  return status;
}

Status Site::Execute(int ordinal, Stream stream, std::span<const Operand> operands,
                     std::span<const Result> results) {
  if (ordinal < 0 || ordinal >= kMaxOrdinals ||
      !places_[static_cast<std::size_t>(ordinal)].is_prepared) {
    return Internal("CUDA device " + std::to_string(ordinal) + " was not initialized");
  }
  if (operands.size() != operation_->num_operands() ||
      results.size() != operation_->num_results()) {
    return Internal("wrong number of buffers");
  }
  SmallArray<const void*, kFewBuffers> from(operands.size());
  SmallArray<void*, kFewBuffers> to(results.size());
  for (std::size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].bytes != operation_->operand_bytes(i)) {
      return Internal("operand " + std::to_string(i) + ": expected " +
                      std::to_string(operation_->operand_bytes(i)) + " bytes, got " +
                      std::to_string(operands[i].bytes));
    }
    from[i] = operands[i].data;
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i].bytes != operation_->result_bytes(i)) {
      return Internal("result " + std::to_string(i) + ": expected " +
                      std::to_string(operation_->result_bytes(i)) + " bytes, got " +
                      std::to_string(results[i].bytes));
    }
    to[i] = results[i].data;
  }
  // XLA has its context on this thread already; that is nowhere promised.
  const Libraries& libraries = engine_.libraries();
  if (const int error = libraries.runtime.set_device(ordinal); error != kCudaSuccess) {
    return libraries.OfRuntime("cudaSetDevice", error);
  }
  engine_.CountCall();
  Clique& clique = *places_[static_cast<std::size_t>(ordinal)].clique;
  return clique.Run(ordinal, stream, id_, [&](const Seat& seat) {
    return operation_->Enqueue(libraries, seat, stream, {from.data(), operands.size()},
                               {to.data(), results.size()});
  });
}

}  // namespace jaxcoll::cuda

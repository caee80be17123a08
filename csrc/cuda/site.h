// cuda/site.h: one call site of a compiled program, on all local devices.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <memory>   // std::unique_ptr
#include <mutex>    // std::mutex
#include <span>     // std::span
#include <vector>   // std::vector

#include "core/status.h"
#include "cuda/engine.h"
#include "cuda/operation.h"

namespace jaxcoll::cuda {

struct Operand {
  const void* data;
  std::size_t bytes;
};
struct Result {
  void* data;
  std::size_t bytes;
};

/// Thread-safe, with one thread at a time for each device.
class Site {
 public:
  /// `groups`: global ids of devices, in rank order.
  Site(Engine& engine, std::uint64_t id, std::vector<std::vector<std::int64_t>> groups,
       std::unique_ptr<Operation> operation)
      : engine_(engine), id_(id), groups_(std::move(groups)), operation_(std::move(operation)) {}

  /// Before every run of the program, on each of its devices. Costs a few loads but for the first
  /// time, see Clique::Join.
  Status Initialize(int ordinal, Stream stream);

  /// Puts the call on the device's stream.
  Status Execute(int ordinal, Stream stream, std::span<const Operand> operands,
                 std::span<const Result> results);

 private:
  struct Place {
    std::shared_ptr<Clique> clique;  // null before the first run
    std::int64_t generation = -1;
    bool is_prepared = false;
  };

  Status Enter(Place& place, int ordinal);
  Status Prepare(Place& place, int ordinal);

  Engine& engine_;
  const std::uint64_t id_;
  const std::vector<std::vector<std::int64_t>> groups_;
  const std::unique_ptr<Operation> operation_;
  std::mutex prepare_mutex_;
  std::array<Place, kMaxOrdinals> places_{};  // each used by its device's thread alone
};

}  // namespace jaxcoll::cuda

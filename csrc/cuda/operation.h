// cuda/operation.h: what a call site does, as far as one device is concerned.
#pragma once

#include <cstddef>  // std::size_t
#include <span>     // std::span

#include "core/status.h"
#include "cuda/clique.h"

namespace jaxcoll::cuda {

/// One kind of call with its sizes. Immutable, shared by all devices and runs; everything that a
/// device needs beyond its buffers is made in Prepare.
class Operation {
 public:
  Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  virtual ~Operation() = default;

  [[nodiscard]] virtual std::size_t num_operands() const = 0;
  [[nodiscard]] virtual std::size_t num_results() const = 0;
  [[nodiscard]] virtual std::size_t operand_bytes(std::size_t i) const = 0;
  [[nodiscard]] virtual std::size_t result_bytes(std::size_t i) const = 0;

  /// Of slots that neighbours fill over peer memory (cuda/block_window.h), where that can be.
  [[nodiscard]] virtual std::size_t peer_slot_bytes() const { return 0; }

  /// Once for each device, before it runs; the device is the current one. `blocks` has the slots;
  /// null: there are none.
  virtual Status Prepare(const Libraries& /*libraries*/, const Seat& /*seat*/,
                         BlockSeat* /*blocks*/) {
    return {};
  }

  /// Whether its own kernels make the device fail where they have waited in vain (cuda/failing.h).
  [[nodiscard]] virtual bool traps(const Seat& /*seat*/) const { return false; }

  /// Puts the call on a stream. Never waits for the device.
  virtual Status Enqueue(const Libraries& libraries, const Seat& seat, Stream stream,
                         std::span<const void* const> operands,
                         std::span<void* const> results) const = 0;
};

}  // namespace jaxcoll::cuda

// cuda/rounds.h: what the processes of a group tell each other before its first call, and before
// the first one that needs windows of some size.
//
// In rounds that all of them make: each comes with a row for every rank of its own, and goes with
// those of all ranks. So all know the same, and decide alike.
#pragma once

#include <cstddef>      // std::byte, std::size_t
#include <cstdint>      // std::int64_t
#include <span>         // std::as_writable_bytes, std::span
#include <string>       // std::string
#include <type_traits>  // std::is_trivially_copyable_v
#include <utility>      // std::move
#include <vector>       // std::vector

#include "core/status.h"

namespace jaxcoll::cuda {

class Rounds {
 public:
  /// Fills in the rows of other processes' devices, when all have come to the round, up to a limit.
  /// Returns why that failed, or nothing.
  using Exchange = std::string (*)(const std::vector<std::int64_t>& devices,
                                   std::int64_t generation, std::int64_t round,
                                   std::span<std::byte> rows);

  /// Rounds that belong together have numbers from a multiple of this on.
  static constexpr std::int64_t kMost = 16;

  /// `devices` are global ids in rank order, `num_local` of which are this process's. `first`: the
  /// number of the first round, a multiple of kMost; all processes come to it once, for `what`.
  Rounds(Exchange exchange, const std::vector<std::int64_t>& devices, std::int64_t generation,
         std::size_t num_local, std::string what = "communicator", std::int64_t first = 0)
      : what_(std::move(what)),
        exchange_(exchange),
        devices_(devices),
        generation_(generation),
        is_needed_(num_local < devices.size()),
        next_(first) {}

  [[nodiscard]] const std::vector<std::int64_t>& devices() const { return devices_; }
  [[nodiscard]] std::size_t num_ranks() const { return devices_.size(); }
  /// Whether the group is in several processes.
  [[nodiscard]] bool is_needed() const { return is_needed_; }

  /// `rows`, by rank, has those of this process, and then all.
  template <typename Row>
  Status Share(std::vector<Row>& rows) {
    static_assert(std::is_trivially_copyable_v<Row>);
    return is_needed_ ? Make(std::as_writable_bytes(std::span(rows))) : Status{};
  }

 private:
  Status Make(std::span<std::byte> rows);

  const std::string what_;
  const Exchange exchange_;
  const std::vector<std::int64_t>& devices_;
  const std::int64_t generation_;
  const bool is_needed_;
  std::int64_t next_;
};

/// As in "40, 41".
std::string Listed(const std::vector<std::int64_t>& ids);

}  // namespace jaxcoll::cuda

// host/work.h: what a collective does with the buffers once every rank has come.
#pragma once

#include <atomic>   // std::atomic
#include <cstddef>  // std::byte, std::size_t
#include <memory>   // std::unique_ptr

#include "core/pooled.h"

namespace jaxcoll {

class Membership;
class Route;
struct RouteOptions;

/// All ranks' buffers of one meeting. Leaf-major: leaf i of rank r is at [i * num_ranks + r].
struct Buffers {
  const void* const* operands;
  void* const* results;
  std::size_t num_ranks;
  /// Of work that starts early: the ranks in the order in which they came, and its counters, which
  /// were 0 when the call began.
  const std::size_t* arrivals = nullptr;
  std::atomic<int>* counters = nullptr;

  [[nodiscard]] const std::byte* operand(std::size_t leaf, std::size_t rank) const {
    return static_cast<const std::byte*>(operands[leaf * num_ranks + rank]);
  }
  [[nodiscard]] std::byte* result(std::size_t leaf, std::size_t rank) const {
    return static_cast<std::byte*>(results[leaf * num_ranks + rank]);
  }
};

/// How one op moves its data, cut into chunks that any thread may run in any order. Immutable, so
/// one instance serves all groups and meetings of a call site. Together the chunks write every
/// element of every result (result buffers arrive uninitialised), with values that do not depend on
/// who runs which chunk.
///
/// Work that starts early has chunks that need some of the ranks only: they run while the others
/// are on their way. Its chunks are begun in their order, so that one may wait for those before it.
class Work : public Pooled {
 public:
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() = default;

  [[nodiscard]] virtual std::size_t num_operands() const = 0;
  [[nodiscard]] virtual std::size_t num_results() const = 0;
  /// Bytes of one rank's operand or result i, to check what XLA hands over.
  [[nodiscard]] virtual std::size_t operand_bytes(std::size_t i) const = 0;
  [[nodiscard]] virtual std::size_t result_bytes(std::size_t i) const = 0;

  [[nodiscard]] virtual std::size_t num_chunks(std::size_t num_ranks) const = 0;
  /// Bytes read and written by all chunks together, for the choice of how many threads help.
  [[nodiscard]] virtual std::size_t bytes_moved(std::size_t num_ranks) const = 0;
  virtual void Run(std::size_t chunk, const Buffers& buffers) const = 0;

  [[nodiscard]] virtual bool starts_early() const { return false; }
  /// How many chunks, the first ones, need no other ranks than the first `count` of `arrivals`: all
  /// of them where these are all ranks. Never less for more ranks.
  [[nodiscard]] virtual std::size_t num_ready(const std::size_t* /*arrivals*/, std::size_t count,
                                              std::size_t num_ranks) const {
    return count == num_ranks ? num_chunks(num_ranks) : 0;
  }
  [[nodiscard]] virtual std::size_t num_counters(std::size_t /*num_ranks*/) const { return 0; }

  /// The same for a group whose ranks are in several processes. `members` outlives the route;
  /// windows hold at least MinWindowBytes(members). The same route on all processes.
  [[nodiscard]] virtual std::unique_ptr<const Route> MakeRoute(
      const Membership& members, const RouteOptions& options) const = 0;
};

/// Upper bound on num_ranks of one group: sizes the pointer arrays that chunks keep on the stack.
inline constexpr std::size_t kMaxRanks = 256;

}  // namespace jaxcoll

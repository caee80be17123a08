#include "host/direct_route.h"

#include <algorithm>  // std::max, std::min
#include <cstdint>    // std::int64_t
#include <cstring>    // std::memcpy, std::memset
#include <utility>    // std::move

#include "host/peer_memory.h"

namespace jaxcoll {
namespace {

// Of an operand, or of what a rank takes. Measured on 2 processes: of half as much the second copy,
// in cache, costs less than the system's call.
constexpr std::size_t kLeastReadBytes = std::size_t{1024} * 1024;
// Of a row: the system works page by page.
constexpr std::size_t kLeastRunBytes = std::size_t{16} * 1024;

}  // namespace

bool IsWorthReading(std::size_t bytes, std::size_t run_bytes) {
  return bytes >= kLeastReadBytes && run_bytes >= kLeastRunBytes;
}

bool IsReadingFaster(const RouteOptions& options, const Membership& members, bool leaves_once,
                     const std::function<bool(std::size_t, std::size_t)>& wants) {
  if (!options.can_read_peers) {
    return false;
  }
  // Of the process with most to do: the others do theirs meanwhile.
  double reading = 0;
  double through_windows = 0;
  for (std::size_t process = 0; process < members.num_processes(); ++process) {
    std::size_t taken = 0;
    std::size_t left = 0;
    for (std::size_t rank = 0; rank < members.num_ranks(); ++rank) {
      if (members.process_of(rank) != process) {
        continue;
      }
      std::size_t targets = 0;
      for (std::size_t other = 0; other < members.num_ranks(); ++other) {
        if (members.process_of(other) != process) {
          taken += wants(rank, other) ? 1 : 0;
          targets += wants(other, rank) ? 1 : 0;
        }
      }
      left += leaves_once ? std::min<std::size_t>(targets, 1) : targets;
    }
    const CopyCosts& costs = options.copy_costs;
    const auto num_taken = static_cast<double>(taken);
    reading = std::max(reading, costs.reading * num_taken);
    through_windows = std::max(
        through_windows, costs.leaving * static_cast<double>(left) + costs.taking * num_taken);
  }
  return reading < through_windows;
}

bool DirectRoute::Run(std::size_t phase, std::size_t /*round*/, const Buffers& local,
                      const Processes& processes) const {
  if (phase == 0) {
    for (std::size_t j = 0; j < local.num_ranks; ++j) {
      const void* const address = local.operands[j];
      std::memcpy(processes.windows[members_.mine()] + j * sizeof(address),
                  static_cast<const void*>(&address), sizeof(address));
    }
    return true;
  }
  return true;
}

bool DirectRoute::Take(std::size_t /*round*/, std::size_t process, const Buffers& local,
                       const Processes& processes) const {
  for (const std::size_t target : members_.my_ranks()) {
    auto* const result = static_cast<std::byte*>(local.results[members_.position(target)]);
    for (std::size_t source = 0; source < members_.num_ranks(); ++source) {
      if (members_.process_of(source) != process || !Wants(target, source)) {
        continue;
      }
      const std::size_t j = members_.position(source);
      const std::byte* address = nullptr;
      std::memcpy(static_cast<void*>(&address), processes.windows[process] + j * sizeof(address),
                  sizeof(address));
      if (!Read(source, target, processes.pids[process], address, result)) {
        return false;
      }
    }
  }
  return true;
}

bool DirectRoute::Reads(std::size_t phase, std::size_t reader, std::size_t process) const {
  if (phase == 2) {  // its own operands are what the others read
    return Reads(1, process, reader);
  }
  for (std::size_t target = 0; target < members_.num_ranks(); ++target) {
    if (members_.process_of(target) != reader) {
      continue;
    }
    for (std::size_t source = 0; source < members_.num_ranks(); ++source) {
      if (members_.process_of(source) == process && Wants(target, source)) {
        return true;
      }
    }
  }
  return false;
}

void DirectRoute::Meanwhile(std::size_t /*round*/, const Buffers& local) const {
  for (const std::size_t target : members_.my_ranks()) {
    auto* const result = static_cast<std::byte*>(local.results[members_.position(target)]);
    Begin(target, result);
    for (const std::size_t source : members_.my_ranks()) {
      if (Wants(target, source)) {
        const auto* const from =
            static_cast<const std::byte*>(local.operands[members_.position(source)]);
        static_cast<void>(Read(source, target, 0, from, result));  // of our own memory
      }
    }
  }
}

bool DirectExchange::Read(std::size_t source, std::size_t target, std::int64_t pid,
                          const std::byte* from, std::byte* result) const {
  from += target * layout_.from_block;
  result += source * layout_.to_block;
  if (pid == 0) {
    CopyBlock(
        {.row = 0, .num_rows = layout_.rows * layout_.columns, .begin = 0, .length = layout_.bytes},
        layout_.columns, from, {.row = layout_.from_row, .column = layout_.from_column}, result,
        {.row = layout_.to_row, .column = layout_.to_column}, nullptr);
    return true;
  }
  const PeerRows rows{.rows = layout_.columns,
                      .bytes = layout_.bytes,
                      .from_step = layout_.from_column,
                      .to_step = layout_.to_column};
  for (std::size_t row = 0; row < layout_.rows; ++row) {
    if (!ReadPeer(pid, result + row * layout_.to_row, from + row * layout_.from_row, rows)) {
      return false;
    }
  }
  return true;
}

DirectPermute::DirectPermute(std::vector<std::size_t> source_of, std::size_t bytes,
                             const Membership& members)
    : DirectRoute(members), source_of_(std::move(source_of)), bytes_(bytes) {}

bool DirectPermute::Wants(std::size_t target, std::size_t source) const {
  return source_of_[target] == source;
}

void DirectPermute::Begin(std::size_t target, std::byte* result) const {
  if (source_of_[target] == PermuteWork::kNone && result != nullptr) {
    std::memset(result, 0, bytes_);
  }
}

bool DirectPermute::Read(std::size_t /*source*/, std::size_t /*target*/, std::int64_t pid,
                         const std::byte* from, std::byte* result) const {
  if (pid == 0) {
    if (from != result) {
      std::memcpy(result, from, bytes_);
    }
    return true;
  }
  return ReadPeer(pid, result, from, {.rows = 1, .bytes = bytes_, .from_step = 0, .to_step = 0});
}

}  // namespace jaxcoll

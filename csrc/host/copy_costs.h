// host/copy_costs.h: which way between processes copies go fastest, as a rehearsal shows.
#pragma once

#include <array>    // std::array
#include <cstddef>  // std::size_t
#include <limits>   // std::numeric_limits

namespace jaxcoll {

class Session;

/// What copies between processes take, in nanoseconds for each KiB.
struct CopyCosts {
  double leaving = 0;  ///< into the own window, which another process has read since
  double taking = 0;   ///< out of the window of another one
  /// Out of the memory of another one (host/peer_memory.h).
  double reading = std::numeric_limits<double>::infinity();
  friend bool operator==(const CopyCosts&, const CopyCosts&) = default;
};

/// The same by the size of a rank's operand: a copy less counts for more where no cache holds the
/// rest, and where processes share cores each of a call's rounds takes its turns.
struct CopyCostsBySize {
  /// What is rehearsed.
  static constexpr std::array<std::size_t, 3> kBytes = {std::size_t{1} << 20, std::size_t{4} << 20,
                                                        std::size_t{16} << 20};

  std::array<CopyCosts, kBytes.size()> each{};
  /// Those of the nearest of the sizes, by ratio.
  [[nodiscard]] const CopyCosts& Of(std::size_t operand_bytes) const {
    std::size_t i = 0;
    while (i + 1 < kBytes.size() && operand_bytes >= kBytes[i] * 2) {
      ++i;
    }
    return each[i];
  }
  friend bool operator==(const CopyCostsBySize&, const CopyCostsBySize&) = default;
};

/// Passes memory around all processes of the session, both ways, as a chain of calls does. All of
/// them do so at this time, before the first call, and once. Takes some 160 ms of a core that each
/// has for itself, and more where they share cores: 16 MiB then cost as much as 4. Where the system
/// refuses, another process does not come within a second, or windows are smaller than 16 KiB (as
/// where a process is alone on its host), reading costs infinitely much. Where processes come for
/// large ones only, small ones cost as much as these.
CopyCostsBySize MeasureCopies(const Session& session);

}  // namespace jaxcoll

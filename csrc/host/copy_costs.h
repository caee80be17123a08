// host/copy_costs.h: which way between processes copies go fastest, as a rehearsal shows.
#pragma once

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

/// The same for calls that the caches hold, and for larger ones, where a copy less counts for more.
struct CopyCostsBySize {
  std::size_t cache_bytes = 0;  ///< from here on, read and written by all ranks, they are large
  CopyCosts cached;
  CopyCosts large;
  [[nodiscard]] const CopyCosts& Of(std::size_t bytes_moved) const {
    return bytes_moved < cache_bytes ? cached : large;
  }
  friend bool operator==(const CopyCostsBySize&, const CopyCostsBySize&) = default;
};

/// Passes memory around all processes of the session, both ways, as a chain of calls does. All of
/// them do so at this time, before the first call, and once. Takes some 90 ms of a core that each
/// has for itself. Where the system refuses, another process does not come within a second, or
/// windows are smaller than 16 KiB (as where a process is alone on its host), reading costs
/// infinitely much. Where processes share cores, or come for small ones only, large ones cost as
/// much as these.
CopyCostsBySize MeasureCopies(const Session& session);

}  // namespace jaxcoll

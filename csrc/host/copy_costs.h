// host/copy_costs.h: which way between processes copies go fastest, as a rehearsal shows.
#pragma once

#include <cstddef>  // std::size_t
#include <limits>   // std::numeric_limits

#include "kernels/copy.h"

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
  CopyCosts cached;
  CopyCosts large;
  /// Of a call that reads and writes so many bytes, of all ranks.
  [[nodiscard]] const CopyCosts& Of(std::size_t bytes_moved) const {
    return bytes_moved < CacheBytes() ? cached : large;
  }
  friend bool operator==(const CopyCostsBySize&, const CopyCostsBySize&) = default;
};

/// Passes memory around all processes of the session, both ways, as a chain of calls does. All of
/// them do so at this time, before the first call, and once. Takes some 50 ms. Where the
/// system refuses, another process does not come within two seconds, or windows are smaller than 16
/// KiB (as where a process is alone on its host), reading costs infinitely much.
CopyCostsBySize MeasureCopies(const Session& session);

}  // namespace jaxcoll

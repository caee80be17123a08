// host/copy_costs.h: which way between processes copies go fastest, as a rehearsal shows.
#pragma once

#include <limits>  // std::numeric_limits

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

/// Passes memory around all processes of the session, both ways, as a chain of calls does. All of
/// them do so at this time, before the first call, and once. Takes some milliseconds. Where the
/// system refuses, another process does not come within a second, or windows are smaller than 16
/// KiB (as where a process is alone on its host), reading costs infinitely much.
CopyCosts MeasureCopies(const Session& session);

}  // namespace jaxcoll

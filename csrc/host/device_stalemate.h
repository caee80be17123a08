// host/device_stalemate.h: devices of this process that wait for one another in different calls.
#pragma once

#include <cstdint>  // std::int64_t
#include <set>      // std::set
#include <vector>   // std::vector

#include "host/call_site.h"

namespace jaxcoll {

/// Looked after by the watchdog, at each of its looks.
///
/// Also those that wait for a device whose last call has failed, and which so does not get what the
/// next program needs. Devices may come to calls of several programs in any order: nothing is said
/// while anything of this process computes, or is in a callback, which could be a device on its way
/// to a call.
class DeviceStalemate {
 public:
  /// Fails the calls in which devices have waited for one another for a second or so, and will for
  /// ever. `calls`: all that are under way.
  void End(const std::vector<CallSite::UnderWay>& calls, std::int64_t now_ns);

  /// Whether to look again soon.
  [[nodiscard]] bool is_suspected() const { return since_ns_ > 0; }

 private:
  /// Whether the process has been idle since it was first asked, for long enough.
  bool IsIdle(std::int64_t now_ns);

  std::int64_t since_ns_ = 0;     // 0: there is no suspicion
  std::int64_t computed_ns_ = 0;  // by this process until then
};

}  // namespace jaxcoll

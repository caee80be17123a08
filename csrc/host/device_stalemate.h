// host/device_stalemate.h: devices of this process that wait for one another in different calls.
#pragma once

#include <cstdint>  // std::int64_t
#include <set>      // std::set
#include <vector>   // std::vector

#include "host/call_site.h"

namespace jaxcoll {

/// Looked after by the watchdog, at each of its looks.
///
/// Also those that have waited since before the last call of another device failed, or that wait
/// for one where a callback has raised: that one does not get what their program needs. Devices may
/// come to calls of several programs in any order: nothing is said while anything of this process
/// could be a device on its way to a call, because it computes or would if it got its turn, or is
/// in a callback. A device that sleeps in somebody else's handler is not seen.
class DeviceStalemate {
 public:
  /// Fails the calls in which devices have waited for one another for a second or so, and will for
  /// ever. `calls`: all that are under way.
  void End(const std::vector<CallSite::UnderWay>& calls, std::int64_t now_ns);

  /// How long after a look the next one is to come while there is a suspicion.
  static constexpr std::int64_t kPeriodNs = 50'000'000;
  [[nodiscard]] bool is_suspected() const { return num_looks_ > 0; }

 private:
  std::int64_t last_look_ns_ = 0;
  int num_looks_ = 0;       // since there is a suspicion
  int num_busy_ = 0;        // of those
  bool was_asked_ = false;  // the watch in Python, for what it sees now
};

}  // namespace jaxcoll

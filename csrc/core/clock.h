// core/clock.h: the monotonic clock of deadlines, feedback and recorded timestamps.
#pragma once

#include <chrono>   // std::chrono::steady_clock
#include <cstdint>  // std::int64_t

namespace jaxcoll {

/// Nanoseconds since an arbitrary fixed point; never goes back.
inline std::int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace jaxcoll

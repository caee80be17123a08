// core/clock.h: the monotonic clock of deadlines, feedback and recorded timestamps.
#pragma once

#include <array>    // std::array
#include <chrono>   // std::chrono::steady_clock
#include <cstdint>  // std::int64_t
#include <cstdio>   // std::snprintf
#include <string>   // std::string

namespace jaxcoll {

/// Nanoseconds since an arbitrary fixed point; never goes back.
inline std::int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// As in "1.5 s".
inline std::string SecondsText(std::int64_t ns) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", static_cast<double>(ns) * 1e-9);
  return text.data();
}

}  // namespace jaxcoll

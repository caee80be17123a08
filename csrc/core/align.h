// core/align.h: sizes that are whole units.
#pragma once

#include <cstddef>  // std::size_t

namespace jaxcoll {

/// What no two cores are to write at once has lines of its own.
inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kPage = 4096;

/// The least multiple of `unit` that holds `bytes`.
constexpr std::size_t RoundedUp(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/// The greatest multiple of `unit` within `bytes`.
constexpr std::size_t RoundedDown(std::size_t bytes, std::size_t unit) {
  return bytes / unit * unit;
}

}  // namespace jaxcoll

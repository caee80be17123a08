// core/quick_clock.h: the clock for times that are noted in every call.
#pragma once

#include <cstdint>  // std::int64_t

namespace jaxcoll {

/// The time of NowNs() (core/clock.h), or less: by some tens of nanoseconds, seldom by some
/// hundreds. Never goes back within a thread. Where a thread asks again soon it counts the
/// processor's ticks since then: a look at the clock itself waits for all loads before it, which in
/// a call are of other cores' data, and takes 4% of a call of 256 bytes between two processes.
std::int64_t QuickNowNs();

}  // namespace jaxcoll

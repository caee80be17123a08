// host/threads.h: what the system says of the threads of a process.
#pragma once

#include <cstdint>  // std::int64_t

namespace jaxcoll {

/// Whether a thread of process `pid`, other than the calling one, runs, or would if it got its
/// turn, or waits for a disk. True where that can't be told.
bool IsAnyThreadBusy(std::int64_t pid);

}  // namespace jaxcoll

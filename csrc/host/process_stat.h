// host/process_stat.h: what the system says of a process or a thread.
#pragma once

#include <cstdint>     // std::int64_t
#include <filesystem>  // std::filesystem::path
#include <optional>    // std::optional

namespace jaxcoll {

struct ProcessStat {
  char state = '?';              ///< as in proc(5): R runs, D waits for a device, T is stopped, ...
  std::int64_t start_ticks = 0;  ///< when it began: tells one from a later one of the same number
};

/// `folder` is /proc/PID or /proc/PID/task/TID. Nothing where it can't be read: it may have ended,
/// also between two looks at its files.
std::optional<ProcessStat> ReadProcessStat(const std::filesystem::path& folder);

}  // namespace jaxcoll

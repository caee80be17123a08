// host/diagnosis.h: what errors say about a process that others wait for, from its black box.
#pragma once

#include <cstddef>   // std::size_t
#include <cstdint>   // std::int64_t
#include <optional>  // std::optional
#include <string>    // std::string
#include <vector>    // std::vector

#include "host/black_box.h"
#include "host/job.h"

namespace jaxcoll {

/// The call that `device` (without one, any) waits in, and the one that it has ended last: what,
/// and when. One line.
std::string LastCallText(const BlackBox& box, std::optional<std::int64_t> device,
                         std::int64_t now_ns);

/// What the process's Python does, and its stack: indented lines, each after a line break. Empty
/// where nobody looks after it.
std::string PythonText(const BlackBox& box, std::int64_t now_ns);

/// As in "process 2, pid 4711, stopped".
std::string ProcessText(const Session& session, std::size_t seat);

/// What those do for which the processes at `seats` wait, and those for which these do, and so on:
/// lines, each after a line break.
std::string ChainText(const Session& session, const std::vector<std::size_t>& seats);

/// Where processes write their dumps when calls fail; empty: nowhere.
void SetDumpFolder(std::string folder);
/// The last line of errors, after a line break: where the dumps are. Or nothing.
std::string DumpText();

}  // namespace jaxcoll

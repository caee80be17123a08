// host/diagnosis.h: what errors say about a process that others wait for, from its black box.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t
#include <map>      // std::map
#include <set>      // std::set
#include <string>   // std::string
#include <vector>   // std::vector

#include "host/black_box.h"
#include "host/job.h"

namespace jaxcoll {

/// The devices of a process that have called anything.
std::set<std::int64_t> DevicesIn(const BlackBox& box);

/// The call that one of `devices` (any numbers of theirs; see Recorder::DeviceInRecords) waits in,
/// and the one that was ended there last: what, and when. One line.
std::string LastCallText(const BlackBox& box, const std::set<std::int64_t>& devices,
                         std::int64_t now_ns);

/// What the calls of a process tell of those ranks of a group that are there.
struct RanksThere {
  std::set<std::int64_t> in_call;                  ///< have come to the call, and wait in it
  std::map<std::int64_t, std::int64_t> device_of;  ///< by rank, of those that have called
  std::set<std::int64_t> elsewhere;                ///< devices in another group of the site
};
RanksThere FindRanks(const BlackBox& box, std::uint64_t group, std::uint64_t site,
                     std::int64_t execution);
/// LastCallText of a rank: of its device, or of those that no other rank is known to be on.
std::string LastCallOfRank(const BlackBox& box, const RanksThere& ranks, std::int64_t rank,
                           std::int64_t now_ns);

/// What the process's Python does, and its stack: indented lines, each after a line break. Of a
/// stack from before its last call ended no more than that, as it has gone on since. Empty where
/// nobody looks after it.
std::string PythonText(const BlackBox& box, std::int64_t now_ns);

/// Of a call that only the callers themselves record, as those on GPUs: the ranks of other
/// processes of this host that have not made it, as errors name them, and, in lines of their own,
/// what these do. Empty where all have made it, or it can't be told.
///
/// `processes`: of each rank, in the job.
std::string AbsentText(const Session& session, const std::vector<std::int64_t>& processes,
                       std::uint64_t group, std::uint64_t site, std::int64_t execution);

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

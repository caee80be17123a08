// host/stalemate.h: who waits for one another in different calls, and always will.
#pragma once

#include <cstdint>   // std::int64_t, std::uint64_t
#include <optional>  // std::optional
#include <set>       // std::set
#include <string>    // std::string
#include <vector>    // std::vector

#include "host/job.h"

namespace jaxcoll {

/// One of several calls that `waiter` is in, and those that have not come to it.
struct Wait {
  std::int64_t waiter;
  std::vector<std::int64_t> missing;
};

/// Those that will wait for ever if they come to no further call: in each of their calls they wait
/// for another one of them.
std::set<std::int64_t> FindStuck(const std::vector<Wait>& waits);

/// Says which processes wait in which calls, if this one is among some of which each waits for
/// another one, in every call that it has waited in for `patience_ns`; else nothing. `group`: looks
/// at the calls of that group alone.
///
/// Not a proof: a process that waits in one call may be computing its way to another. Ranks come to
/// the calls of one group in one order, so that there a little patience is enough.
std::string FindStalemate(const Session& session, std::optional<std::uint64_t> group,
                          std::int64_t now_ns, std::int64_t patience_ns);

/// The processes for which those at `seats` wait, and those for which these do, and so on: each
/// once, with one that waits for it. By seats.
std::vector<Wait> FindWaits(const Session& session, const std::vector<std::size_t>& seats);

}  // namespace jaxcoll

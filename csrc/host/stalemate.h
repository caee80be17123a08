// host/stalemate.h: processes that wait for one another in different calls, and always will.
#pragma once

#include <cstdint>   // std::int64_t, std::uint64_t
#include <optional>  // std::optional
#include <string>    // std::string

#include "host/job.h"

namespace jaxcoll {

/// Says which processes wait in which calls, if this one is among some of which each waits for
/// another one, in every call that it has waited in for `patience_ns`; else nothing. `group`: looks
/// at the calls of that group alone.
///
/// Not a proof: a process that waits in one call may be computing its way to another. Ranks come to
/// the calls of one group in one order, so that there a little patience is enough.
std::string FindStalemate(const Session& session, std::optional<std::uint64_t> group,
                          std::int64_t now_ns, std::int64_t patience_ns);

}  // namespace jaxcoll

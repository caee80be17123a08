// host/stalemate.h: who waits for one another in different calls, and always will.
#pragma once

#include <cstdint>      // std::int64_t, std::uint64_t
#include <optional>     // std::optional
#include <set>          // std::set
#include <string>       // std::string
#include <string_view>  // std::string_view
#include <utility>      // std::pair
#include <vector>       // std::vector

#include "host/job.h"

namespace jaxcoll {

/// Calls of one group that all have stood for this long and don't match never will.
inline constexpr std::int64_t kMismatchNs = 1'000'000'000;
/// The same of calls to which a process may come in any order, while the main thread of one does
/// something else than to await results.
inline constexpr std::int64_t kStalemateNs = 10'000'000'000;

/// One of several calls that `waiter` is in, and those that have not come to it.
struct Wait {
  std::int64_t waiter;
  std::vector<std::int64_t> missing;
};

/// Those that will wait for ever if they come to no further call: in each of their calls they wait
/// for another one of them.
std::set<std::int64_t> FindStuck(const std::vector<Wait>& waits);

/// Processes that wait for one another.
struct Stalemate {
  std::set<std::int64_t> seats;  ///< theirs; none where there is no stalemate
  std::string text;              ///< which of them waits in which calls, and who with them
};

/// "process 0 (and 2, 3) waits in this; process 1 waits in that", where `what` is "process": what
/// each does, alike texts once, those of the fewest first. Leaves room in a segment's cause.
std::string DoingsText(std::string_view what,
                       const std::vector<std::pair<std::int64_t, std::string>>& doings);

/// Finds which processes wait in which calls, if this one is among some of which each waits for
/// another one, in every call that it has waited in for `patience_ns`. `group`: looks at the calls
/// of that group alone.
///
/// Not a proof: a process that waits in one call may be on its way to another, see MayComeToMore.
/// Ranks come to the calls of one group in one order, so that there a little patience is enough.
Stalemate FindStalemate(const Session& session, std::optional<std::uint64_t> group,
                        std::int64_t now_ns, std::int64_t patience_ns);

/// Finds different calls at one line of one program which this process and another one have left
/// for `patience_ns`, neither of which the other has come to: of several roots each has ended its
/// own, and nobody may ever wait. Where processes come to the calls of `group` in one order, as one
/// thread does, that is a proof.
Stalemate FindDifferentLeft(Session& session, std::uint64_t group, std::int64_t now_ns,
                            std::int64_t patience_ns);

/// Fails the job where that is found, at once where the main threads await results, so that none
/// comes to more, else after kStalemateNs.
void FailForDifferentLeft(Session& session, std::int64_t now_ns);

/// What the job's failure says of `calls`.
std::string DifferentCallsText(std::string_view calls);

/// Whether a process at one of `seats` computes, or is stopped, in a callback or excused, so that
/// it may come to more calls than it waits in; or nobody there tells. Looks for a while.
bool MayComeToMore(const Session& session, const std::set<std::int64_t>& seats,
                   std::int64_t compile_timeout_ns);

/// Whether the main thread of each process at `seats` awaits results, so that it launches nothing.
bool DoAllAwait(const Session& session, const std::set<std::int64_t>& seats);

/// The processes for which those at `seats` wait, and those for which these do, and so on: each
/// once, with one that waits for it. By seats.
std::vector<Wait> FindWaits(const Session& session, const std::vector<std::size_t>& seats);

}  // namespace jaxcoll

#include "host/stalemate.h"

#include <algorithm>    // std::all_of, std::any_of, std::find_if, std::none_of
#include <atomic>       // std::atomic_thread_fence
#include <cstddef>      // std::size_t
#include <ctime>        // nanosleep, timespec
#include <iterator>     // std::back_inserter
#include <map>          // std::map, std::multimap
#include <string>       // std::string, std::to_string
#include <string_view>  // std::string_view
#include <utility>      // std::move, std::pair
#include <vector>       // std::vector

#include "core/clock.h"
#include "core/utf8.h"
#include "host/black_box.h"
#include "host/diagnosis.h"
#include "host/segment.h"
#include "host/threads.h"

namespace jaxcoll {
namespace {

// Of calls in one error, after which stands where more is to be found.
constexpr std::size_t kMostBytes = Segment::kMaxCauseBytes * 2 / 3;

// What texts of calls say before the line (jaxcoll/_lowering.py).
constexpr std::string_view kCalledAt = ", called at ";

// A call that a process has come to, whether or not it is over for it.
struct OpenCall {
  CallName name;
  std::size_t lane;
  bool waits;
  bool has_waited;                   // for long, and still does
  bool is_left;                      // others have yet to come to it, or to end it
  std::vector<std::size_t> members;  // seats
  std::string text;
};

using Calls = std::vector<OpenCall>;

Calls CallsOf(const Segment& segment, std::size_t seat, std::optional<std::uint64_t> group,
              std::int64_t until_ns) {
  Calls calls;
  for (std::size_t i = 0; i < segment.shape().num_lanes; ++i) {
    const Lane& lane = segment.lane(seat, i);
    const std::uint64_t word = lane.word.load(std::memory_order_acquire);
    const std::int64_t since_ns = lane.waits_since_ns.load(std::memory_order_acquire);
    // A call that it has left says nothing about calls of other groups, to which it may come yet.
    const std::int64_t waits_since_ns = since_ns < 0 && group.has_value() ? -since_ns : since_ns;
    OpenCall call{.name = lane.name(),
                  .lane = i,
                  .waits = since_ns > 0,
                  .has_waited = waits_since_ns > 0 && waits_since_ns <= until_ns,
                  .is_left = false,
                  .members = {},
                  .text = lane.text.Get()};
    for (std::size_t member = 0; member < segment.shape().num_seats; ++member) {
      const bool has_ended =
          since_ns < 0 && segment.ended(member, seat, i).load(std::memory_order_acquire) ==
                              word >> Lane::kProgressBits;
      if (lane.members.Has(member) && !has_ended) {
        call.members.push_back(member);
      }
    }
    call.is_left = since_ns < 0 && !call.members.empty();
    if (since_ns < 0 && !call.is_left) {
      call.has_waited = false;  // it is over for all
    }
    if (word == 0 || group.value_or(call.name.group) != call.name.group ||
        call.name.tag() != word >> Lane::kProgressBits) {
      continue;
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (lane.word.load(std::memory_order_relaxed) == word) {  // else it went on meanwhile
      calls.push_back(std::move(call));
    }
  }
  return calls;
}

bool HasComeTo(const Calls& calls, const CallName& name) {
  return std::any_of(calls.begin(), calls.end(),
                     [&](const OpenCall& call) { return call.name == name; });
}

std::string DoingText(const OpenCall& call) {
  return (call.is_left ? "has ended, before others came to it, " : "waits in ") + call.text +
         ", execution " + std::to_string(call.name.occurrence) + " of this call";
}

const BlackBox* BoxOf(const Session& session, std::int64_t each) {
  const auto seat = static_cast<std::size_t>(each);
  return seat == session.seat() ? &BlackBox::Get() : session.box(seat);
}

Phase PhaseIn(const BlackBox& box) {
  return static_cast<Phase>(box.header().phase.load(std::memory_order_acquire));
}

using Standing = std::vector<std::pair<std::int64_t, Calls>>;  // by process

// The calls in which those at the `stuck` seats stand, and who waits in these with them, though
// not for as long: of two calls the one with more processes is more likely right.
Standing StoodIn(const Session& session, const std::vector<Calls>& by_seat,
                 const std::set<std::int64_t>& stuck) {
  const auto stands = [](const OpenCall& call) { return call.has_waited || call.is_left; };
  Calls theirs;
  for (const std::int64_t seat : stuck) {
    const Calls& calls = by_seat[static_cast<std::size_t>(seat)];
    std::copy_if(calls.begin(), calls.end(), std::back_inserter(theirs), stands);
  }
  const auto waits_with_them = [&](const OpenCall& call) {
    return call.waits && HasComeTo(theirs, call.name);
  };
  Standing standing;
  for (std::size_t seat = 0; seat < by_seat.size(); ++seat) {
    const bool is_stuck = stuck.count(static_cast<std::int64_t>(seat)) > 0;
    Calls calls;
    std::copy_if(
        by_seat[seat].begin(), by_seat[seat].end(), std::back_inserter(calls),
        [&](const OpenCall& call) { return is_stuck ? stands(call) : waits_with_them(call); });
    if (!calls.empty()) {
      standing.emplace_back(session.processes()[seat], std::move(calls));
    }
  }
  return standing;
}

// What is said of the group of a call: "" but where nothing else tells the calls apart.
class GroupNames {
 public:
  explicit GroupNames(const Standing& stood_in) {
    for (const auto& [process, calls] : stood_in) {
      for (const OpenCall& call : calls) {
        std::vector<std::uint64_t>& groups = groups_of_[call.text];
        if (std::find(groups.begin(), groups.end(), call.name.group) == groups.end()) {
          groups.push_back(call.name.group);
        }
      }
    }
  }

  std::string Of(const OpenCall& call) const {
    const std::vector<std::uint64_t>& groups = groups_of_.at(call.text);
    const auto at = std::find(groups.begin(), groups.end(), call.name.group) - groups.begin();
    return are_used() ? ", in group " + std::to_string(at + 1) : "";
  }

  std::string_view Explanation() const {
    return are_used() ? " (the groups differ in their devices, or in the order of them)" : "";
  }

 private:
  bool are_used() const { return groups_of_.size() == 1 && groups_of_.begin()->second.size() > 1; }

  std::map<std::string, std::vector<std::uint64_t>> groups_of_;  // by the call's text
};

// Says in which calls which processes stand.
std::string StoodInText(const Standing& stood_in) {
  const GroupNames names(stood_in);
  std::vector<std::pair<std::int64_t, std::string>> doings;
  for (const auto& [process, calls] : stood_in) {
    std::string& doing = doings.emplace_back(process, "").second;
    for (const OpenCall& call : calls) {
      doing += (doing.empty() ? "" : ", and ") + DoingText(call) + names.Of(call);
    }
  }
  return DoingsText("process", doings) + std::string(names.Explanation());
}

}  // namespace

std::set<std::int64_t> FindStuck(const std::vector<Wait>& waits) {
  std::set<std::int64_t> stuck;
  for (const Wait& wait : waits) {
    stuck.insert(wait.waiter);
  }
  const auto may_end = [&](const Wait& wait) {
    return std::none_of(wait.missing.begin(), wait.missing.end(),
                        [&](std::int64_t missing) { return stuck.count(missing) > 0; });
  };
  for (bool changed = true; changed;) {  // what is left when no more drop out
    changed = false;
    for (const Wait& wait : waits) {
      changed = (stuck.count(wait.waiter) > 0 && may_end(wait) && stuck.erase(wait.waiter) > 0) ||
                changed;
    }
  }
  return stuck;
}

std::string DoingsText(std::string_view what,
                       const std::vector<std::pair<std::int64_t, std::string>>& doings) {
  using Group = std::pair<std::string_view, std::vector<std::int64_t>>;  // what these do
  std::vector<Group> groups;
  for (const auto& [one, doing] : doings) {
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& known) { return known.first == doing; });
    if (group == groups.end()) {
      group = groups.insert(group, {doing, {}});
    }
    group->second.push_back(one);
  }
  // Who is alone with its call is more likely wrong.
  std::multimap<std::size_t, const Group*> by_size;
  for (const Group& group : groups) {
    by_size.emplace(group.second.size(), &group);
  }
  std::string text;
  for (const auto& [size, group] : by_size) {
    const auto& [doing, those] = *group;
    text += (text.empty() ? "" : "; ") + std::string(what) + " " + std::to_string(those.front());
    for (std::size_t i = 1; i < size; ++i) {
      text += (i == 1 ? " (and " : ", ") + std::to_string(those[i]);
    }
    text += (size > 1 ? ") " : " ") + std::string(doing);
  }
  if (text.size() > kMostBytes) {
    text.resize(Beginning(text, kMostBytes).size());
    text += " ...";
  }
  return text;
}

Stalemate FindStalemate(const Session& session, std::optional<std::uint64_t> group,
                        std::int64_t now_ns, std::int64_t patience_ns) {
  const Segment& segment = session.segment();
  std::vector<Calls> by_seat;
  for (std::size_t seat = 0; seat < segment.shape().num_seats; ++seat) {
    by_seat.push_back(CallsOf(segment, seat, group, now_ns - patience_ns));
  }
  std::vector<Wait> waits;
  for (std::size_t seat = 0; seat < by_seat.size(); ++seat) {
    for (const OpenCall& call : by_seat[seat]) {
      if (!call.has_waited) {
        continue;
      }
      Wait& wait =
          waits.emplace_back(Wait{.waiter = static_cast<std::int64_t>(seat), .missing = {}});
      for (const std::size_t member : call.members) {
        // Who has come keeps the lane until all have read it.
        if (!HasComeTo(by_seat[member], call.name)) {
          wait.missing.push_back(static_cast<std::int64_t>(member));
        }
      }
    }
  }
  std::set<std::int64_t> stuck = FindStuck(waits);
  if (stuck.count(static_cast<std::int64_t>(session.seat())) == 0) {
    return {};
  }
  std::string text = StoodInText(StoodIn(session, by_seat, stuck));
  return {.seats = std::move(stuck), .text = std::move(text)};
}

Stalemate FindDifferentLeft(Session& session, std::uint64_t group, std::int64_t now_ns,
                            std::int64_t patience_ns) {
  const Segment& segment = session.segment();
  const std::int64_t until_ns = now_ns - patience_ns;
  const auto has_left = [](const OpenCall& call) { return call.is_left && call.has_waited; };
  const auto source = [](const OpenCall& call) {
    return call.text.substr(std::min(call.text.rfind(kCalledAt), call.text.size()));
  };
  for (const OpenCall& call : CallsOf(segment, session.seat(), group, until_ns)) {
    for (const std::size_t member : has_left(call) ? call.members : std::vector<std::size_t>{}) {
      const Calls theirs = CallsOf(segment, member, group, until_ns);
      const auto other = std::find_if(theirs.begin(), theirs.end(), [&](const OpenCall& left) {
        return has_left(left) && left.name.place() == call.name.place() &&
               source(left) == source(call) && !session.HasBegun(left.name);
      });
      // In its lanes is what it has come to and not ended.
      const bool has_come =
          HasComeTo(theirs, call.name) ||
          segment.ended(member, session.seat(), call.lane).load(std::memory_order_acquire) ==
              call.name.tag();
      if (other != theirs.end() && !has_come) {
        return {
            .seats = {static_cast<std::int64_t>(session.seat()), static_cast<std::int64_t>(member)},
            .text = DoingsText("process", {{session.process(), DoingText(call)},
                                           {session.processes()[member], DoingText(*other)}})};
      }
    }
  }
  return {};
}

void FailForDifferentLeft(Session& session, std::int64_t now_ns) {
  for (const std::uint64_t group : session.GroupsLeft()) {
    Stalemate found = FindDifferentLeft(session, group, now_ns, kMismatchNs);
    if (!found.seats.empty() && !DoAllAwait(session, found.seats)) {
      found = FindDifferentLeft(session, group, now_ns, kStalemateNs);
    }
    if (!found.seats.empty()) {
      session.segment().Fail(DifferentCallsText(found.text));
    }
  }
}

bool MayComeToMore(const Session& session, const std::set<std::int64_t>& seats,
                   std::int64_t compile_timeout_ns) {
  constexpr int kLooks = 20;
  const timespec nap{.tv_sec = 0, .tv_nsec = 10'000'000};
  std::map<std::int64_t, const BlackBox*> boxes;
  for (const std::int64_t seat : seats) {
    boxes[seat] = BoxOf(session, seat);
    // What it has told of callbacks may be old.
    if (boxes[seat] == nullptr || !boxes[seat]->AskForStack()) {
      return true;
    }
  }
  std::map<std::int64_t, int> num_busy;
  for (int i = 0; i < kLooks; ++i) {
    for (const auto& [each, box] : boxes) {
      const Phase phase = PhaseIn(*box);
      if (phase == Phase::kUnknown || phase == Phase::kCallback ||
          box->header().callbacks.load(std::memory_order_relaxed) > 0 ||
          box->IsExcused(NowNs(), compile_timeout_ns)) {
        return true;
      }
      const Seat& seat = session.segment().seat(static_cast<std::size_t>(each));
      num_busy[each] += IsAnyThreadBusy(seat.pid.load(std::memory_order_relaxed)) ? 1 : 0;
    }
    nanosleep(&nap, nullptr);
  }
  return std::any_of(num_busy.begin(), num_busy.end(),
                     [](const auto& busy) { return busy.second >= kLooks / 2; });
}

std::string DifferentCallsText(std::string_view calls) {
  return "the processes called different collectives, or the same in another order: " +
         std::string(calls) + DumpText();
}

bool DoAllAwait(const Session& session, const std::set<std::int64_t>& seats) {
  return std::all_of(seats.begin(), seats.end(), [&](std::int64_t seat) {
    const BlackBox* const box = BoxOf(session, seat);
    return box != nullptr &&
           (PhaseIn(*box) == Phase::kAwaiting || PhaseIn(*box) == Phase::kCalling);
  });
}

std::vector<Wait> FindWaits(const Session& session, const std::vector<std::size_t>& seats) {
  const Segment& segment = session.segment();
  std::vector<Wait> found;
  std::set<std::size_t> known(seats.begin(), seats.end());
  for (std::vector<std::size_t> next = seats; !next.empty();) {
    std::vector<std::size_t> others;
    for (const std::size_t seat : next) {
      for (std::size_t i = 0; i < segment.shape().num_lanes; ++i) {
        const Lane& lane = segment.lane(seat, i);
        if (lane.waits_since_ns.load(std::memory_order_acquire) <= 0) {
          continue;
        }
        for (std::size_t member = 0; member < segment.shape().num_seats; ++member) {
          if (lane.members.Has(member) && known.insert(member).second) {
            found.push_back({.waiter = static_cast<std::int64_t>(seat),
                             .missing = {static_cast<std::int64_t>(member)}});
            others.push_back(member);
          }
        }
      }
    }
    next = std::move(others);
  }
  return found;
}

}  // namespace jaxcoll

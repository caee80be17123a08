#include "host/stalemate.h"

#include <algorithm>  // std::all_of, std::any_of, std::find
#include <atomic>     // std::atomic_thread_fence
#include <cstddef>    // std::size_t
#include <utility>    // std::move
#include <vector>     // std::vector

#include "host/segment.h"

namespace jaxcoll {
namespace {

struct WaitingCall {
  CallName name;
  std::vector<std::size_t> members;  // seats
  std::string text;
};

using Calls = std::vector<WaitingCall>;

Calls CallsOf(const Segment& segment, std::size_t seat, std::optional<std::uint64_t> group,
              std::int64_t until_ns) {
  Calls calls;
  for (std::size_t i = 0; i < segment.shape().num_lanes; ++i) {
    const Lane& lane = segment.lane(seat, i);
    const std::uint64_t word = lane.word.load(std::memory_order_acquire);
    const std::int64_t since_ns = lane.waits_since_ns.load(std::memory_order_acquire);
    WaitingCall call{.name = lane.name(), .members = {}, .text = lane.text.Get()};
    for (std::size_t member = 0; member < segment.shape().num_seats; ++member) {
      if (lane.members.Has(member)) {
        call.members.push_back(member);
      }
    }
    if (word == 0 || since_ns == 0 || since_ns > until_ns ||
        group.value_or(call.name.group) != call.name.group ||
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

bool Has(const Calls& calls, const CallName& name) {
  return std::any_of(calls.begin(), calls.end(),
                     [&](const WaitingCall& call) { return call.name == name; });
}

}  // namespace

std::string FindStalemate(const Session& session, std::optional<std::uint64_t> group,
                          std::int64_t now_ns, std::int64_t patience_ns) {
  const Segment& segment = session.segment();
  std::vector<Calls> by_seat;
  for (std::size_t seat = 0; seat < segment.shape().num_seats; ++seat) {
    by_seat.push_back(CallsOf(segment, seat, group, now_ns - patience_ns));
  }
  // Those that can't go on: of every call of theirs, one that can't go on either is not in it. What
  // is left when no more drop out.
  std::vector<bool> is_stuck;
  for (const Calls& calls : by_seat) {
    is_stuck.push_back(!calls.empty());
  }
  const auto lacks_one = [&](const WaitingCall& call) {
    return std::any_of(call.members.begin(), call.members.end(), [&](std::size_t member) {
      return is_stuck[member] && !Has(by_seat[member], call.name);
    });
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t seat = 0; seat < by_seat.size(); ++seat) {
      if (is_stuck[seat] && !std::all_of(by_seat[seat].begin(), by_seat[seat].end(), lacks_one)) {
        is_stuck[seat] = false;
        changed = true;
      }
    }
  }
  if (!is_stuck[session.seat()]) {
    return "";
  }
  std::string text;
  for (std::size_t seat = 0; seat < by_seat.size(); ++seat) {
    if (!is_stuck[seat]) {
      continue;
    }
    text += (text.empty() ? "process " : "; process ") + std::to_string(session.processes()[seat]) +
            " waits in ";
    for (const WaitingCall& call : by_seat[seat]) {
      text += (&call == by_seat[seat].data() ? "" : ", and ") + call.text;
    }
  }
  return text;
}

}  // namespace jaxcoll

// tests/cpp/stalemate_test.cc: which processes are told that they wait for one another.
#include <cstddef>   // std::size_t
#include <cstdint>   // std::int64_t, std::uint64_t
#include <optional>  // std::nullopt
#include <string>    // std::string, std::to_string
#include <utility>   // std::pair
#include <vector>    // std::vector

#include "core/clock.h"
#include "host/job.h"
#include "host/segment.h"
#include "host/stalemate.h"
#include "processes.h"
#include "testing.h"

namespace jaxcoll::testing::stalemate_test {
namespace {

constexpr std::int64_t kPatienceNs = 1'000'000'000;
constexpr std::uint64_t kGroupOfAll = 1;

/// A call over some processes: those of one group id take part in the same ones.
struct WaitedFor {
  std::uint64_t group;
  std::uint64_t site;
  std::vector<std::size_t> members;  // processes
};

/// Processes that wait in calls, for as long as it says.
class Waiting {
 public:
  explicit Waiting(std::size_t num_processes)
      : host_(num_processes), used_(num_processes), now_ns_(NowNs()) {}

  void In(std::size_t process, const WaitedFor& call, std::int64_t for_ns = 2 * kPatienceNs) {
    const Session& session = *host_.job(process).session();
    Lane& lane = host_.segment().lane(session.seat(), used_[process]++);
    const CallName name{.group = call.group, .site = call.site, .occurrence = 3};
    lane.SetName(name, kCacheLine);  // wherever in the window
    lane.word = name.tag() << Lane::kProgressBits | 1;
    lane.text.Set("call " + std::to_string(call.site));
    for (const std::size_t member : call.members) {
      const std::int64_t number = kFirstProcess + static_cast<std::int64_t>(member);
      lane.members.Add(static_cast<std::size_t>(session.SeatOf(number)));
    }
    lane.waits_since_ns = now_ns_ - for_ns;
  }

  /// It is over for `process`, though others may still read.
  void Ended(std::size_t process, const WaitedFor& call) {
    In(process, call);
    Last(process).word = Last(process).word + 1;
    Last(process).waits_since_ns = 0;
  }

  /// `process` has ended it long ago, before the others came.
  void IsAheadOf(std::size_t process, const WaitedFor& call) {
    In(process, call, 0);
    Last(process).waits_since_ns = -(now_ns_ - 2 * kPatienceNs);
  }

  /// `process` has ended the last call of `other`, and is at another one since.
  void HasRead(std::size_t process, std::size_t other) {
    const std::size_t seat = host_.job(process).session()->seat();
    host_.segment().ended(seat, host_.job(other).session()->seat(), used_[other] - 1) =
        Last(other).word >> Lane::kProgressBits;
  }

  /// What `process` finds.
  std::string Found(std::size_t process, std::optional<std::uint64_t> group = std::nullopt) const {
    return FindStalemate(*host_.job(process).session(), group, now_ns_, kPatienceNs).text;
  }

 private:
  Lane& Last(std::size_t process) const {
    return host_.segment().lane(host_.job(process).session()->seat(), used_[process] - 1);
  }

  Host host_;
  std::vector<std::size_t> used_;
  std::int64_t now_ns_;
};

void DifferentCallsOfOneGroup(Context& context) {
  Waiting all(3);
  all.In(0, {kGroupOfAll, 11, {0, 1, 2}});
  all.In(1, {kGroupOfAll, 11, {0, 1, 2}});
  context.Expect(all.Found(0).empty(), "the third may come");
  all.In(2, {kGroupOfAll, 12, {0, 1, 2}});
  const std::string text =
      "process 42 waits in call 12, execution 3 of this call; process 41 (and 40) waits in call "
      "11, "
      "execution 3 of this call";
  for (std::size_t process = 0; process < 3; ++process) {
    context.Expect(all.Found(process, kGroupOfAll) == text, [&] { return all.Found(process); });
    context.Expect(all.Found(process) == text, "among the calls of all groups, too");
    context.Expect(all.Found(process, kGroupOfAll + 1).empty(), "another group");
  }
}

/// The same line of the same program: nothing but the devices, or their order, is another.
void TheSameCallOverOtherDevices(Context& context) {
  Waiting all(3);
  all.In(0, {kGroupOfAll, 11, {0, 1, 2}});
  all.In(1, {kGroupOfAll + 1, 11, {0, 1, 2}});
  all.In(2, {kGroupOfAll, 11, {0, 1, 2}});
  const std::string expected =
      "process 41 waits in call 11, execution 3 of this call, in group 2; process 42 (and 40) "
      "waits "
      "in call 11, execution 3 of this call, in group 1 (the groups differ in their devices, or in "
      "the order of them)";
  context.Expect(all.Found(0) == expected, [&] { return all.Found(0); });
  // Of two calls over the rows of one mesh their groups say nothing.
  Waiting rows(4);
  rows.In(0, {5, 11, {0, 2}});
  rows.In(2, {7, 12, {2, 3}});
  rows.In(3, {6, 11, {3, 1}});
  rows.In(1, {8, 12, {1, 0}});
  const std::string of_rows =
      "process 43 (and 40) waits in call 11, execution 3 of this call; process 42 (and 41) waits "
      "in "
      "call 12, execution 3 of this call";
  context.Expect(rows.Found(0) == of_rows, [&] { return rows.Found(0); });
}

void ACallThatAllHaveComeToGoesOn(Context& context) {
  Waiting both(2);
  both.In(0, {kGroupOfAll, 11, {0, 1}});
  both.In(0, {kGroupOfAll, 12, {0, 1}});
  both.In(1, {kGroupOfAll, 12, {0, 1}});
  context.Expect(both.Found(0).empty() && both.Found(1).empty(), "12 will end");
}

void WhoHasNotWaitedForLongMayGoOn(Context& context) {
  Waiting both(2);
  both.In(0, {kGroupOfAll, 11, {0, 1}});
  both.In(1, {kGroupOfAll, 12, {0, 1}}, kPatienceNs / 2);
  context.Expect(both.Found(0).empty() && both.Found(1).empty(), "patience");
}

/// It shows which call is the odd one.
void WhoWaitsWithThemIsNamedToo(Context& context) {
  Waiting all(4);
  all.In(0, {kGroupOfAll, 11, {0, 1, 2, 3}});
  all.In(1, {kGroupOfAll, 11, {0, 1, 2, 3}}, kPatienceNs / 2);
  all.In(2, {kGroupOfAll, 12, {0, 1, 2, 3}});
  all.In(3, {kGroupOfAll, 13, {0, 1, 2, 3}}, kPatienceNs / 2);  // may be on its way
  const std::string text =
      "process 42 waits in call 12, execution 3 of this call; process 41 (and 40) waits in call "
      "11, execution 3 of this call";
  context.Expect(all.Found(0, kGroupOfAll) == text, [&] { return all.Found(0, kGroupOfAll); });
  context.Expect(all.Found(1, kGroupOfAll).empty(), "who hasn't waited for long finds nothing");
}

/// Such as a process that was stopped in a call for which the others did not wait to the end.
void WhoHasEndedACallHasComeToIt(Context& context) {
  Waiting both(2);
  both.In(0, {kGroupOfAll, 11, {0, 1}});
  both.Ended(1, {kGroupOfAll, 11, {0, 1}});
  both.In(1, {kGroupOfAll, 12, {0, 1}});
  context.Expect(both.Found(0).empty() && both.Found(1).empty(), "0 goes on, and comes to 12");
}

/// As if it waited there still, among the calls of one group, to which all come in one order.
void WhoIsAheadOfACallIsInIt(Context& context) {
  Waiting both(2);
  both.IsAheadOf(0, {kGroupOfAll, 11, {1}});
  context.Expect(both.Found(0, kGroupOfAll).empty(), "1 may come");
  both.In(1, {kGroupOfAll, 12, {0}});
  const std::string text =
      "process 41 waits in call 12, execution 3 of this call; process 40 has ended, before others "
      "came to it, call 11, execution 3 of this call";
  context.Expect(both.Found(1, kGroupOfAll) == text, [&] { return both.Found(1, kGroupOfAll); });
  context.Expect(both.Found(1).empty(), "0 may come to 12");
  both.HasRead(1, 0);
  context.Expect(both.Found(1, kGroupOfAll).empty(), "1 has come to 11 before");
}

/// Its lane is not free yet where the process found its next call before.
void ACallThatIsOverHoldsNobodyBack(Context& context) {
  Waiting both(2);
  both.IsAheadOf(0, {kGroupOfAll, 10, {1}});
  both.HasRead(1, 0);
  both.In(0, {kGroupOfAll, 11, {0, 1}});
  both.In(1, {kGroupOfAll, 12, {0, 1}});
  const std::string text =
      "process 41 waits in call 12, execution 3 of this call; process 40 waits in call 11, "
      "execution 3 of this call";
  for (std::size_t process = 0; process < 2; ++process) {
    context.Expect(both.Found(process, kGroupOfAll) == text,
                   [&] { return both.Found(process, kGroupOfAll); });
  }
}

void TheOddOneOutComesFirst(Context& context) {
  const std::string text = DoingsText(
      "process", {{0, "waits in A"}, {1, "waits in A"}, {2, "waits in B"}, {3, "waits in A"}});
  context.Expect(text == "process 2 waits in B; process 0 (and 1, 3) waits in A", text);
  const std::string tie = DoingsText("device", {{0, "waits in A"}, {1, "waits in B"}});
  context.Expect(tie == "device 0 waits in A; device 1 waits in B", tie);
}

/// What stands after them in an error is not lost.
void ManyCallsLeaveRoomInACause(Context& context) {
  std::vector<std::pair<std::int64_t, std::string>> doings;
  for (std::int64_t i = 0; i < 256; ++i) {
    doings.emplace_back(i, "waits in " + std::to_string(i) + std::string(1000, 'x'));
  }
  const std::size_t bytes = DoingsText("process", doings).size();
  context.Expect(bytes > 10'000 && bytes + 4096 < Segment::kMaxCauseBytes, std::to_string(bytes));
}

/// Python could not read them.
void NoCharacterIsCut(Context& context) {
  const std::string letter = "\u20ac";  // of three bytes
  std::string letters;
  for (std::size_t i = 0; i < Segment::kMaxCauseBytes; ++i) {
    letters += letter;
  }
  for (const std::string before : {"", "x", "xx"}) {
    const std::string text = DoingsText("process", {{0, before + letters}});
    const std::size_t begin = text.find(letter);
    const std::size_t end = text.rfind(" ...");
    context.Expect(end != std::string::npos && (end - begin) % letter.size() == 0, before);
  }
}

/// 0 waits for 1 in the first group, 1 for 2 in the second, 2 for 0 in the third.
void ACircleOfGroups(Context& context) {
  for (const bool is_closed : {true, false}) {
    Waiting all(4);
    all.In(0, {1, 11, {0, 1}});
    all.In(1, {2, 12, {1, 2}});
    all.In(2, {3, 13, {2, is_closed ? std::size_t{0} : 3}});
    context.Expect(all.Found(0).empty() != is_closed, [&] { return all.Found(0); });
    context.Expect(all.Found(0, 1).empty(), "one group alone does not show it");
    context.Expect(all.Found(3).empty(), "who does not wait");
  }
}

void OneWayOutIsEnough(Context& context) {
  Waiting all(3);
  all.In(0, {1, 11, {0, 1}});
  all.In(1, {2, 12, {0, 1, 2}});
  context.Expect(!all.Found(0).empty(), "0 and 1 wait for each other");
  all.In(0, {3, 13, {0, 2}});
  context.Expect(all.Found(0).empty() && all.Found(1).empty(), "2 may come to 13");
  all.In(2, {4, 14, {1, 2}});
  context.Expect(!all.Found(2).empty() && !all.Found(0).empty(), "2 waits for 1");
}

const Suite suite("stalemate", {{"DifferentCallsOfOneGroup", DifferentCallsOfOneGroup},
                                {"TheSameCallOverOtherDevices", TheSameCallOverOtherDevices},
                                {"ACallThatAllHaveComeToGoesOn", ACallThatAllHaveComeToGoesOn},
                                {"WhoHasNotWaitedForLongMayGoOn", WhoHasNotWaitedForLongMayGoOn},
                                {"WhoWaitsWithThemIsNamedToo", WhoWaitsWithThemIsNamedToo},
                                {"WhoHasEndedACallHasComeToIt", WhoHasEndedACallHasComeToIt},
                                {"WhoIsAheadOfACallIsInIt", WhoIsAheadOfACallIsInIt},
                                {"ACallThatIsOverHoldsNobodyBack", ACallThatIsOverHoldsNobodyBack},
                                {"TheOddOneOutComesFirst", TheOddOneOutComesFirst},
                                {"ManyCallsLeaveRoomInACause", ManyCallsLeaveRoomInACause},
                                {"NoCharacterIsCut", NoCharacterIsCut},
                                {"ACircleOfGroups", ACircleOfGroups},
                                {"OneWayOutIsEnough", OneWayOutIsEnough}});

}  // namespace
}  // namespace jaxcoll::testing::stalemate_test

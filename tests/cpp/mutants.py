"""Breaks the engine's rules one at a time and looks whether the test of the rule fails.

    python tests/cpp/mutants.py [part of a rule's text]

Each mutant is one edit of a copy of csrc, in build/mutants, and names the test that has to notice:
by failing, by crashing or by not coming to an end. Ends with 1 if a mutant gets past its test, or
a test fails without one. An edit whose text csrc no longer holds is an error: update it here.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
COPY = ROOT / "build" / "mutants"
# A test that takes longer than this with a mutant, and five times as long as without, hangs.
LIMIT_S = 15.0


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A rule, the edit that breaks it, and the test that must notice: suite, name and variables."""

    rule: str
    file: str
    old: str
    new: str
    test: tuple[str, ...]


# Whose communicators are non-blocking ones.
OLDER_NCCL = "FAKE_NCCL_VERSION=22707"

KEY_EQUALITY = "friend bool operator==(const Key&, const Key&) = default;"

MUTANTS = [
    # ---- Identity: which call meets which --------------------------------------------------------
    Mutant(
        "executions are told apart by the run",
        "csrc/host/meeting.h",
        KEY_EQUALITY,
        "friend bool operator==(const Key& a, const Key& b) { return a.iteration == b.iteration; }",
        ("failing", "TheNextRunWorks"),
    ),
    Mutant(
        "executions are told apart by the iteration",
        "csrc/host/meeting.h",
        KEY_EQUALITY,
        "friend bool operator==(const Key& a, const Key& b) { return a.run == b.run; }",
        ("meeting", "OtherIterationsAreRefused"),
    ),
    Mutant(
        "a program of one device is asked each time where it runs",
        "csrc/host/call_site.h",
        "at < members_.size() && !is_of_one_device_;",
        "at < members_.size();",
        ("meeting", "DevicesAreKnownWhereProgramsCantMove"),
    ),
    Mutant(
        "each lane has a place of its own for the calls that others have ended",
        "csrc/host/segment.h",
        "return std::bit_ceil(RoundedUp(num_lanes, kEndedInLine) / kEndedInLine);",
        "return RoundedUp(num_lanes, kEndedInLine) / kEndedInLine;",
        ("segment", "PlacesOfEndedCallsDiffer"),
    ),
    Mutant(
        "iterations are counted from the start of each run",
        "csrc/host/call_site.cc",
        "if (member.iteration < 0 || member.run.load(std::memory_order_relaxed) != run) {",
        "if (member.iteration < 0) {\n    member.run = run;",
        ("failing", "TheNextRunWorks"),
    ),
    Mutant(
        "clones of one call are sites of their own, though they share the site id",
        "csrc/host/call_site.cc",
        "visit.meeting = member.meeting;",
        """static std::mutex mutex;
  static auto* const firsts = new std::unordered_map<std::uint64_t, CallSite*>();
  const std::lock_guard<std::mutex> lock(mutex);
  CallSite* const first = firsts->try_emplace(id_, this).first->second;
  visit.meeting = first->members_[first->At(logical_id)].meeting;""",
        ("meeting", "ClonesStayApart"),
    ),
    Mutant(
        "a process looks for its members among its own",
        "csrc/host/call_site.h",
        "static_cast<std::size_t>(logical_id) - static_cast<std::size_t>(first_member_)",
        "static_cast<std::size_t>(logical_id)",
        ("exchange", "MembersAreThoseOfTheProcess"),
    ),
    Mutant(
        "blocks that lie together are asked for as one, to the end of the last",
        "csrc/core/footprint.h",
        "std::max(last.bytes, static_cast<std::size_t>(begin - last.begin) + bytes)",
        "static_cast<std::size_t>(begin - last.begin) + bytes",
        ("pooled", "BlocksThatFollowEachOtherAreOne"),
    ),
    Mutant(
        "a process that ends while it is looked at ends nobody else",
        "csrc/host/process_stat.cc",
        "  std::getline(file, text, '\\0');",
        "  text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());",
        ("segment", "StatsOfWhatIsGone"),
    ),
    Mutant(
        "groups meet for themselves",
        "csrc/host/call_site.cc",
        "member.meeting = meetings_.back().get();",
        "member.meeting = meetings_.front().get();",
        ("meeting", "GroupsOfAMesh"),
    ),
    Mutant(
        "a chunk lives as long as its last object",
        "csrc/core/pooled.cc",
        "if (--chunk->num_objects > 0) {",
        "if (--chunk->num_objects > 1) {",
        ("pooled", "ObjectsKeepWhatTheyHold"),
    ),
    Mutant(
        "ticks are counted for a moment only, at their length",
        "csrc/core/quick_clock.cc",
        "kFreshNs = 20'000;",
        "kFreshNs = 20'000'000;",
        ("quick_clock", "ItIsTheTime"),
    ),
    Mutant(
        "ticks have the length that was measured",
        "csrc/core/quick_clock.cc",
        "0.999 * tick *",
        "1.5 * tick *",
        ("quick_clock", "ItIsTheTime"),
    ),
    Mutant(
        "a meeting that is done is opened anew, also for run 0",
        "csrc/host/meeting.cc",
        "if ((state_ == State::kDone || !(key_ == key)) && !Open(key, now_ns, lock)) {",
        "if (!(key_ == key) && !Open(key, now_ns, lock)) {",
        ("failing", "RunZeroHasADeadline"),
    ),
    Mutant(
        "overlapping executions are refused",
        "csrc/host/meeting.cc",
        "    if (failure == nullptr) {\n      return false;",
        "    if (false) {\n      return false;",
        ("meeting", "OverlappingExecutionsAreRefused"),
    ),
    Mutant(
        "a rank's pointers count once it is let in",
        "csrc/host/meeting.h",
        "    ranks_[rank].operands[i] = data;",
        "    ranks_[rank].operands[i] = data;\n    operands_[i * num_ranks_ + rank] = data;",
        ("meeting", "OverlappingExecutionsAreRefused"),
    ),
    Mutant(
        "a call whose run has failed gives way to the next run",
        "csrc/host/meeting.cc",
        "state_ == State::kOpen ? Watchdog::Get().FailureOf(key_.run) : nullptr;",
        "std::shared_ptr<const Status>();",
        ("failing", "TheNextRunNeedNotWaitForALook"),
    ),
    # ---- Waiting: who resumes programs, and where ------------------------------------------------
    Mutant(
        "a thread stays for a moment only",
        "csrc/host/runners.h",
        "kStayNs = 20'000'000;",
        "kStayNs = 20'000'000'000'000;",
        ("meeting", "NoThreadStaysForEver"),
    ),
    Mutant(
        "threads stay where programs compute",
        "csrc/host/meeting.cc",
        "now_ns - going_on.since_ns > going_on.long_ns",
        "false",
        ("meeting", "ThreadsStayWhereProgramsCompute"),
    ),
    Mutant(
        "programs are resumed by runners only, never by the thread that finds them ready",
        "csrc/host/runners.cc",
        "  const Pace::Kind kind = pace.kind();\n",
        """  for (Task* task = programs.head_; task != nullptr;) {
    Task* const next = task->next_;
    task->Run();
    task = next;
  }
  return;
  const Pace::Kind kind = pace.kind();
""",
        ("runners", "ContinuationsMayBlockOnEachOther"),
    ),
    Mutant(
        "a standby takes over for a runner that does not come back",
        "csrc/host/runners.cc",
        "  if (!watching_) {\n    watching_ = true;",
        "  if (false) {\n    watching_ = true;",
        ("runners", "AProgramMayBlockOnALaterOne"),
    ),
    Mutant(
        "the standby makes runners where all are blocked",
        "csrc/host/runners.cc",
        "while (num_overdue > num_woken_ && runners_.size() < kMaxRunners && AddRunner()) {",
        "while (false) {",
        ("runners", "ManyProgramsMayBlockAtOnce"),
    ),
    Mutant(
        "runners flush denormals, as XLA's threads do",
        "csrc/host/runners.cc",
        "  FlushDenormalsOnThisThread();\n",
        "",
        ("runners", "ProgramsResumeWithDenormalsFlushed"),
    ),
    Mutant(
        "nobody goes on before the helpers are done",
        "csrc/host/meeting.cc",
        "  if (is_done()) {\n",
        "  if (true) {\n",
        ("meeting", "HelpersFinishBeforeAnybodyGoesOn"),
    ),
    Mutant(
        "whoever finishes last finishes the call, also a helper",
        "csrc/host/meeting.cc",
        "  if (meeting->RunChunks()) {\n    meeting->Finish();\n  }",
        "  meeting->RunChunks();",
        ("meeting", "HelpersFinishBeforeAnybodyGoesOn"),
    ),
    Mutant(
        "a chunk is taken by one thread",
        "csrc/host/meeting.cc",
        "while (!chunks_.compare_exchange_weak(chunks, chunks + 1, std::memory_order_acq_rel,\n"
        "                                          std::memory_order_relaxed));",
        "while (chunks_.store(chunks + 1), false);",
        ("meeting", "EveryChunkRunsOnce"),
    ),
    Mutant(
        "the last rank knows the end of its call, even where the next one is open already",
        "csrc/host/meeting.cc",
        "return num_done_ != num_done_before; };",
        "return state_ == State::kDone; };",
        ("meeting", "TheLastRankMayLeaveLate"),
    ),
    Mutant(
        "chunks run as soon as the ranks that they need have come",
        "csrc/host/meeting.cc",
        "      AddReadyChunks();\n",
        "      if (is_last) {\n        AddReadyChunks();\n      }\n",
        ("meeting", "ChunksRunBeforeTheLastRankComes"),
    ),
    Mutant(
        "a rank that leaves looks for what came while it was at work",
        "csrc/host/meeting.cc",
        "      if (AreChunksReady()) {",
        "      if (false) {",
        ("meeting", "ChunksRunBeforeTheLastRankComes"),
    ),
    # ---- Failing ---------------------------------------------------------------------------------
    Mutant(
        "a wait ends at its deadline",
        "csrc/host/call_site.cc",
        "if (waited_ns >= timeout_ns) {",
        "if (waited_ns >= 100 * timeout_ns) {",
        ("failing", "ADeadlineNamesWhoCameAndWhoDidNot"),
    ),
    Mutant(
        "the error tells who came from who did not",
        "csrc/host/call_site.cc",
        "(call.arrived[i] ? added.arrived : added.missing)",
        "(call.arrived[i] ? added.missing : added.arrived)",
        ("failing", "ADeadlineNamesWhoCameAndWhoDidNot"),
    ),
    Mutant(
        "a call whose data moves never fails",
        "csrc/host/meeting.cc",
        "  if (state_ != State::kOpen || !(key_ == key)) {\n    return false;",
        "  if (state_ == State::kDone || !(key_ == key)) {\n    return false;",
        ("failing", "OnlyTheOpenCallThatWasLookedAtFails"),
    ),
    Mutant(
        "only the call that was looked at fails",
        "csrc/host/meeting.cc",
        "  if (state_ != State::kOpen || !(key_ == key)) {\n    return false;",
        "  if (state_ != State::kOpen) {\n    return false;",
        ("failing", "OnlyTheOpenCallThatWasLookedAtFails"),
    ),
    Mutant(
        "ranks get their error when the chunks that run have ended",
        "csrc/host/meeting.cc",
        "std::memory_order_acq_rel) != others) {",
        "std::memory_order_acq_rel) > num_chunks_) {",
        ("failing", "AnEarlyStartFailsWhenItsChunksHaveEnded"),
    ),
    Mutant(
        "no chunk of a failed call is begun",
        "csrc/host/meeting.cc",
        "chunks_.exchange(0, std::memory_order_acq_rel) & kNextChunk;",
        "chunks_.load() & kNextChunk;",
        ("failing", "AnEarlyStartFailsWhenItsChunksHaveEnded"),
    ),
    Mutant(
        "the next call waits for the chunks of a failed one",
        "csrc/host/meeting.cc",
        "      ended_.wait(lock, [this] { return state_ != State::kFailing; });\n",
        "      EndFailedCall();\n",
        ("failing", "AnEarlyStartFailsWhenItsChunksHaveEnded"),
    ),
    Mutant(
        "a late rank is turned away and touches nothing",
        "csrc/host/meeting.cc",
        "    if (state_ == State::kFailed || state_ == State::kFailing) {\n      return",
        "    if (false) {\n      return",
        ("failing", "ALateRankIsTurnedAwayByTheMeetingItself"),
    ),
    Mutant(
        "later calls of a failed run fail without meeting",
        "csrc/host/meeting.cc",
        "failure = Watchdog::Get().FailureOf(key.run); failure != nullptr) {\n    return",
        "failure = Watchdog::Get().FailureOf(key.run); false) {\n    return",
        ("failing", "CallsOfAFailedRunFailWithoutMeeting"),
    ),
    Mutant(
        "a failure ends the other waits of its run",
        "csrc/host/call_site.cc",
        "FailureOf(call.key.run); cause != nullptr) {",
        "FailureOf(call.key.run); false) {",
        ("failing", "AFailureEndsTheOtherMeetingsOfItsRunAtOnce"),
    ),
    Mutant(
        "a deadline fails its run, before any rank is told",
        "csrc/host/meeting.cc",
        "  Watchdog::Get().FailRun(key.run, failure);\n",
        "",
        ("failing", "ADeadlineIsTheCauseOfItsRun"),
    ),
    Mutant(
        "a failure spreads without waiting for the watchdog's next look",
        "csrc/host/watchdog.cc",
        "  look_.store(true, std::memory_order_release);\n",
        "",
        ("failing", "AFailureSpreadsWithoutWaitingForALook"),
    ),
    Mutant(
        "a new limit counts for waits in progress",
        "csrc/host/watchdog.cc",
        "call.site->Check(call, calls, now_ns, timeout_ns_.load(std::memory_order_relaxed));",
        "static const std::int64_t first_ns = timeout_ns;\n"
        "      call.site->Check(call, calls, now_ns, first_ns);",
        ("failing", "ANewLimitCountsForWaitsInProgress"),
    ),
    Mutant(
        "devices that wait for one another are told",
        "csrc/host/device_stalemate.cc",
        "  if (!is_idle) {",
        "  if (true) {",
        ("device_stalemate", "DifferentCallsFailAll"),
    ),
    Mutant(
        "a device that has been nowhere is known by its run",
        "csrc/host/watchdog.cc",
        "    Locate(calls);\n",
        "",
        ("device_stalemate", "DifferentCallsFailAll"),
    ),
    Mutant(
        "devices that compute may be on their way",
        "csrc/host/device_stalemate.cc",
        "num_busy_ <= kMostBusyLooks;",
        "true;",
        ("device_stalemate", "NotWhileAnythingComputes"),
    ),
    Mutant(
        "and those in a callback",
        "csrc/host/device_stalemate.cc",
        "box.header().callbacks.load(std::memory_order_relaxed) == 0 &&",
        "true &&",
        ("device_stalemate", "NotInACallback"),
    ),
    Mutant(
        "a device whose run has failed comes to no other",
        "csrc/host/device_stalemate.cc",
        "    waits.push_back({.waiter = device, .missing = {device}});\n",
        "",
        ("device_stalemate", "WhoWaitsForAFailedRankIsToldWhy"),
    ),
    Mutant(
        "nor does one where a callback has raised",
        "csrc/host/device_stalemate.cc",
        "!Watchdog::Get().CallbackErrorFor(opened_ns).empty() &&",
        "false &&",
        ("device_stalemate", "WhoWaitsForARaisedCallbackIsToldWhy"),
    ),
    Mutant(
        "which is none that is in a call",
        "csrc/host/device_stalemate.cc",
        "return there.device == place.device; });",
        "return there.device < -1; });",
        ("device_stalemate", "WhoWaitsForARaisedCallbackIsToldWhy"),
    ),
    Mutant(
        "one that comes after the failure may wait for it",
        "csrc/host/device_stalemate.cc",
        "at(Moment::kResumed) > opened_ns",
        "at(Moment::kResumed) != 0",
        ("device_stalemate", "WhoComesAfterAFailureWaits"),
    ),
    Mutant(
        "nor one that is excused",
        "csrc/host/device_stalemate.cc",
        "!box.IsExcused(now_ns, compile_timeout_ns) &&",
        "true &&",
        ("device_stalemate", "NotWhileItIsExcused"),
    ),
    # ---- Across processes ------------------------------------------------------------------------
    Mutant(
        "a step waits until what it reads is there",
        "csrc/host/exchange.h",
        "return step.phase > 0 ? End(step.phase - 1, round(step)) : 0;",
        "return 0;",
        ("exchange", "NoStepReadsOrWritesTooEarly"),
    ),
    Mutant(
        "a step waits until what it overwrites was read",
        "csrc/host/exchange.h",
        "return overwrites ? End(step.phase + 1, round(step) - kRoundsInWindow) : 0;",
        "return 0;",
        ("exchange", "NoStepReadsOrWritesTooEarly"),
    ),
    Mutant(
        "steps wait for others",
        "csrc/host/exchange.cc",
        "    peer.needed = (peer.reads >> step_.phase & 1) != 0 ? left : 0;",
        "    peer.needed = (peer.reads >> step_.phase & 1) != 0 ? (left > 0 ? 1U : 0U) : 0;",
        ("exchange", "Reductions"),
    ),
    Mutant(
        "a step waits for those alone whose data it reads",
        "csrc/host/exchange.cc",
        "    peer.needed = (peer.reads >> step_.phase & 1) != 0 ? left : 0;",
        "    peer.needed = left;",
        ("ahead", "NobodyWaitsForThoseItGetsNothingFrom"),
    ),
    Mutant(
        "a buffer that others read stays until they have",
        "csrc/host/direct_route.cc",
        "    return Reads(1, process, reader);",
        "    return false;",
        ("ahead", "ABufferThatOthersReadStays"),
    ),
    Mutant(
        "a sum stays until all have read it",
        "csrc/host/direct_reduce.h",
        "num_phases() const override { return 4; }",
        "num_phases() const override { return 3; }",
        ("exchange", "BuffersStayUntilOthersHaveRead"),
    ),
    Mutant(
        "what is summed stays until all have read it",
        "csrc/host/direct_reduce.h",
        "num_phases() const override { return 3; }",
        "num_phases() const override { return 2; }",
        ("exchange", "BuffersStayUntilOthersHaveRead"),
    ),
    Mutant(
        "few calls are left ahead of the others",
        "csrc/host/job.cc",
        "if (is_ahead && !HasRoomAhead() && !SeeEnded(last)) {",
        "if (false) {",
        ("ahead", "OtherCallsHaveLanes"),
    ),
    Mutant(
        "the end of any call makes room for another one ahead",
        "csrc/host/job.cc",
        "if (!SeeEnded(left(i)) && left(i).is_ahead) {",
        "if (left(i).is_ahead) {",
        ("ahead", "ARootWaitsForTheOldestCall"),
    ),
    Mutant(
        "processes that share cores go round less of a window, and a root",
        "csrc/host/exchange.cc",
        "return window_bytes / (is_root ? kRootSpans : is_crowded ? kCrowdedSpans : 1);",
        "return window_bytes;",
        ("exchange", "CallsGoRoundTheirWindow"),
    ),
    Mutant(
        "calls copy the way that took them less time",
        "csrc/host/copy_trials.cc",
        "if (way_ == kPlain || IsBetter(",
        "if (way_ == kPlain || !IsBetter(",
        ("copy_trials", "CallsKeepToTheQuickestWay"),
    ),
    Mutant(
        "calls try again where what they take has changed",
        "csrc/host/copy_trials.cc",
        "(since_ >= pause_ && HasChanged())",
        "false",
        ("copy_trials", "WhatChangesIsTriedAgain"),
    ),
    Mutant(
        "calls that tried without a change wait twice as long",
        "csrc/host/copy_trials.cc",
        "std::min(2 * pause_, kMostPause)",
        "kLeastPause",
        ("copy_trials", "ChangesThatChangeNothingAreForgotten"),
    ),
    Mutant(
        "a sum that goes past the caches is left, too",
        "csrc/host/reduce_route.cc",
        "Copy(left, targets[0], piece.bytes, processes.copies.leave);",
        "",
        ("copy_trials", "AllWaysMoveTheSame"),
    ),
    Mutant(
        "each size of operands has copy costs of its own",
        "csrc/host/copy_costs.h",
        "operand_bytes >= kBytes[i] * 2",
        "operand_bytes >= kBytes[i] * 4",
        ("copy_costs", "EachSizeHasCostsOfItsOwn"),
    ),
    Mutant(
        "lanes that calls ahead needed are given back",
        "csrc/host/job.cc",
        "if (num_left_ > kFewLanes && SeeEnded(left(0))) {",
        "if (false) {",
        ("ahead", "LanesThatWentAheadAreLeftAgain"),
    ),
    Mutant(
        "what others have ended is heard with their next call",
        "csrc/host/exchange.cc",
        "      session_->HearEnded(peer.seat, lane);\n",
        "",
        ("exchange", "LanesGoRoundByWhatIsHeard"),
    ),
    Mutant(
        "a call has not ended before its process has",
        "csrc/host/exchange.cc",
        "    session_->TellEnded(mine);\n",
        "    for (const Peer& peer : peers_) session_->NoteEnded(peer.seat, tag_);\n"
        "    session_->TellEnded(mine);\n",
        ("open_calls", "NobodyOverwritesWhatOthersRead"),
    ),
    Mutant(
        "who waits for the others to end a call is woken",
        "csrc/host/exchange.cc",
        "        Ring(peer);\n      } else {",
        "      } else {",
        ("ahead", "ARootIsWoken"),
    ),
    Mutant(
        "a call that was left before others came is shown",
        "csrc/host/call_site.cc",
        "    meetings_[group]->ShowLeft(now_ns);\n",
        "",
        ("ahead", "ADifferentCallIsNamedOnAll"),
    ),
    Mutant(
        "different calls in one place are found though nobody waits",
        "csrc/host/stalemate.cc",
        "return call.is_left && call.has_waited; };",
        "return call.has_waited && false; };",
        ("ahead", "DifferentRootsAreFound"),
    ),
    Mutant(
        "calls that were left in other places may yet meet",
        "csrc/host/stalemate.cc",
        "return has_left(left) && left.name.place() == call.name.place() &&",
        "return has_left(left) &&",
        ("ahead", "RootsInOtherPlacesMayMeet"),
    ),
    Mutant(
        "who has no lane of a call any more may have come to it",
        "csrc/host/stalemate.cc",
        "!session.HasBegun(left.name);",
        "!HasComeTo(CallsOf(segment, session.seat(), group, until_ns), left.name);",
        ("ahead", "OwnersInTurnAreNoDifference"),
    ),
    Mutant(
        "who waits in the calls of those that are stuck is named with them",
        "csrc/host/stalemate.cc",
        "return call.waits && HasComeTo(theirs, call.name);",
        "return call.waits && HasComeTo({}, call.name);",
        ("stalemate", "WhoWaitsWithThemIsNamedToo"),
    ),
    Mutant(
        "who has ended a call has come to it",
        "csrc/host/stalemate.cc",
        "if (lane.members.Has(member) && !has_ended) {",
        "if (lane.members.Has(member)) {",
        ("stalemate", "WhoIsAheadOfACallIsInIt"),
    ),
    Mutant(
        "nobody waits in a call that is over for all",
        "csrc/host/stalemate.cc",
        "if (since_ns < 0 && !call.is_left) {",
        "if (false) {",
        ("stalemate", "ACallThatIsOverHoldsNobodyBack"),
    ),
    Mutant(
        "a call that was left says nothing about other groups",
        "csrc/host/stalemate.cc",
        "since_ns < 0 && group.has_value() ? -since_ns : since_ns;",
        "since_ns < 0 ? -since_ns : since_ns;",
        ("stalemate", "WhoIsAheadOfACallIsInIt"),
    ),
    Mutant(
        "own blocks are multiplied while others are on their way",
        "csrc/host/exchange.cc",
        "if (phase == 0) {\n      route_->Meanwhile(round, local_);",
        "if (phase == 1) {\n      route_->Meanwhile(round, local_);",
        ("matmul", "BlocksAreMultipliedAsTheyCome"),
    ),
    Mutant(
        "blocks are multiplied as they come",
        "csrc/host/exchange.cc",
        "!takes || TakeWhatCame(round);",
        "!takes || !all_have || TakeWhatCame(round);",
        ("matmul", "BlocksAreMultipliedAsTheyCome"),
    ),
    Mutant(
        "a block is multiplied once",
        "csrc/host/exchange.cc",
        "peer.rounds_taken <= round && peer",
        "peer",
        ("matmul", "BlocksAreMultipliedAsTheyCome"),
    ),
    Mutant(
        "a term of a sum needs all before it",
        "csrc/matmul/block_matmul.cc",
        "    while (count_ < kMaxRanks && came_.test(count_)) {\n      ++count_;\n    }\n",
        "    ++count_;\n",
        ("matmul", "ProductsAreMadeBeforeALateRankComes"),
    ),
    Mutant(
        "terms of a sum are added one after the other",
        "csrc/matmul/block_matmul.cc",
        "    num_added.wait(done, std::memory_order_acquire);",
        "    break;",
        ("matmul", "TermsAreAddedInOrder"),
    ),
    Mutant(
        "blocks of ranks in one process are multiplied as they come",
        "csrc/matmul/block_matmul.h",
        "[[nodiscard]] bool starts_early() const override { return true; }",
        "[[nodiscard]] bool starts_early() const override { return false; }",
        ("matmul", "ProductsAreMadeBeforeALateRankComes"),
    ),
    Mutant(
        "what copies cost does not decide on a product's bits",
        "csrc/matmul/matmul_work.cc",
        "if (options.can_read_peers && DirectMatmul",
        "if (options.copy_costs.reading < 2 && DirectMatmul",
        ("matmul", "LargeBlocksAreReadWhateverThatCosts"),
    ),
    Mutant(
        "a block stays until all have read it",
        "csrc/matmul/direct_matmul.h",
        "num_phases() const override { return 3; }",
        "num_phases() const override { return 2; }",
        ("matmul", "LargeBlocksAreMultipliedAsTheyCome"),
    ),
    Mutant(
        "blocks of few rows are multiplied together",
        "csrc/matmul/joined_matmul.cc",
        "run * layout.inner * layout.columns >= kArrangedProducts;",
        "false;",
        ("matmul", "FewRowsAreMultipliedTogether"),
    ),
    Mutant(
        "a BLAS takes one thread",
        "csrc/matmul/blas.cc",
        "Functions().set_num_threads(1);",
        "",
        ("matmul", "ABlasTakesOneThread"),
    ),
    Mutant(
        "rounds take turns in a window",
        "csrc/host/copy_route.cc",
        "return RoundBegin(round, round_bytes()) + position * piece_bytes_;",
        "return position * piece_bytes_;",
        ("exchange", "Copies"),
    ),
    Mutant(
        "large calls go round their window",
        "csrc/host/job.cc",
        "  next = begin + bytes;",
        "  next = begin;",
        ("exchange", "CallsGoRoundTheirWindow"),
    ),
    Mutant(
        "others read where a call begins in its window",
        "csrc/host/exchange.cc",
        "      peer.begin = lane.begin();",
        "",
        ("exchange", "CallsGoRoundTheirWindow"),
    ),
    Mutant(
        "what a window holds is read before it is overwritten",
        "csrc/host/exchange.h",
        "round(step) >= kRoundsInWindow;",
        "round(step) > kRoundsInWindow;",
        ("exchange", "NoStepReadsOrWritesTooEarly"),
    ),
    Mutant(
        "a process's ranks have places of their own in its window",
        "csrc/host/reduce_route.cc",
        "(owner * members_.most_ranks() + position) * chunk_bytes_;",
        "(owner * members_.most_ranks()) * chunk_bytes_;",
        ("exchange", "Reductions"),
    ),
    Mutant(
        "calls are told apart by their number",
        "csrc/host/job.cc",
        "turn.occurrences->store(turn.occurrence, std::memory_order_relaxed);",
        "",
        ("exchange", "Reductions"),
    ),
    Mutant(
        "calls are told apart by their group",
        "csrc/host/exchange.cc",
        ".group = group_,",
        ".group = 0,",
        ("open_calls", "GroupsOfAMesh"),
    ),
    Mutant(
        "calls are told apart by their site",
        "csrc/host/exchange.cc",
        ".site = site_,",
        ".site = 0,",
        ("exchange", "Reductions"),
    ),
    Mutant(
        "clones count together",
        "csrc/host/exchange.cc",
        "turn_.occurrences = &session_->Occurrences(group_, site_);",
        "turn_.occurrences =\n"
        "        &session_->Occurrences(group_, reinterpret_cast<std::uintptr_t>(this) >> 6);",
        ("open_calls", "ClonesShareTheirCount"),
    ),
    Mutant(
        "a lane is kept while others read",
        "csrc/host/job.cc",
        "return HasEnded(seat, left.lane, left.tag);",
        "return HasEnded(seat, left.lane, left.tag) || true;",
        ("open_calls", "NobodyOverwritesWhatOthersRead"),
    ),
    Mutant(
        "lanes are given to those that came first",
        "csrc/host/job.cc",
        "if (turn.ticket != next_served_) {",
        "if (false) {",
        ("open_calls", "MoreOpenCallsThanLanes"),
    ),
    Mutant(
        "a call that waits for others gets a thread, though all are busy",
        "csrc/host/runners.cc",
        "  if (num_idle_ == 0) {\n    StartWatch();",
        "  if (false) {\n    StartWatch();",
        ("open_calls", "OpenCallsInAnyOrder"),
    ),
    Mutant(
        "who sleeps is woken",
        "csrc/host/exchange.cc",
        "    if (peer.watches) {\n      Ring(peer);",
        "    if (false) {\n      Ring(peer);",
        ("open_calls", "SleepersAreWoken"),
    ),
    Mutant(
        "a wait for other processes ends at its deadline",
        "csrc/host/exchange_failing.cc",
        "if (timeout_ns < 0 || waited_ns < timeout_ns) {",
        "if (timeout_ns < 0 || waited_ns < 100 * timeout_ns) {",
        ("exchange_failing", "AProcessThatNeverComesIsNamed"),
    ),
    Mutant(
        "who compiles is waited for",
        "csrc/host/exchange_failing.cc",
        "  if (session_->IsAnyoneExcused(now_ns, names_.compile_timeout_ns())) {",
        "  if (false) {",
        ("exchange_failing", "WhoCompilesIsWaitedFor"),
    ),
    Mutant(
        "and has all of the time anew after that",
        "csrc/host/exchange_failing.cc",
        "std::max(since_ns, excused_ns_)",
        "since_ns",
        ("exchange_failing", "WhoCompilesIsWaitedFor"),
    ),
    Mutant(
        "stacks are not read while they are written",
        "csrc/host/black_box.cc",
        "    if (version % 2 == 0 && stack_->version.load(std::memory_order_relaxed) == version) {",
        "    if (version + 1 > 0) {",
        ("black_box", "StacksAreConsistent"),
    ),
    Mutant(
        "a call that failed was not moved",
        "csrc/host/meeting.cc",
        "      if (failure_ == nullptr) {\n        rank.resumption.entry->Set(Moment::kMoved",
        "      if (true) {\n        rank.resumption.entry->Set(Moment::kMoved",
        ("exchange_failing", "AFailedCallIsRecordedAsOne"),
    ),
    Mutant(
        "different calls of all processes fail",
        "csrc/host/exchange_failing.cc",
        "if (waited_ns < kMismatchNs) {",
        "if (true) {",
        ("exchange_failing", "DifferentCallsFailBoth"),
    ),
    Mutant(
        "only where all wait",
        "csrc/host/stalemate.cc",
        "      if (!call.has_waited) {",
        "      if (false) {",
        ("exchange_failing", "WaitsOfAnyLengthAreNoMismatch"),
    ),
    Mutant(
        "only where no call is common to all",
        "csrc/host/stalemate.cc",
        "        if (!HasComeTo(by_seat[member], call.name)) {",
        "        if (true) {",
        ("open_calls", "ASlowStepIsNoMismatch"),
    ),
    Mutant(
        "who has come to a call and gone on keeps nobody from it",
        "csrc/host/stalemate.cc",
        "return call.name == name;",
        "return call.has_waited && call.name == name;",
        ("stalemate", "WhoHasEndedACallHasComeToIt"),
    ),
    Mutant(
        "of a process those ranks are named that have not come",
        "csrc/host/exchange_failing.cc",
        "absent[r] = ranks.in_call.count(static_cast<std::int64_t>(r)) == 0;",
        "absent[r] = true;",
        ("exchange_failing", "OfAProcessOnlyThoseThatAreMissingAreNamed"),
    ),
    Mutant(
        "and what they did last themselves",
        "csrc/host/diagnosis.cc",
        "return LastCallText(box, {found->second}, now_ns);",
        "return LastCallText(box, DevicesIn(box), now_ns);",
        ("exchange_failing", "OfAProcessOnlyThoseThatAreMissingAreNamed"),
    ),
    Mutant(
        "a device has one number in its process and another one in the job",
        "csrc/host/diagnosis.cc",
        "named[Recorder::DeviceInRecords(device)] = device;",
        "named[device] = device;",
        ("black_box", "ADeviceIsFoundByItsNumberInTheJob"),
    ),
    Mutant(
        "who has ended a call since is not where it was seen",
        "csrc/host/diagnosis.cc",
        "if (told.at_ns < LastEnd(box)) {",
        "if (false) {",
        ("black_box", "AStackFromBeforeTheLastCallEndedIsNotTakenForWhatItDoes"),
    ),
    Mutant(
        "who is gone or stopped does not wait in a call",
        "csrc/host/exchange_failing.cc",
        "      ranks.in_call.clear();\n",
        "",
        ("exchange_failing", "WhoIsGoneIsNamedThoughItHadCome"),
    ),
    Mutant(
        "who is stopped doesn't either",
        "csrc/host/exchange_failing.cc",
        'if (session_->WhereIs(peer.seat, NowNs()).state != "running") {',
        "if (!session_->WhereIs(peer.seat, NowNs()).gone.empty()) {",
        ("exchange_failing", "WhoIsStoppedIsNamedThoughItHadCome"),
    ),
    Mutant(
        "what the dead did last is there still",
        "csrc/host/exchange_failing.cc",
        "if (absent[r] && box != nullptr) {",
        "if (absent[r] && box != nullptr && false) {",
        ("forks", "AKilledProcessIsNamed"),
    ),
    Mutant(
        "a rank that has not been at a call is known by another one of its run",
        "csrc/host/watchdog.cc",
        "place.device = (*site)->DeviceIn(call.call.key.run, place.logical_id);",
        "place.device = (*site)->DeviceIn(call.call.key.run + 1, place.logical_id);",
        ("failing", "ARankIsKnownByAnotherCallOfItsRun"),
    ),
    Mutant(
        "who is alone with its call is named first",
        "csrc/host/stalemate.cc",
        "by_size.emplace(group.second.size(), &group);",
        "by_size.emplace(0, &group);",
        ("stalemate", "TheOddOneOutComesFirst"),
    ),
    Mutant(
        "calls leave room for what stands after them",
        "csrc/host/stalemate.cc",
        "if (text.size() > kMostBytes) {",
        "if (false) {",
        ("stalemate", "ManyCallsLeaveRoomInACause"),
    ),
    Mutant(
        "no character is cut",
        "csrc/core/utf8.h",
        "end > 0 && continues(end)",
        "end > 0 && continues(end) && false",
        ("stalemate", "NoCharacterIsCut"),
    ),
    Mutant(
        "who can go on lets others go on",
        "csrc/host/stalemate.cc",
        "    changed = false;\n",
        "    break;\n",
        ("stalemate", "OneWayOutIsEnough"),
    ),
    Mutant(
        "calls that have not stood for long may yet be met",
        "csrc/host/stalemate.cc",
        "waits_since_ns > 0 && waits_since_ns <= until_ns",
        "since_ns != 0",
        ("stalemate", "WhoHasNotWaitedForLongMayGoOn"),
    ),
    Mutant(
        "a process that is gone is not waited for",
        "csrc/host/job.cc",
        '.gone = "the process is gone"',
        '.gone = ""',
        ("forks", "AKilledProcessIsNamed"),
    ),
    Mutant(
        "a process that is about to exit is not waited for, for long",
        "csrc/host/job.cc",
        "now_ns - since_ns <= kLeavingNs",
        "since_ns > 0",
        ("exchange_failing", "AProcessThatLeavesIsNotWaitedFor"),
    ),
    Mutant(
        "a forked child's end is not its parent's",
        "csrc/host/job.cc",
        "pid.load(std::memory_order_relaxed) != getpid()) {",
        "pid.load(std::memory_order_relaxed) == -1) {",
        ("forks", "AForkedChildDoesNotLeave"),
    ),
    Mutant(
        "a failure in one process fails the others",
        "csrc/host/call_site.cc",
        "if (meetings_[call.group]->Fail(call.call.key, cause) && call.call.epoch == epoch()) {",
        "if (meetings_[call.group]->Fail(call.call.key, cause) && false) {",
        ("exchange_failing", "AFailureInsideAProcessFailsTheOthers"),
    ),
    Mutant(
        "the first cause is the one that all show",
        "csrc/host/segment.cc",
        "  if (!header_->state.compare_exchange_strong(state, kFailing, "
        "std::memory_order_acq_rel)) {",
        "  if (header_->state.exchange(kFailing) == state && false) {",
        ("exchange_failing", "EveryLaterCallFailsAtOnce"),
    ),
    Mutant(
        "a call of a job that has failed fails with its first rank",
        "csrc/host/meeting.cc",
        "state_ == State::kOpen && exchange_->HasFailed()) {",
        "state_ == State::kOpen && false) {",
        ("exchange_failing", "EveryLaterCallFailsAtOnce"),
    ),
    Mutant(
        "a call fails with the segment that it is in",
        "csrc/host/exchange.cc",
        "  if (!HasFailed()) {\n    return nullptr;",
        "  if (!job_.session()->segment().failed()) {\n    return nullptr;",
        ("exchange_failing", "AttachingDoesNotMendCallsInProgress"),
    ),
    Mutant(
        "a segment serves one job",
        "csrc/host/segment.cc",
        "header->nonce != nonce ||",
        "",
        ("segment", "SegmentsRefuseWhatIsNotTheirs"),
    ),
    # ---- Records and memory ----------------------------------------------------------------------
    Mutant(
        "a call's record is filled in its order",
        "csrc/host/meeting.cc",
        "      rank.resumption.entry->Set(Moment::kMet, met_ns_);\n",
        "",
        ("recorder", "ACallReachesItsMomentsInOrder"),
    ),
    Mutant(
        "a call allocates nothing",
        "csrc/host/call_site.cc",
        "  Visit visit;\n",
        "  Visit visit;\n  delete new std::string(100, 'x');\n",
        ("allocation", "CallsAllocateNothing"),
    ),
    # ---- GPUs ------------------------------------------------------------------------------------
    Mutant(
        "a product waits for the block that it multiplies",
        "csrc/cuda/ring_matmul.cc",
        "if (status.ok() && step_of[owner] > 0) {",
        "if (step_of[owner] > shape_.num_ranks) {",
        ("cuda", "MatrixProductsOfRings"),
    ),
    Mutant(
        "a ring waits for what was computed before it",
        "csrc/cuda/ring_matmul.cc",
        "  Status status = path.Begin(tools.events.front());",
        "  Status status;",
        ("cuda", "MatrixProductsOfRings"),
    ),
    Mutant(
        "a sum waits for the part that comes",
        "csrc/cuda/ring_matmul.cc",
        "      if (step > 0) {\n        status",
        "      if (step > shape_.num_ranks) {\n        status",
        ("cuda", "MatrixProductsOfRings"),
    ),
    Mutant(
        "a sum is sent when it is complete",
        "csrc/cuda/ring_matmul.cc",
        "      status = path.Follow(tools.events[num_events++]);",
        "      num_events++;",
        ("cuda", "MatrixProductsOfRings"),
    ),
    Mutant(
        "the communicators of a process are made in one group",
        "csrc/cuda/clique.cc",
        "if (joined_.size() == seats_.size() && state_.load() == State::kWaiting) {",
        "if (state_.load() == State::kWaiting) {",
        ("cuda_failing", "OneThatDoesNotComeIsNamed"),
    ),
    Mutant(
        "calls of a group that has failed get the first cause",
        "csrc/cuda/clique.h",
        "      return Failure();  // the first cause",
        "      return status;",
        ("cuda_failing", "OneThatDoesNotCallIsNamed"),
    ),
    Mutant(
        "a rank whose records are gone is not called absent",
        "csrc/host/diagnosis.cc",
        "  return are_all_kept || is_one_before_kept ? std::optional<bool>(false) : std::nullopt;",
        "  return std::optional<bool>(false);",
        ("exchange_failing", "WhoHasNotMadeACallIsTold"),
    ),
    Mutant(
        "who has not come is named though it is another process's",
        "csrc/cuda/clique.cc",
        "  const bool are_others = late.empty() && is_shared() && limits.absent != nullptr;",
        "  const bool are_others = false;",
        ("peer_processes", "WhoDiesInASumIsNoticed"),
    ),
    Mutant(
        "a device waits for the others that load their kernels",
        "csrc/cuda/site.cc",
        "  Status status = place.start->Arrive(\n      ordinal, prepared,",
        "  Status status = LocalMeeting({ordinal}).Arrive(\n      ordinal, prepared,",
        ("cuda", "DevicesStartTogether"),
    ),
    Mutant(
        "a call returns when NCCL has put it on the stream",
        "csrc/cuda/communicator.h",
        "    return status.ok() && ended == kNcclInProgress ? Await(libraries) : status;",
        "    return status;",
        ("cuda_failing", "CallsThatNcclHoldsUpAreLate", OLDER_NCCL),
    ),
    Mutant(
        "who waits inside NCCL is freed",
        "csrc/cuda/communicator.cc",
        "    libraries.nccl.comm_revoke(handle_, kNcclRevokeDefault);\n",
        "",
        ("cuda_failing", "CallsThatNcclHoldsUpAreLate"),
    ),
    Mutant(
        "who works inside NCCL is left alone",
        "csrc/cuda/communicator.cc",
        "constexpr auto kStuckAfter = std::chrono::milliseconds(200);",
        "constexpr auto kStuckAfter = std::chrono::milliseconds(0);",
        ("cuda_failing", "NothingIsRevokedUnderAThreadThatWorks"),
    ),
    Mutant(
        "a communicator that is being made is not revoked",
        "csrc/cuda/communicator.cc",
        "is_made_.load() && is_blocking_",
        "is_blocking_",
        ("cuda_failing", "MakingCommunicatorsIsInterrupted"),
    ),
    Mutant(
        "a communicator that is being made is not aborted",
        "csrc/cuda/clique_connecting.cc",
        "  const auto inside = EnterAll();\n  if (inside.empty()) {\n    return GroupHasEnded();\n"
        "  }\n  const Nccl& nccl = libraries().nccl;\n",
        "  const Nccl& nccl = libraries().nccl;\n",
        ("cuda_failing", "MakingCommunicatorsIsInterrupted"),
    ),
    Mutant(
        "ranks that connect are freed",
        "csrc/cuda/clique_connecting.cc",
        "        seat->comm.SetMade();\n",
        "        static_cast<void>(seat);\n",
        ("cuda_failing", "ConnectingIsInterrupted"),
    ),
    Mutant(
        "nothing is aborted while a thread is inside NCCL",
        "csrc/cuda/communicator.cc",
        "  if (inside) {",
        "  if (inside || handle_ != nullptr) {",
        ("cuda_failing", "NothingIsAbortedUnderAThreadInsideNccl"),
    ),
    Mutant(
        "the process's end does not wait for an abort",
        "csrc/cuda/engine.cc",
        "constexpr auto kStopPatience = std::chrono::seconds(2);",
        "constexpr auto kStopPatience = std::chrono::seconds(60);",
        ("cuda_failing", "WhatFailsIsReportedWhateverAbortsTake"),
    ),
    Mutant(
        "between processes: what one can't map nobody uses",
        "csrc/cuda/peer_memory.cc",
        "  problem = FirstProblem(answers);",
        "  static_cast<void>(FirstProblem(answers));",
        ("peer_processes", "WhatOneCannotDoNobodyDoes"),
    ),
    Mutant(
        "between processes: memory of other hosts is not opened",
        "csrc/cuda/peer_memory.cc",
        "return offer.host != plan.host;",
        "return offer.host + plan.host == 0;",
        ("peer_processes", "WhatOneCannotDoNobodyDoes"),
    ),
    Mutant(
        "between processes: kernels of a group that has failed end",
        "csrc/cuda/peer_memory.cc",
        "    seat->EndAt(plan.ended, plan.raised);",
        "    static_cast<void>(seat);",
        ("peer_processes", "WhoDiesInASumIsNoticed"),
    ),
    Mutant(
        "who waits in vain for peer memory makes the device fail",
        "csrc/cuda/peer_sum.h",
        "      team_.Trap();\n",
        "",
        ("peer_processes", "WhoDiesInASumIsNoticed"),
    ),
    Mutant(
        "a call of a collective matmul awaits room in the neighbours' slots",
        "csrc/cuda/block_path.cc",
        "    status = blocks_->AwaitRoom(libraries_, seat_.side_stream);\n",
        "",
        ("cuda", "EachCallAwaitsRoom"),
    ),
    Mutant(
        "room is that of the call before",
        "csrc/cuda/block_seat.cc",
        "{.value = number_ - 1}",
        "{.value = number_ - 2}",
        ("cuda", "WhoSendsBlocksWaitsForRoom"),
    ),
    Mutant(
        "calls of a device take the slots in turn",
        "csrc/cuda/block_seat.cc",
        "if (number_ != 0 && stream != stream_) {",
        "if (number_ == 0) {",
        ("cuda", "CallsOfADeviceTakeTheSlotsInTurn"),
    ),
    Mutant(
        "a block is passed on when it has come",
        "csrc/cuda/block_path.cc",
        "    if (parcel.relayed && status.ok()) {",
        "    if (parcel.relayed && !status.ok()) {",
        ("cuda", "BlocksOfRingsGoOverPeerMemory"),
    ),
    Mutant(
        "operands stay until they are sent",
        "csrc/cuda/block_path.cc",
        "  Status status = cuda::Follow(libraries_, stream_, seat_.side_stream, ended);\n",
        "  Status status;\n  static_cast<void>(ended);\n",
        ("cuda", "ACallEndsWhenItsBlocksAreSent"),
    ),
    Mutant(
        "between processes: who has failed says nothing",
        "csrc/cuda/peer_flags.h",
        "  if (team.LoadFailure(*signal.has_failed) != 0) {\n    return;",
        "  if (team.LoadFailure(*signal.has_failed) > 1) {\n    return;",
        ("peer_processes", "WhoHasFailedPassesNothingOn"),
    ),
    Mutant(
        "between processes: windows for blocks that one can't map nobody uses",
        "csrc/cuda/block_windows.cc",
        "  problem_ = FirstProblem(answers);",
        "  problem_ = problem;",
        ("peer_processes", "WindowsThatOneCannotMakeNobodyHas"),
    ),
]


def run_test(test: tuple[str, ...], limit_s: float) -> str | None:
    """Runs one test of the copy; returns how it failed, or None."""
    suite, name, *variables = test
    process = subprocess.Popen(
        [COPY / "build" / f"{suite}_test", suite, name],
        env=os.environ | dict(variable.split("=") for variable in variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"does not end within {limit_s:.0f} s"
    if code == 0:
        return None
    return "fails" if code > 0 else f"ends by signal {-code}"


def build(suite: str) -> None:
    """Builds one suite of the copy. An edit that does not compile is an error, not a catch."""
    command = ["cmake", "--build", COPY / "build", "--target", f"{suite}_test"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stdout + result.stderr)


def prepare() -> None:
    """Makes a fresh copy of what the tests are built from."""
    shutil.rmtree(COPY, ignore_errors=True)
    for folder in ("csrc", "tests/cpp"):
        shutil.copytree(ROOT / folder, COPY / folder)
    for file in ("CMakeLists.txt", "benchmarks/recorder.cc"):
        (COPY / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, COPY / file)
    options = ["-DJAXCOLL_BUILD_MODULE=OFF", "-DJAXCOLL_BUILD_TESTS=ON"]
    command = ["cmake", "-S", COPY, "-B", COPY / "build", "-G", "Ninja", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def check(mutant: Mutant, limit_s: float) -> str | None:
    """Returns how the test noticed the mutant, or None."""
    path = COPY / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        sys.exit(f"{mutant.file} does not hold this text once: {mutant.old!r}")
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        build(mutant.test[0])
        return run_test(mutant.test, limit_s)
    finally:
        path.write_text(original)


def main() -> int:
    mutants = [m for m in MUTANTS if len(sys.argv) < 2 or sys.argv[1] in m.rule]
    prepare()
    problems = 0
    limits_s = {}
    for test in dict.fromkeys(m.test for m in mutants):
        build(test[0])
        start = time.monotonic()
        if how := run_test(test, 300.0):
            print(f"{test[1]} {how} without a mutant", flush=True)
            problems += 1
        limits_s[test] = max(LIMIT_S, 5 * (time.monotonic() - start))
    for mutant in mutants:
        start = time.monotonic()
        how = check(mutant, limits_s[mutant.test])
        problems += how is None
        suite, name, *_ = mutant.test
        print(
            f"{'caught' if how else 'MISSED':6}  {mutant.rule}: {suite}_test {name} "
            f"{how or 'passes'} ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    print(f"{len(mutants)} mutants, {problems} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

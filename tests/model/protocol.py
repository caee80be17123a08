"""The protocol of csrc/host/exchange.h between processes, as a model of its single steps.

Each process makes the same calls, one after the other. For each it takes one of two lanes and goes
through its steps: leave a round's data in its window, read what it wants of the others', publish.
It waits only for those whose data it reads, or who read what it overwrites, and may be at later
calls when others come. What is read carries who left it for which call and round, so that a wrong
pairing and a slot that is used again too early both show.

A direct call leaves an address; what is read there is the other's own buffer, which stays until
the other has ended its call, with a result or an error.

A process may crash, stop and go on later, or give up at a deadline, at any step. A rule can be
switched off, to see that the check misses it.
"""

# ruff: noqa: B019  (what is kept of a job lives as long as the test's process, and is small)
import dataclasses
import functools as ft
from collections.abc import Iterator
from typing import Any, NamedTuple

from model.explore import ViolationError

RULES = (
    "data before flag",  # a step is published after what it leaves
    "tags differ",  # each call has a tag of its own
    "what is read is there",  # a step waits for those whose data it reads
    "lanes are drained",  # a lane is taken up again once all that looked at it have ended its call
    "who only looks counts",  # also those that looked at it for who has read
    "rounds are read",  # what a window holds is overwritten once its readers have read it
    "buffers are read",  # a direct call ends once its readers have read
    "read before end",  # who has looked at a lane says that it is done after its last look
    "failure before result",  # a direct call gives no result of a job that has failed
    "few are ahead",  # a process leaves few calls behind to which others may not have come
    "death is noticed",  # a waiting process sees that another is gone
)
LANES = 2
ROUNDS_IN_WINDOW = 2  # enough for one to be left while the last is read; the engine has four
AHEAD = 1  # calls that a process may leave before those have come that read what it left
DONE, ERROR, CRASHED = "result", "error", "crashed"


# Tuples, which are quicker to look up than dataclasses, as there are many states.


class Lane(NamedTuple):
    """What others see of a lane: the published word, and the rounds that its window holds."""

    tag: int | None = None
    progress: int = 0
    held: tuple[Any, ...] = (None,) * ROUNDS_IN_WINDOW


class Process(NamedTuple):
    """Where a process stands.

    Attributes:
        call: the call in progress.
        lane: its lane; None before it has one.
        step: how many steps are completed.
        at: 0 before a step; while a step is under way, how many of its parts are.
        left: of the lanes left behind, oldest first: (lane, call).
        found: where the others' lanes of this call were found: (process, lane).
        doubts: whether it may have read what was no longer there.
        end: how it ended, or None.
        stopped: whether it is stopped.
    """

    call: int = 0
    lane: int | None = None
    step: int = 0
    at: int = 0
    left: tuple[tuple[int, int], ...] = ()
    found: tuple[tuple[int, int], ...] = ()
    doubts: bool = False
    end: str | None = None
    stopped: bool = False


class State(NamedTuple):
    """The whole job; `ended[i][j][n]` is the last call in lane n of j that i has ended."""

    processes: tuple[Process, ...]
    lanes: tuple[tuple[Lane, ...], ...]
    ended: tuple[tuple[tuple[int | None, ...], ...], ...]
    failed: bool = False
    faults: int = 0


@dataclasses.dataclass(frozen=True, eq=False)  # so that a job is quick to look up
class Job:
    """A job to explore.

    Attributes:
        processes: how many.
        calls: of each process.
        rounds: of each call that is not direct.
        routes: of the calls in turn: who reads whom, "direct" before it or not.
        faults: how many of the things below may happen.
        kinds: of `crash`, `stop`, `deadline`.
        without: the rules that are switched off.
    """

    processes: int
    calls: int
    rounds: int = 1
    routes: tuple[str, ...] = ("all",)
    faults: int = 0
    kinds: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def start(self) -> State:
        return State(
            processes=(Process(),) * self.processes,
            lanes=((Lane(),) * LANES,) * self.processes,
            ended=(((None,) * LANES,) * self.processes,) * self.processes,
        )

    # ---- The order of steps, as in csrc/host/exchange.h ------------------------------------------

    def route(self, call: int) -> str:
        return self.routes[call % len(self.routes)]

    def is_direct(self, call: int) -> bool:
        return self.route(call).startswith("direct")

    def phases(self, call: int) -> int:
        """Leave and read; where the others read one's own buffer, wait until they have."""
        return 3 if self.is_direct(call) else 2

    def num_rounds(self, call: int) -> int:
        return 1 if self.is_direct(call) else self.rounds

    @ft.cache
    def num_steps(self, call: int) -> int:
        return (self.num_rounds(call) + self.phases(call) - 1) * self.phases(call)

    @ft.cache
    def phase_and_round(self, call: int, step: int) -> tuple[int, int | None]:
        phase = step % self.phases(call)
        round_ = step // self.phases(call) - phase
        return phase, round_ if 0 <= round_ < self.num_rounds(call) else None

    def reads(self, call: int, phase: int, i: int, j: int) -> bool:
        """Says whether i's phase takes what j has left, or done, in the phase before."""
        if phase == 2:
            return self.reads(call, 1, j, i)
        match self.route(call).split():
            case [*_, "all"]:
                return True
            case [*_, "ring"]:
                return j == (i - 1) % self.processes
            case [*_, "from", root]:
                return j == int(root)
        raise AssertionError(self.route(call))

    @ft.cache
    def needs(self, call: int, step: int, i: int, j: int) -> int:
        """Returns how many steps j must have completed before i makes `step`."""
        phase, round_ = self.phase_and_round(call, step)
        assert round_ is not None
        needed = 0
        if phase > 0 and self.reads(call, phase, i, j):
            rule = "what is read is there" if phase == 1 else "buffers are read"
            if rule not in self.without:
                needed = self._end(call, phase - 1, round_)
        overwrites = phase + 1 < self.phases(call) and round_ >= ROUNDS_IN_WINDOW
        is_kept = "rounds are read" not in self.without
        if overwrites and is_kept and self.reads(call, phase + 1, j, i):
            needed = max(needed, self._end(call, phase + 1, round_ - ROUNDS_IN_WINDOW))
        return needed

    @ft.cache
    def looks(self, call: int, i: int, j: int) -> bool:
        """Says whether i looks at j's lane in the call."""
        if "who only looks counts" in self.without:
            return self.reads(call, 1, i, j)
        return any(
            self.needs(call, step, i, j) > 0
            for step in range(self.num_steps(call))
            if self.phase_and_round(call, step)[1] is not None
        )

    def others(self, i: int) -> list[int]:
        return [j for j in range(self.processes) if j != i]

    @ft.cache
    def lookers(self, call: int, i: int) -> list[int]:
        return [j for j in self.others(i) if self.looks(call, j, i)]

    @ft.cache
    def goes_ahead(self, call: int, i: int) -> bool:
        """Says whether i may end the call before all have come that will look at its lane."""
        return not all(self.looks(call, i, j) for j in self.lookers(call, i))

    def _end(self, call: int, phase: int, round_: int) -> int:
        return (round_ + phase) * self.phases(call) + phase + 1

    def tag(self, call: int) -> int:
        return call if "tags differ" not in self.without else 0

    # ---- Steps -----------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for i, process in enumerate(state.processes):
            if process.end is not None:
                continue
            if process.stopped:
                yield f"{i} goes on", _with(state, i, stopped=False)
                continue
            yield from self._own_steps(state, i, process)
            if "deadline" in self.kinds and process.call < self.calls and not state.failed:
                ended = _with(state, i, end=ERROR)
                yield f"{i} gives up", ended._replace(failed=True)
            if state.faults < self.faults:
                more = state._replace(faults=state.faults + 1)
                if "crash" in self.kinds:
                    yield f"{i} crashes", _with(more, i, end=CRASHED)
                if "stop" in self.kinds:
                    yield f"{i} stops", _with(more, i, stopped=True)

    def _own_steps(self, state: State, i: int, process: Process) -> Iterator[tuple[str, State]]:
        if process.call == self.calls:
            yield f"{i} is done", _with(state, i, end=DONE)
            return
        if process.lane is None:
            if state.failed:
                yield f"{i} sees the failure", _with(state, i, end=ERROR)
                return
            taken = self._take_lane(state, i, process)
            if taken is None:
                yield from self._waits(state, i)
                return
            lane, left = taken
            opened = _with(state, i, lane=lane, left=left, step=0, at=0, found=(), doubts=False)
            yield f"{i} opens lane {lane} for call {process.call}", opened
            return
        if process.step == self.num_steps(process.call):
            yield from self._end_call(state, i, process)
            return
        phase, round_ = self.phase_and_round(process.call, process.step)
        if round_ is None:
            yield from self._own_steps(state, i, process._replace(step=process.step + 1))
            return
        if process.at == 0:
            found = self._reached(state, i, process)
            if found is None:
                yield from self._waits(state, i)
                return
            process = process._replace(found=found)
        if phase == 0:
            yield self._leave(state, i, process, round_)
        else:
            yield self._read(state, i, process, phase, round_)

    def _end_call(self, state: State, i: int, process: Process) -> Iterator[tuple[str, State]]:
        """Says of each lane that it has looked at that it is done with it, and leaves its own."""
        assert process.lane is not None
        call = process.call
        said = state.ended[i]
        for j, lane in process.found:
            if self.looks(call, i, j) and said[j][lane] != self.tag(call):
                yield (
                    f"{i} is done with {j}'s lane {lane}",
                    _with_ended(state, i, j, lane, self.tag(call)),
                )
                return
        if process.doubts:
            if state.failed and "failure before result" not in self.without:
                yield f"{i} sees the failure", _with(state, i, end=ERROR)
                return
            raise ViolationError(f"{i} has a result of call {call} that it did not read in time")
        if self.goes_ahead(call, i) and "few are ahead" not in self.without:
            ahead = sum(
                self.goes_ahead(other, i) and not self._is_drained(state, i, lane, other)
                for lane, other in process.left
            )
            if ahead >= AHEAD and not self._is_drained(state, i, process.lane, call):
                yield from self._waits(state, i)
                return
        left = (*process.left, (process.lane, call))
        yield (
            f"{i} leaves lane {process.lane}",
            _with(state, i, call=call + 1, lane=None, left=left),
        )

    def _leave(self, state: State, i: int, process: Process, round_: int) -> tuple[str, State]:
        assert process.lane is not None
        data_first = "data before flag" not in self.without
        if (process.at == 0) == data_first:
            held = list(state.lanes[i][process.lane].held)
            held[round_ % ROUNDS_IN_WINDOW] = (i, process.call, round_)
            new = _with_lane(state, i, process.lane, held=tuple(held))
            name = f"{i} leaves round {round_}"
        else:
            new = self._published(state, i, process)
            name = f"{i} publishes it"
        return name, self._advanced(new, i, process, parts=2)

    def _read(
        self, state: State, i: int, process: Process, phase: int, round_: int
    ) -> tuple[str, State]:
        call = process.call
        sources = [j for j in self.others(i) if phase == 1 and self.reads(call, 1, i, j)]
        if process.at == len(sources):
            new, name = self._published(state, i, process), f"{i} publishes step {process.step}"
            return name, self._advanced(new, i, process, parts=len(sources) + 1)
        other = sources[process.at]
        name = f"{i} reads {other}'s round {round_}"
        if other not in dict(process.found):
            raise ViolationError(f"{name} of call {call} before it has come")
        found = state.lanes[other][dict(process.found)[other]].held[round_ % ROUNDS_IN_WINDOW]
        wanted = (other, call, round_)
        if found != wanted:
            raise ViolationError(f"{name} of call {call} and finds {found}")
        if self.is_direct(call):
            owner = state.processes[other]
            if owner.end == CRASHED:
                failed = state._replace(failed=True)
                return f"{i} can't read {other}'s memory", _with(failed, i, end=ERROR)
            if owner.end is not None or owner.call != call:
                process = process._replace(doubts=True)
        if process.at == 0 and "read before end" in self.without:
            for j in sources:
                state = _with_ended(state, i, j, dict(process.found)[j], self.tag(call))
        return name, self._advanced(state, i, process, parts=len(sources) + 1)

    def _advanced(self, state: State, i: int, process: Process, parts: int) -> State:
        done = process.at + 1 == parts
        return _with(
            state,
            i,
            at=0 if done else process.at + 1,
            step=process.step + done,
            found=process.found,
            doubts=process.doubts,
        )

    def _published(self, state: State, i: int, process: Process) -> State:
        assert process.lane is not None
        tag = self.tag(process.call)
        return _with_lane(state, i, process.lane, tag=tag, progress=process.step + 1)

    def _waits(self, state: State, i: int) -> Iterator[tuple[str, State]]:
        """What a process that can't go on may do."""
        if state.failed:
            yield f"{i} sees the failure", _with(state, i, end=ERROR)
            return
        failed = _with(state, i, end=ERROR)._replace(failed=True)
        gone = any(process.end == CRASHED for process in state.processes)
        if gone and "death is noticed" not in self.without:
            yield f"{i} sees that another is gone", failed

    # ---- Looks at the others ---------------------------------------------------------------------

    def _reached(
        self, state: State, i: int, process: Process
    ) -> tuple[tuple[int, int], ...] | None:
        """Returns where the others' lanes are, or None where one has not come far enough."""
        found = dict(process.found)
        tag = self.tag(process.call)
        for j in self.others(i):
            needed = self.needs(process.call, process.step, i, j)
            if not needed:
                continue
            if j not in found:
                lanes = [n for n, lane in enumerate(state.lanes[j]) if lane.tag == tag]
                if not lanes:
                    return None
                found[j] = lanes[0]
            lane = state.lanes[j][found[j]]
            if lane.tag != tag or lane.progress < needed:
                return None
        return tuple(sorted(found.items()))

    def _is_drained(self, state: State, i: int, lane: int, call: int) -> bool:
        tag = self.tag(call)
        return all(state.ended[j][i][lane] == tag for j in self.lookers(call, i))

    def _take_lane(self, state: State, i: int, process: Process) -> Any:
        """Returns a lane and what is left behind without it, or None."""
        left = process.left
        if left:
            lane, call = left[0]
            if "lanes are drained" in self.without or self._is_drained(state, i, lane, call):
                return lane, left[1:]
        fresh = set(range(LANES)) - {lane for lane, _ in left}
        return (min(fresh), left) if fresh else None

    # ---- What must hold --------------------------------------------------------------------------

    def check(self, state: State) -> str | None:
        if self.faults == 0 and not self.kinds and state.failed:
            return "the job failed without a cause"
        for i, process in enumerate(state.processes):
            ahead = [call for _, call in process.left if self._is_ahead(state, i, call)]
            if len(ahead) > AHEAD:
                return f"{i} holds the lanes that others may need for calls that it is ahead of"
        return None

    def _is_ahead(self, state: State, i: int, call: int) -> bool:
        return any(
            state.processes[j].call < call
            or (state.processes[j].call == call and state.processes[j].lane is None)
            for j in self.lookers(call, i)
        )

    def check_end(self, state: State) -> str | None:
        ends = [process.end for process in state.processes]
        if None in ends:
            return f"nothing can happen any more, and the processes are at {ends}"
        if not state.failed and set(ends) - {DONE, CRASHED}:
            return f"an error without a failure: {ends}"
        return None


def _with(state: State, i: int, **changes: Any) -> State:
    processes = list(state.processes)
    processes[i] = processes[i]._replace(**changes)
    return state._replace(processes=tuple(processes))


def _with_lane(state: State, i: int, n: int, **changes: Any) -> State:
    lanes = list(state.lanes[i])
    lanes[n] = lanes[n]._replace(**changes)
    return state._replace(lanes=(*state.lanes[:i], tuple(lanes), *state.lanes[i + 1 :]))


def _with_ended(state: State, i: int, j: int, n: int, tag: int) -> State:
    of_j = list(state.ended[i][j])
    of_j[n] = tag
    mine = (*state.ended[i][:j], tuple(of_j), *state.ended[i][j + 1 :])
    return state._replace(ended=(*state.ended[:i], mine, *state.ended[i + 1 :]))

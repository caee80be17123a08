"""The protocol of csrc/host/exchange.h between processes, as a model of its single steps.

Each process makes the same calls, one after the other. For each it takes one of two lanes and goes
through its steps: leave a round's data in its window, read the others',
publish. What is read carries who left it for which call and round, so that a wrong pairing and a
slot that is used again too early both show.

A process may crash, stop and go on later, or give up at a deadline while it waits. A rule can be
switched off, to see that the check misses it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from model.explore import ViolationError

RULES = (
    "data before flag",  # a step is published after what it leaves
    "tags differ",  # each call has a tag of its own
    "lanes are drained",  # a lane is taken up again once all others have ended its call
    "rounds are read",  # a half of the window is overwritten once all others have read it
    "read before end",  # the last step is published after the last read
    "death is noticed",  # a waiting process sees that another is gone
)
LANES = 2
DONE, ERROR, CRASHED = "result", "error", "crashed"


@dataclasses.dataclass(frozen=True)
class Lane:
    """What others see of a lane: the published word, and the two halves of the window."""

    tag: int | None = None
    progress: int = 0
    halves: tuple[Any, Any] = (None, None)


@dataclasses.dataclass(frozen=True)
class Process:
    """Where a process stands.

    Attributes:
        call: the call in progress.
        lane: its lane; None before it has one.
        step: how many steps are completed.
        at: 0 before a step; while a step is under way, how many of its parts are.
        left: of the lanes left behind, oldest first: (lane, tag).
        readers: where the others' lanes of this call were found: (process, lane).
        end: how it ended, or None.
        stopped: whether it is stopped.
    """

    call: int = 0
    lane: int | None = None
    step: int = 0
    at: int = 0
    left: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...] = ()
    readers: tuple[tuple[int, int], ...] = ()
    end: str | None = None
    stopped: bool = False


@dataclasses.dataclass(frozen=True)
class State:
    """The whole job."""

    processes: tuple[Process, ...]
    lanes: tuple[tuple[Lane, ...], ...]
    failed: bool = False
    faults: int = 0


@dataclasses.dataclass(frozen=True)
class Job:
    """A job to explore.

    Attributes:
        processes: how many.
        calls: of each process.
        rounds: of each call.
        faults: how many of the things below may happen.
        kinds: of `crash`, `stop`, `deadline`.
        without: the rules that are switched off.
    """

    processes: int
    calls: int
    rounds: int = 1
    faults: int = 0
    kinds: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def start(self) -> State:
        return State(
            processes=(Process(),) * self.processes,
            lanes=((Lane(),) * LANES,) * self.processes,
        )

    # ---- The order of steps, as in csrc/host/exchange.h: two phases, leave and read --------------

    @property
    def num_steps(self) -> int:
        return (self.rounds + 1) * 2

    def phase_and_round(self, step: int) -> tuple[int, int | None]:
        phase, round_ = step % 2, step // 2 - step % 2
        return phase, round_ if 0 <= round_ < self.rounds else None

    def needs(self, step: int) -> int:
        phase, round_ = self.phase_and_round(step)
        assert round_ is not None
        if phase == 1:
            return self._end(0, round_)
        if round_ >= 2 and "rounds are read" not in self.without:
            return self._end(1, round_ - 2)
        return 0

    @staticmethod
    def _end(phase: int, round_: int) -> int:
        return (round_ + phase) * 2 + phase + 1

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
            if state.faults < self.faults:
                more = dataclasses.replace(state, faults=state.faults + 1)
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
            opened = _with(state, i, lane=lane, left=left, step=0, at=0, readers=())
            yield f"{i} opens lane {lane} for call {process.call}", opened
            return
        if process.step == self.num_steps:
            left = (*process.left, (process.lane, self.tag(process.call), process.readers))
            yield (
                f"{i} leaves lane {process.lane}",
                _with(state, i, call=process.call + 1, lane=None, left=left),
            )
            return
        phase, round_ = self.phase_and_round(process.step)
        if round_ is None:
            yield from self._own_steps(
                state, i, dataclasses.replace(process, step=process.step + 1)
            )
            return
        if process.at == 0:
            readers = self._reached(state, i, process, self.needs(process.step))
            if readers is None:
                yield from self._waits(state, i)
                return
            process = dataclasses.replace(process, readers=readers)
        yield from (self._leave if phase == 0 else self._read)(state, i, process, round_)

    def _leave(self, state: State, i: int, process: Process, round_: int) -> Any:
        assert process.lane is not None
        data_first = "data before flag" not in self.without
        if (process.at == 0) == data_first:
            halves = list(state.lanes[i][process.lane].halves)
            halves[round_ % 2] = (i, process.call, round_)
            new = _with_lane(state, i, process.lane, halves=tuple(halves))
            name = f"{i} leaves round {round_}"
        else:
            new = self._published(state, i, process)
            name = f"{i} publishes it"
        yield name, self._advanced(new, i, process, parts=2)

    def _read(self, state: State, i: int, process: Process, round_: int) -> Any:
        others = [j for j in range(self.processes) if j != i]
        publishes_at = 0 if "read before end" in self.without else len(others)
        parts = len(others) + 1
        if process.at == publishes_at:
            new, name = self._published(state, i, process), f"{i} publishes step {process.step}"
        else:
            other = others[process.at - (1 if publishes_at == 0 else 0)]
            lane = dict(process.readers)[other]
            found = state.lanes[other][lane].halves[round_ % 2]
            wanted = (other, process.call, round_)
            name = f"{i} reads {other}'s round {round_}"
            if found != wanted:
                raise ViolationError(f"{name} of call {process.call} and finds {found}")
            new = state
        yield name, self._advanced(new, i, process, parts)

    def _advanced(self, state: State, i: int, process: Process, parts: int) -> State:
        done = process.at + 1 == parts
        return _with(
            state,
            i,
            at=0 if done else process.at + 1,
            step=process.step + done,
            readers=process.readers,
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
        failed = dataclasses.replace(_with(state, i, end=ERROR), failed=True)
        gone = any(process.end == CRASHED for process in state.processes)
        if gone and "death is noticed" not in self.without:
            yield f"{i} sees that another is gone", failed
        if "deadline" in self.kinds:
            yield f"{i} gives up", failed

    # ---- Looks at the others ---------------------------------------------------------------------

    def _reached(
        self, state: State, i: int, process: Process, needed: int
    ) -> tuple[tuple[int, int], ...] | None:
        """Returns where the others' lanes are, or None where one has not come far enough."""
        found = dict(process.readers)
        tag = self.tag(process.call)
        for j in range(self.processes):
            if j == i:
                continue
            if j not in found:
                lanes = [n for n, lane in enumerate(state.lanes[j]) if lane.tag == tag]
                if not lanes:
                    if needed:
                        return None
                    continue
                found[j] = lanes[0]
            lane = state.lanes[j][found[j]]
            if lane.tag != tag or lane.progress < needed:
                return None
        return tuple(sorted(found.items()))

    def _take_lane(self, state: State, i: int, process: Process) -> Any:
        """Returns a lane and what is left behind without it, or None."""
        left = process.left
        if left:
            lane, tag, readers = left[0]
            read = [
                state.lanes[j][n].tag == tag and state.lanes[j][n].progress < self.num_steps
                for j, n in readers
            ]
            if not any(read) or "lanes are drained" in self.without:
                return lane, left[1:]
        fresh = set(range(LANES)) - {lane for lane, _, _ in left}
        return (min(fresh), left) if fresh else None

    # ---- What must hold --------------------------------------------------------------------------

    def check(self, state: State) -> str | None:
        if self.faults == 0 and not self.kinds and state.failed:
            return "the job failed without a cause"
        return None

    def check_end(self, state: State) -> str | None:
        ends = [process.end for process in state.processes]
        if None in ends:
            return f"nothing can happen any more, and the processes are at {ends}"
        if not state.failed and set(ends) - {DONE, CRASHED}:
            return f"an error without a failure: {ends}"
        return None


def _with(state: State, i: int, **changes: Any) -> State:
    processes = list(state.processes)
    processes[i] = dataclasses.replace(processes[i], **changes)
    return dataclasses.replace(state, processes=tuple(processes))


def _with_lane(state: State, i: int, n: int, **changes: Any) -> State:
    lanes = list(state.lanes[i])
    lanes[n] = dataclasses.replace(lanes[n], **changes)
    return dataclasses.replace(state, lanes=(*state.lanes[:i], tuple(lanes), *state.lanes[i + 1 :]))

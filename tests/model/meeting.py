"""Where the ranks of one process meet, as in csrc/host/meeting.h, as a model of its single steps.

Each rank is a thread that makes one call in each of several runs of a program. What is done under
the lock is one step; taking a chunk, running it and counting it are others. Helpers run chunks as
well, and may come late. A deadline may fail a call that is open. After an error a rank goes on with
the next run, as a program does that is started again.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from model.explore import ViolationError, explore

RULES = (
    "all have come",  # data moves once the last rank is there, or what it takes is
    "counted, then ready",  # chunks are counted before anyone can take one
    "one takes a chunk",  # a chunk is taken in one step
    "the last chunk ends the call",  # whoever has run it, not who finds none left
    "only open calls fail",  # once data moves, nobody leaves
    "chunks end, then ranks leave",  # of a call that fails while work that started early runs
    "the run fails, then ranks leave",  # so that a late rank of that run does not come to the next
    "look again, then wait",  # for chunks that became ready while others were at work
    "ended calls are not waited for",  # a rank that has run chunks asks under the lock
)
DONE, OPEN, MOVING, FAILING, FAILED = "done", "open", "moving", "failing", "failed"
RESULT, ERROR = "result", "error"


class Thread(NamedTuple):
    """A rank's, or a helper's.

    Attributes:
        at: its next step; a rank's "waits" and a helper's "idle" have none.
        chunk: the one that it has taken.
        run: of a rank, the run that it is in.
        is_inside: whether the buffers of that run's call may be touched.
        done_before: calls that had ended when it came.
        outcome: of a call that has ended and that the rank has not heard of.
        outcomes: of its calls.
    """

    at: str
    chunk: int = 0
    run: int = 0
    is_inside: bool = False
    done_before: int = 0
    outcome: str = ""
    outcomes: tuple[str, ...] = ()


class State(NamedTuple):
    """All threads, and the meeting."""

    threads: tuple[Thread, ...]
    state: str = DONE
    run: int = -1
    arrivals: tuple[int, ...] = ()
    waits: frozenset[int] = frozenset()
    ready: int = 0
    next: int = 0
    unfinished: int = 0
    num_done: int = 0
    at_work: int = 0
    ran: tuple[int, ...] = ()  # chunks of this call, as they were run
    failed_runs: frozenset[int] = frozenset()
    deadlines: int = 0
    told_late: int = -1  # the run that the watchdog has yet to note, without that rule


@dataclasses.dataclass(frozen=True)
class Job:
    """A job to explore.

    Attributes:
        ranks: how many.
        runs: of each rank.
        chunks: of a call; of work that starts early, one for each rank.
        helpers: threads that run chunks with the ranks.
        early: whether work starts early: chunk i needs the first i + 1 ranks that have come.
        cores: so many ranks run chunks at a time, of work that starts early.
        deadlines: how many may come.
        without: the rules that are switched off.
    """

    ranks: int
    runs: int
    chunks: int = 2
    helpers: int = 1
    early: bool = False
    cores: int = 2
    deadlines: int = 0
    without: frozenset[str] = frozenset()

    def explored(self) -> int:
        """Returns the number of states, or raises ViolationError."""
        threads = (*[Thread("comes")] * self.ranks, *[Thread("idle")] * self.helpers)
        return explore(State(threads), self.steps, lambda _: None, self.check_end)

    def has(self, rule: str) -> bool:
        return rule not in self.without

    def num_chunks(self) -> int:
        return self.ranks if self.early else self.chunks

    # ---- Steps -----------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for i, thread in enumerate(state.threads):
            step = getattr(self, f"_{thread.at}", None)
            new = step(state, i, thread) if step is not None else None
            if new is not None:
                name = f"rank {i}" if i < self.ranks else f"helper {i - self.ranks}"
                yield f"{name} {thread.at}", new
        may_fail = (OPEN,) if self.has("only open calls fail") else (OPEN, MOVING)
        if state.deadlines < self.deadlines and state.state in may_fail:
            more = state._replace(deadlines=state.deadlines + 1)
            if self.has("the run fails, then ranks leave"):
                more = more._replace(failed_runs=more.failed_runs | {more.run})
            else:
                more = more._replace(told_late=more.run)
            yield "a deadline", self._fail_open_call(more)
        if state.told_late >= 0:
            noted = state.failed_runs | {state.told_late}
            yield "the run is noted", state._replace(failed_runs=noted, told_late=-1)

    def _comes(self, state: State, i: int, thread: Thread) -> State | None:
        """Asks whether its run has failed."""
        if thread.run == self.runs:
            return None
        if thread.run in state.failed_runs:
            return _left(state, i, ERROR)
        return _with(state, i, at="arrives")

    def _arrives(self, state: State, i: int, thread: Thread) -> State | None:
        if state.state == DONE or state.run != thread.run:
            while state.state not in (DONE, FAILED):
                if state.state == FAILING:
                    return None  # waits until it is not
                if state.state != OPEN or state.run not in state.failed_runs:
                    if thread.run in state.failed_runs:
                        return _left(state, i, ERROR)
                    raise ViolationError(f"rank {i} of run {thread.run} comes to run {state.run}")
                state = self._fail_open_call(state)
            state = state._replace(
                state=OPEN, run=thread.run, arrivals=(), waits=frozenset(), ran=()
            )
            if self.early:
                state = state._replace(unfinished=self.ranks, ready=0, next=0)
        if state.state in (FAILED, FAILING):
            return _left(state, i, ERROR)
        arrivals = (*state.arrivals, i)
        is_last = len(arrivals) == self.ranks
        state = state._replace(arrivals=arrivals, state=MOVING if is_last else OPEN)
        state = _with(state, i, is_inside=True, done_before=state.num_done)
        if self.early:
            state = state._replace(ready=len(arrivals))
            if not self.has("all have come"):
                state = state._replace(ready=min(self.ranks, len(arrivals) + 1))
            if state.at_work == self.cores:
                return self._wait(state, i)
            state = state._replace(at_work=state.at_work + 1)
            return _with(_helped(state, self.ranks) if is_last else state, i, at="takes")
        if not is_last and self.has("all have come"):
            return self._wait(state, i)
        return _with(state, i, at="counts" if self.has("counted, then ready") else "readies")

    def _counts(self, state: State, i: int, thread: Thread) -> State:
        state = state._replace(unfinished=self.chunks)
        return _with(state, i, at="readies" if self.has("counted, then ready") else "calls")

    def _readies(self, state: State, i: int, thread: Thread) -> State:
        state = state._replace(ready=self.chunks, next=0)
        return _with(state, i, at="calls" if self.has("counted, then ready") else "counts")

    def _calls(self, state: State, i: int, thread: Thread) -> State:
        return _with(_helped(state, self.ranks), i, at="takes")

    def _takes(self, state: State, i: int, thread: Thread) -> State:
        if state.next >= state.ready:
            return self._found_none(state, i)
        if not self.has("one takes a chunk"):
            return _with(state, i, at="takes_it", chunk=state.next)
        return _with(state._replace(next=state.next + 1), i, at="runs", chunk=state.next)

    def _takes_it(self, state: State, i: int, thread: Thread) -> State:
        return _with(state._replace(next=thread.chunk + 1), i, at="runs")

    def _runs(self, state: State, i: int, thread: Thread) -> State:
        needed = state.arrivals[: thread.chunk + 1] if self.early else range(self.ranks)
        if self.early and len(needed) <= thread.chunk:
            raise ViolationError(f"chunk {thread.chunk} runs before the ranks that it needs came")
        for rank in needed:
            other = state.threads[rank]
            if not other.is_inside or other.run != state.run:
                raise ViolationError(
                    f"chunk {thread.chunk} touches rank {rank}, which is not there"
                )
        return _with(state._replace(ran=(*state.ran, thread.chunk)), i, at="ends")

    def _ends(self, state: State, i: int, thread: Thread) -> State:
        """Counts its chunk; after the last one it ends the call."""
        left = state.unfinished - 1
        if left < 0:
            raise ViolationError("more chunks are run than there are")
        state = state._replace(unfinished=left)
        is_last = left == 0 and self.has("the last chunk ends the call")
        return _with(state, i, at="finishes" if is_last else "takes")

    def _found_none(self, state: State, i: int) -> State:
        if i >= self.ranks:
            return _with(state, i, at="idle")
        at = "leaves" if self.has("the last chunk ends the call") else "finishes"
        return _with(state, i, at=at)

    def _finishes(self, state: State, i: int, thread: Thread) -> State:
        if state.state == FAILING:
            state = self._end_call(state, ERROR)
        else:
            if sorted(state.ran) != list(range(self.num_chunks())):
                raise ViolationError(f"the call ends after chunks {state.ran}")
            state = self._end_call(state, RESULT)
        return _with(state, i, at="idle" if i >= self.ranks else "leaves")

    def _leaves(self, state: State, i: int, thread: Thread) -> State:
        """A rank that has run chunks goes back to them, or waits."""
        if self.early:
            if state.next < state.ready and self.has("look again, then wait"):
                return _with(state, i, at="takes")
            state = state._replace(at_work=state.at_work - 1)
        return self._wait(state, i)

    def _wait(self, state: State, i: int) -> State:
        thread = state.threads[i]
        asks = self.has("ended calls are not waited for")
        if asks and state.num_done != thread.done_before:
            return _left(state, i, thread.outcome)
        return _with(state._replace(waits=state.waits | {i}), i, at="waits")

    # ---- The ends of a call ----------------------------------------------------------------------

    def _fail_open_call(self, state: State) -> State:
        if self.early:
            left = state.unfinished - (self.ranks - state.next)
            state = state._replace(ready=0, next=0, unfinished=left)
            if left > 0 and self.has("chunks end, then ranks leave"):
                return state._replace(state=FAILING)
        return self._end_call(state, ERROR)

    def _end_call(self, state: State, outcome: str) -> State:
        ended = DONE if outcome == RESULT else FAILED
        state = state._replace(state=ended, num_done=state.num_done + 1)
        for i in state.arrivals:
            state = _with(state, i, outcome=outcome)
        for i in state.waits:
            state = _left(state, i, outcome)
        return state._replace(waits=frozenset())

    def check_end(self, state: State) -> str | None:
        ranks = state.threads[: self.ranks]
        if any(rank.run < self.runs for rank in ranks):
            return f"nothing can happen any more, and the ranks are at {[r.at for r in ranks]}"
        if any(rank.outcomes != ranks[0].outcomes for rank in ranks):
            return f"one call has several ends: {[rank.outcomes for rank in ranks]}"
        if ranks[0].outcomes.count(ERROR) > state.deadlines:
            return "an error without a cause"
        return None


def _with(state: State, i: int, **changes: Any) -> State:
    threads = list(state.threads)
    threads[i] = threads[i]._replace(**changes)
    return state._replace(threads=tuple(threads))


def _left(state: State, i: int, outcome: str) -> State:
    """The rank hears of its call's end, and goes on to its next run."""
    thread = state.threads[i]
    outcomes = (*thread.outcomes, outcome)
    new = {"at": "comes", "run": thread.run + 1, "is_inside": False, "outcomes": outcomes}
    return _with(state, i, **new)


def _helped(state: State, ranks: int) -> State:
    for i, thread in enumerate(state.threads):
        if i >= ranks and thread.at == "idle":
            state = _with(state, i, at="takes")
    return state

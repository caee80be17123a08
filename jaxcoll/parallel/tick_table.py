"""A pipeline's schedule as arrays: what each rank does in each tick, and where it keeps what.

What a rank is sent stays in a slot of its own until the backward pass has used it.
"""

import dataclasses
import itertools as it
from collections.abc import Iterator

import numpy as np

from jaxcoll.parallel.schedules import PipelineSchedule, Task

# Of a half of a tick: whether there is anything to do, with which micro-batch and chunk, where its
# input is, and where the rank puts what it is sent meanwhile, both by the numbers of slots.
_COLUMNS = ("is_on", "micro", "chunk", "source", "cotangent", "target")
Half = dict[str, np.ndarray]  # column -> (ticks, ranks)


@dataclasses.dataclass(frozen=True)
class Section:
    """Ticks one after the other of the same kind.

    Attributes:
        forward: what each rank does, or None where no rank does anything.
        backward: the same.
    """

    forward: Half | None
    backward: Half | None


@dataclasses.dataclass(frozen=True)
class TickTable:
    """Everything that the ranks do.

    Attributes:
        sections: of ticks.
        num_inputs: slots for inputs of stages on a rank; one more is for what nobody needs.
        num_cotangents: slots for cotangents, likewise.
    """

    sections: tuple[Section, ...]
    num_inputs: int
    num_cotangents: int


def tick_table(
    schedule: PipelineSchedule, num_micro_batches: int, *, in_one: bool = False
) -> TickTable:
    """Returns a schedule's table.

    Nothing goes forward through the last stage but on its way back, where its result is needed.

    Args:
        schedule: which.
        num_micro_batches: m.
        in_one: one section of all ticks.
    """
    p, last = schedule.num_stages, schedule.num_virtual_stages - 1
    tasks = schedule.tasks(num_micro_batches)
    at = {(t.direction, t.chunk * p + t.rank, t.micro_batch): t.tick for t in tasks}
    num_ticks = 1 + max(task.tick for task in tasks)
    # A slot is taken from the tick after the one in which its value is sent.
    inputs = _Slots(p)
    cotangents = _Slots(p)
    for stage, micro in it.product(range(1, last + 1), range(num_micro_batches)):
        sent, used = at["forward", stage - 1, micro], at["backward", stage, micro]
        inputs.take(stage % p, (stage, micro), sent + 1, used)
    for stage, micro in it.product(range(last), range(num_micro_batches)):
        sent, used = at["backward", stage + 1, micro], at["backward", stage, micro]
        cotangents.take(stage % p, (stage, micro), sent + 1, used)
    slots, cotangent_slots = inputs.numbers(), cotangents.numbers()
    num_inputs, num_cotangents = _count(slots), _count(cotangent_slots)

    def empty() -> Half:
        half = {name: np.zeros((num_ticks, p), np.int32) for name in _COLUMNS}
        half["is_on"] = half["is_on"].astype(bool)
        return half

    halves = {"forward": empty(), "backward": empty()}
    halves["forward"]["target"][:] = num_inputs
    halves["backward"]["target"][:] = num_cotangents

    def enter(task: Task) -> None:
        stage = task.chunk * p + task.rank
        half, where = halves[task.direction], (task.tick, task.rank)
        half["is_on"][where] = True
        half["micro"][where] = task.micro_batch
        half["chunk"][where] = task.chunk
        half["source"][where] = slots.get((stage, task.micro_batch), num_inputs)
        of = (stage, task.micro_batch)
        half["cotangent"][where] = cotangent_slots.get(of, num_cotangents)
        if task.direction == "forward":
            to = slots[stage + 1, task.micro_batch]
            half["target"][task.tick, (task.rank + 1) % p] = to
        elif stage:
            to = cotangent_slots[stage - 1, task.micro_batch]
            half["target"][task.tick, (task.rank - 1) % p] = to

    for task in tasks:
        if task.direction == "backward" or task.chunk * p + task.rank != last:
            enter(task)
    sections = (Section(**halves),) if in_one else tuple(_sections(halves))
    return TickTable(sections, num_inputs, num_cotangents)


def _sections(halves: dict[str, Half]) -> Iterator[Section]:
    """Yields ticks before anything goes back, those with both, and those with nothing forward."""
    forward, backward = (
        np.flatnonzero(halves[name]["is_on"].any(axis=1)) for name in ("forward", "backward")
    )
    first_back, after_forward = backward[0], forward[-1] + 1 if forward.size else 0
    bounds = (0, min(first_back, after_forward), max(first_back, after_forward), backward[-1] + 1)
    is_both = first_back < after_forward
    kinds = ((True, False), (is_both, is_both), (False, True))
    for (start, end), kind in zip(it.pairwise(bounds), kinds, strict=True):
        if start < end and any(kind):
            yield Section(
                *(
                    _rows(halves[name], start, end) if is_on else None
                    for name, is_on in zip(("forward", "backward"), kind, strict=True)
                )
            )


def _rows(half: Half, start: int, end: int) -> Half:
    return {name: column[start:end] for name, column in half.items()}


def _count(slots: dict[tuple[int, int], int]) -> int:
    return 1 + max(slots.values(), default=-1)


class _Slots:
    """Gives values that are there at the same time on a rank slots of their own."""

    def __init__(self, num_ranks: int) -> None:
        self._wanted: list[list[tuple[int, int, tuple[int, int]]]] = [[] for _ in range(num_ranks)]

    def take(self, rank: int, name: tuple[int, int], first: int, last: int) -> None:
        self._wanted[rank].append((first, last, name))

    def numbers(self) -> dict[tuple[int, int], int]:
        numbers: dict[tuple[int, int], int] = {}
        for wanted in self._wanted:
            ends: list[int] = []  # of each slot the tick in which it is used for the last time
            for first, last, name in sorted(wanted):
                free = next((i for i, end in enumerate(ends) if end < first), len(ends))
                ends[free : free + 1] = [last]
                numbers[name] = free
        return numbers

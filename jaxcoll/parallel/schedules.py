"""Pipeline schedules as data: which rank works on which micro-batch, and when.

All ranks go through the same ticks. In a tick a rank sends one micro-batch forward through one of
its chunks of layers, and then one backward; what a tick makes is with the neighbour at the next.
A chunk on a rank is a virtual stage: chunk c of rank r of p ranks is stage `c * p + r`.

Source: GPipe, Huang et al. (2019); 1F1B, Narayanan et al., "PipeDream" (2019); interleaved stages,
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxcoll._errors import one_of

Kind = Literal["gpipe", "1f1b", "interleaved"]
Direction = Literal["forward", "backward"]
KINDS = ("gpipe", "1f1b", "interleaved")
_BACKWARD_COST = 2  # of a forward pass; for pictures


class Task(NamedTuple):
    """One micro-batch through one chunk of layers, in one direction.

    Attributes:
        tick: when.
        rank: where.
        direction: `"forward"` or `"backward"`.
        micro_batch: which.
        chunk: of the rank's; 0 unless stages are interleaved.
    """

    tick: int
    rank: int
    direction: Direction
    micro_batch: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """In which order the ranks of a pipeline work.

    `"gpipe"`: all micro-batches forward, then all backward. `"1f1b"`: a micro-batch goes back as
    soon as it can, so that a rank has at most `2 p - 1` under way, however many there are.
    `"interleaved"`: as that, with several chunks of layers on each rank, whose smaller ticks make a
    smaller bubble.

    Attributes:
        kind: `"gpipe"`, `"1f1b"` or `"interleaved"`.
        num_stages: p, the ranks.
        num_chunks: of layers on each rank; 2 or more if interleaved, else 1.

    Raises:
        ValueError: an unknown kind, or a number that does not go with it.

    Example:
        >>> print(jaxcoll.PipelineSchedule("1f1b", 2).text(3))
        rank 0  F0  F1  .   F2  B0  .   B1  B2
        rank 1  .   F0  B0  F1  B1  F2  B2  .
    """

    kind: Kind
    num_stages: int
    num_chunks: int = 0  # as many as usual

    def __post_init__(self) -> None:
        call = "PipelineSchedule"
        if self.kind not in KINDS:
            raise ValueError(one_of(call, "kind", self.kind, KINDS))
        if self.num_stages < 1:
            raise ValueError(f"{call}: num_stages: expected at least 1, got {self.num_stages}.")
        if not isinstance(self.num_chunks, int):
            raise ValueError(
                f"{call}: num_chunks: expected a number of chunks, got {self.num_chunks!r}."
            )
        interleaved = self.kind == "interleaved"
        chunks = self.num_chunks or (2 if interleaved else 1)
        if chunks < 1 or interleaved != (chunks > 1):
            wanted = "2 or more, the chunks of layers on each rank" if interleaved else "1"
            raise ValueError(
                f'{call}: num_chunks: expected {wanted}, with "{self.kind}", got {self.num_chunks}.'
            )
        object.__setattr__(self, "num_chunks", chunks)

    @property
    def num_virtual_stages(self) -> int:
        """How many chunks of layers there are on all ranks."""
        return self.num_stages * self.num_chunks

    def tasks(self, num_micro_batches: int) -> tuple[Task, ...]:
        """Returns what is done when, in the order of ticks and ranks; forward before backward.

        Raises:
            ValueError: fewer than one micro-batch.
        """
        if num_micro_batches < 1:
            raise ValueError(
                "PipelineSchedule.tasks: num_micro_batches: expected at least 1, got "
                f"{num_micro_batches}."
            )
        done: dict[tuple[Direction, int, int], int] = {}  # by virtual stage and micro-batch
        tasks: list[Task] = []
        queues = {
            direction: [list(self._order(num_micro_batches, direction))] * self.num_stages
            for direction in _DIRECTIONS
        }
        positions = {direction: [0] * self.num_stages for direction in _DIRECTIONS}
        total = num_micro_batches * self.num_virtual_stages
        tick = 0
        while len(tasks) < 2 * total:
            forward_is_over = sum(positions["forward"]) == total
            for direction in _DIRECTIONS:
                if direction == "backward" and self.kind == "gpipe" and not forward_is_over:
                    continue
                for rank in range(self.num_stages):
                    at = positions[direction][rank]
                    if at == len(queues[direction][rank]):
                        continue
                    chunk, micro = queues[direction][rank][at]
                    if self._is_ready(done, direction, chunk * self.num_stages + rank, micro, tick):
                        done[direction, chunk * self.num_stages + rank, micro] = tick
                        tasks.append(Task(tick, rank, direction, micro, chunk))
                        positions[direction][rank] += 1
            tick += 1
        return tuple(tasks)

    def _order(self, num_micro_batches: int, direction: Direction) -> Iterator[tuple[int, int]]:
        """Yields a rank's chunks and micro-batches: groups of p or more go through all chunks."""
        num_groups = max(1, num_micro_batches // self.num_stages)
        least, larger = divmod(num_micro_batches, num_groups)
        chunks = range(self.num_chunks)
        first = 0
        for group in range(num_groups):
            size = least + (group < larger)
            for chunk in chunks if direction == "forward" else reversed(chunks):
                yield from ((chunk, micro) for micro in range(first, first + size))
            first += size

    def _is_ready(
        self,
        done: dict[tuple[Direction, int, int], int],
        direction: Direction,
        stage: int,
        micro: int,
        tick: int,
    ) -> bool:
        """Whether what it begins with was made: in an earlier tick, or here and before."""
        if direction == "forward":
            return stage == 0 or done.get(("forward", stage - 1, micro), tick) < tick
        if stage == self.num_virtual_stages - 1:
            return done.get(("forward", stage, micro), tick + 1) <= tick
        return done.get(("backward", stage + 1, micro), tick) < tick

    def bubble(self, num_micro_batches: int) -> float:
        """Returns the part of the time, from 0 to 1, in which a rank has nothing to do.

        `(p - 1) / (m + p - 1)`, of interleaved stages with v chunks `(p - 1) / (v m + p - 1)`,
        where there are at least as many micro-batches as ranks.
        """
        columns = self._columns(num_micro_batches)
        cost = {"forward": 1, "backward": _BACKWARD_COST}
        time = sum(cost[direction] for _, direction in columns)
        busy = num_micro_batches * self.num_chunks * (1 + _BACKWARD_COST)
        return 1 - busy / time

    def peak_inflight(self, num_micro_batches: int) -> int:
        """Returns how many inputs of its chunks a rank holds at once, at most.

        Each as large as what passes between stages, from the forward to the backward pass: of
        `"gpipe"` m, of `"1f1b"` `min(m, 2 p - 1)`.
        """
        held: dict[int, int] = {}
        peak = 0
        for task in self.tasks(num_micro_batches):
            if task.direction == "forward":
                held[task.rank] = held.get(task.rank, 0) + 1
                peak = max(peak, held[task.rank])
            else:
                held[task.rank] -= 1
        return peak

    def peak_bytes(self, num_micro_batches: int, input_bytes: int) -> int:
        """Returns how many bytes these inputs have: the part of a step's memory that a schedule is.

        What else a step needs is the same however many micro-batches of that size there are.

        Args:
            num_micro_batches: m.
            input_bytes: of what passes between stages, of one micro-batch; of
                `jaxcoll.models.TransformerLM` examples x tokens x width x bytes of a number.

        Example:
            >>> jaxcoll.PipelineSchedule("1f1b", 4).peak_bytes(16, 8 * 1024 * 512 * 4)
            117440512
        """
        return self.peak_inflight(num_micro_batches) * input_bytes

    def _columns(self, num_micro_batches: int) -> list[tuple[int, Direction]]:
        """Returns the halves of ticks in which any rank does something."""
        # The tasks are in this order.
        return list(dict.fromkeys((t.tick, t.direction) for t in self.tasks(num_micro_batches)))

    def _cells(self, num_micro_batches: int) -> dict[tuple[int, Direction, int], Task]:
        return {
            (task.tick, task.direction, task.rank): task for task in self.tasks(num_micro_batches)
        }

    def text(self, num_micro_batches: int) -> str:
        """Returns a table: a row for each rank, time to the right, `F3` micro-batch 3 forward.

        Of interleaved stages the chunk stands behind a point: `F3.1`.
        """
        cells = self._cells(num_micro_batches)

        def cell(rank: int, column: tuple[int, Direction]) -> str:
            task = cells.get((*column, rank))
            if task is None:
                return "."
            chunk = f".{task.chunk}" if self.num_chunks > 1 else ""
            return f"{task.direction[0].upper()}{task.micro_batch}{chunk}"

        columns = self._columns(num_micro_batches)
        rows = [[cell(rank, column) for column in columns] for rank in range(self.num_stages)]
        width = max(len(text) for row in rows for text in row)
        lines = (
            f"rank {rank}  " + "  ".join(text.ljust(width) for text in row)
            for rank, row in enumerate(rows)
        )
        return "\n".join(line.rstrip() for line in lines)

    def draw(self, num_micro_batches: int, path: str | Path) -> None:
        """Draws `text` as an SVG file, a backward pass twice as long as a forward one."""
        cells, columns = self._cells(num_micro_batches), self._columns(num_micro_batches)
        unit, high, left = 26, 30, 60
        starts: list[int] = [left]
        for _, direction in columns:
            starts.append(starts[-1] + unit * (_BACKWARD_COST if direction == "backward" else 1))
        boxes: list[str] = []
        for rank in range(self.num_stages):
            y = 10 + rank * (high + 4)
            boxes.append(f'<text x="10" y="{y + high / 2 + 4:.0f}">rank {rank}</text>')
            for column, x, end in zip(columns, starts, starts[1:], strict=False):
                task = cells.get((*column, rank))
                boxes += _box(x, y, end - x, high, task, self.num_chunks)
        wide, tall = starts[-1] + 10, 10 + self.num_stages * (high + 4) + 26
        note = (
            f"{self.kind}, {num_micro_batches} micro-batches: light forward, dark backward, "
            f"{100 * self.bubble(num_micro_batches):.0f} % bubble, at most "
            f"{self.peak_inflight(num_micro_batches)} under way on a rank"
        )
        wide = max(wide, 20 + 7 * len(note))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" '
            'font-family="sans-serif" font-size="12">'
        )
        foot = f'<text x="10" y="{tall - 10}">{note}</text>'
        background = '<rect width="100%" height="100%" fill="white"/>'
        Path(path).write_text("\n".join([head, background, *boxes, foot, "</svg>"]) + "\n")


_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
# Hues that neighbours can be told apart by; light and dark are the directions, chunks the borders.
_HUES = (210, 30, 120, 280, 0, 180, 50, 320)


def _box(x: int, y: int, wide: int, high: int, task: Task | None, num_chunks: int) -> Sequence[str]:
    if task is None:
        return [f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" fill="#f2f2f2"/>']
    hue = _HUES[task.micro_batch % len(_HUES)]
    light = 82 if task.direction == "forward" else 62
    label = f"{task.micro_batch}" + (f".{task.chunk}" if num_chunks > 1 else "")
    return [
        f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" fill="hsl({hue}, 60%, {light}%)" '
        'stroke="#444"/>',
        f'<text x="{x + wide / 2:.0f}" y="{y + high / 2 + 4:.0f}" text-anchor="middle">'
        f"{label}</text>",
    ]

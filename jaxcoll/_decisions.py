"""What is noted while a program is traced and lowered: decisions, and likely mistakes.

`jaxcoll.explain` reads it, so that what it says is what runs.
"""

import collections
import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from jaxcoll._config import config, logger

Path = Literal["native", "lax", "two-level", "two-step"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What one collective equation asked for and what it got.

    Attributes:
        op: our name of the collective: `all_reduce`, `all_gather`, ...
        reduction: `sum`, `mean`, ...; None for collectives that only move data.
        axes: the axes of the call.
        shapes: of the operands, one a leaf, as one rank has them.
        dtypes: of the operands, one a leaf.
        bytes: of all operands of one rank.
        group_size: ranks that communicate with each other; None outside of a manual region.
        path: `native`; `lax`; `two-level`, native on each host and XLA's own between hosts; or
            `two-step`, another collective of ours and a matmul of XLA's.
        reason: why not native; empty where it is.
        source: the user's `file:line (function)`.
        called: `jaxcoll` or `jax.lax`: whose function the user or a library called.
        site: the id of the native call in the program; None on lax.
        platform: what the program is for: `cuda`, or `cpu` for all others.
    """

    op: str
    reduction: str | None
    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    bytes: int
    group_size: int | None
    path: Path
    reason: str
    source: str
    called: Literal["jaxcoll", "jax.lax"]
    site: int | None
    platform: Literal["cpu", "cuda"] = "cpu"
    by_rank: bool = True  # of a native reduction

    @property
    def order(self) -> str:
        """In which order a reduction combines the ranks; empty where nothing is reduced."""
        if self.reduction is None:
            return ""
        return {
            "native": "by rank" if self.by_rank else "NCCL's",
            "two-level": "by rank on each host, then XLA's",
            "two-step": "that of the steps",
        }.get(self.path, "XLA's")


@dataclasses.dataclass(eq=False)  # one is found by identity
class Recording:
    """What was noted, in order."""

    decisions: list[Decision] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


class _Active(threading.local):
    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.is_silent = False


_active = _Active()

_latest: collections.deque[str] = collections.deque(maxlen=32)


def note(decision: Decision) -> None:
    """Notes which path a collective took."""
    if _active.is_silent:
        return
    for recording in _active.recordings:
        recording.decisions.append(decision)
    axes = ", ".join(f'"{axis}"' for axis in decision.axes) or "no axis"
    why = f": {decision.reason}" if decision.reason else ""
    line = f"{decision.op} over {axes}, called at {decision.source}: {decision.path}{why}"
    _latest.append(line)
    logger.info("jaxcoll: %s", line)


def latest() -> str:
    """Returns the collectives that were lowered last in this process, a line each."""
    if not _latest:
        return "no collectives were lowered"
    return "\n".join(["the collectives that were lowered last:", *_latest])


def warn(text: str) -> None:
    """Notes a likely mistake, or logs it where nobody records.

    Raises:
        ValueError: `config.strict` is on, and nobody records.
    """
    for recording in _active.recordings:
        if text not in recording.warnings:
            recording.warnings.append(text)
    if not _active.recordings:
        if config.strict:
            raise ValueError(text)
        logger.warning("jaxcoll: %s", text)


@contextmanager
def recording() -> Iterator[Recording]:
    """Records what this thread notes inside."""
    new = Recording()
    _active.recordings.append(new)
    try:
        yield new
    finally:
        _active.recordings.remove(new)


def is_recording() -> bool:
    """Tells whether somebody records what this thread notes; what is lowered then is not run."""
    return bool(_active.recordings)


@contextmanager
def silence() -> Iterator[None]:
    """Notes no decisions inside."""
    before, _active.is_silent = _active.is_silent, True
    try:
        yield
    finally:
        _active.is_silent = before

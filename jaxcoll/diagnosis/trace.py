"""`trace`: a timeline of the collectives of all ranks while a block runs."""

import atexit
import collections
import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxcoll import _compat
from jaxcoll._config import logger
from jaxcoll._steps import await_steps
from jaxcoll.diagnosis import black_box, dumps, picture, timeline, watcher
from jaxcoll.diagnosis.black_box import CALL, BlackBox
from jaxcoll.diagnosis.records import dumps_of

# Tells a process of `jaxcoll run` the path of the timeline.

# Faster than a device makes the 4,096 calls that its black box keeps.
_PERIOD_S = 0.002
# How long the first process waits for what the others have seen.
_PARTS_S = 30.0
# How often this process has traced to a path; the others as often.
_counts: collections.Counter[Path] = collections.Counter()


@dataclasses.dataclass(frozen=True)
class Parts:
    """The files in which the processes leave what they have seen, for one timeline.

    Attributes:
        path: of the timeline.
        job: its name.
        number: which timeline of the job at that path, from 1; 0: of the whole script.
    """

    path: Path
    job: str
    number: int = 0

    def _of_job(self) -> str:
        return f"{self.path.name}.{hashlib.sha256(self.job.encode()).hexdigest()[:16]}."

    def _file(self, process: int) -> Path:
        return self.path.with_name(f"{self._of_job()}{self.number}.process_{process}")

    def write(self, process: int, part: Mapping[str, Any]) -> None:
        """Writes what a process has seen where the first one looks for it."""
        file = self._file(process)
        hidden = file.with_name(f".{file.name}.{os.getpid()}")
        hidden.write_text(json.dumps(part))
        hidden.replace(file)

    def write_of_silent(self, since_ns: int) -> None:
        """Writes the last calls, since a time, of processes that can't do so any more."""
        for process, box in dumps.silent().items():
            calls = box.calls()
            if not self._file(process).exists():
                self.write(process, _part(box, calls[calls["arrived"] >= since_ns]))

    def read(self, count: int, limit_s: float = 0.0) -> dict[int, dict[str, Any]]:
        """Returns what all processes have seen; waits for those that lack.

        Removes the files, and what other jobs have left at this path.
        """
        until = time.monotonic() + limit_s
        files = {process: self._file(process) for process in range(count)}
        while time.monotonic() < until and not all(file.exists() for file in files.values()):
            time.sleep(0.02)
        parts = {}
        for process, file in files.items():
            try:
                parts[process] = json.loads(file.read_text())
                file.unlink()
            except FileNotFoundError:
                logger.warning("jaxcoll: trace: process %d has left nothing", process)
        for file in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.process_*"):
            if not file.name.startswith(self._of_job()):
                file.unlink(missing_ok=True)
        return parts


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes a timeline of all native collectives inside the block, for Perfetto.

    All processes of a job call it alike, with the same path in a folder that they share; process 0
    writes the file when all have left the block; of one of its host that was killed it has the last
    4,096 calls of each device. `jaxcoll run --trace PATH` does so for a whole script. One track for
    each device: a slice for each call, with waiting (for the ranks that had not come) told from
    moving, its operands and source line, and arrows from the rank that came last. Beside it a
    picture, `.png`, where matplotlib is installed; and tables are printed: what a step of each
    device is made of, who the others wait for, and the slowest steps. A step is an execution of a
    program, on all devices whose calls met in it. On one host all clocks are one; over several
    hosts they are as far apart as a message takes from one to another.

    Cost: a thread looks every 2 ms for new calls, and keeps about 100 bytes of each.

    Args:
        path: the file, usually `.json`; https://ui.perfetto.dev and chrome://tracing open it.

    Raises:
        RuntimeError: there is no native extension: nothing to record.
        IsADirectoryError: the path is a folder's; before the block runs.
        OSError: the file can't be written.

    Example:
        >>> with jaxcoll.trace("timeline.json"):
        ...     for batch in batches:
        ...         state, metrics = train_step(state, batch)
        ...     jax.block_until_ready(state)
    """
    box = black_box.own()
    if box is None:
        raise RuntimeError("trace(path): there are no records: no native extension.")
    watcher.start()
    path = Path(path).absolute()
    if path.is_dir():
        raise IsADirectoryError(
            f"trace(path): expected a file, got {str(path)!r}, which is a folder. Name a file in "
            f"it, such as {str(path / 'timeline.json')!r}."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    _counts[path] += 1
    collector = Collector(box)
    collector.start()
    patience_s = 0.0  # after an error nobody is waited for
    try:
        yield
        patience_s = _PARTS_S
    finally:
        if collector.is_of_this_process():
            _leave(collector, path, patience_s)


def _leave(collector: "Collector", path: Path, patience_s: float) -> None:
    part = collector.end()
    process, count = _compat.process_id_and_count()
    if count == 1:
        finish({0: part}, path)
        return
    parts = Parts(path, dumps.job(), _counts[path])
    parts.write(process, part)
    if process == 0:
        parts.write_of_silent(collector.since_ns)
        finish(parts.read(count, patience_s), path)


def follow(path: str) -> None:
    """Collects until this process ends, and leaves what it has seen for `jaxcoll run`."""
    box = black_box.own()
    if box is None:
        logger.warning("jaxcoll: --trace: no native extension: there is nothing to record")
        return
    collector = Collector(box)
    collector.start()

    def leave() -> None:
        if not collector.is_of_this_process():
            return
        await_steps()
        process, _ = _compat.process_id_and_count()
        parts = Parts(Path(path), dumps.job())
        parts.write(process, collector.end())
        parts.write_of_silent(collector.since_ns)

    atexit.register(leave)


class Collector(threading.Thread):
    """Keeps the calls of this process from now on."""

    def __init__(self, box: BlackBox) -> None:
        super().__init__(name="jaxcoll-trace", daemon=True)
        self._box = box
        self._pid = os.getpid()
        self._stops = threading.Event()
        self.since_ns = time.monotonic_ns()
        # By device, up to where all calls have ended.
        self._done = {int(call["device"]): int(call["sequence"]) for call in box.calls()}
        self._kept: list[np.ndarray] = []
        self._lost = 0

    def is_of_this_process(self) -> bool:
        """Tells whether it is no copy in a forked child, whose end is not the process's."""
        return os.getpid() == self._pid

    def run(self) -> None:
        """Looks for new calls until the end."""
        while not self._stops.wait(_PERIOD_S):
            self._collect()

    def _collect(self) -> None:
        calls = self._box.calls(self._done)
        for device in np.unique(calls["device"]):
            own = calls[calls["device"] == device]
            # Up to the first call that has not ended; the others are looked at again.
            open_ones = np.flatnonzero(own["resumed"] == 0)
            self._keep(own[: open_ones[0]] if len(open_ones) else own)

    def _keep(self, calls: np.ndarray) -> None:
        """Keeps calls of one device, and counts those that were overwritten before them."""
        if len(calls):
            device, last = int(calls["device"][0]), int(calls["sequence"][-1])
            self._lost += last - self._done.get(device, 0) - len(calls)
            self._done[device] = last
            self._kept.append(calls)

    def end(self) -> dict[str, Any]:
        """Ends the collection; returns it as a dump has it."""
        self._stops.set()
        self.join()
        self._collect()
        rest = self._box.calls(self._done)
        for device in np.unique(rest["device"]):
            self._keep(rest[rest["device"] == device])
        calls = np.concatenate([np.empty(0, CALL), *self._kept])
        if self._lost:
            logger.warning("jaxcoll: trace: %d calls came too fast to be seen", self._lost)
        return _part(self._box, calls)


def _part(box: BlackBox, calls: np.ndarray) -> dict[str, Any]:
    """Returns calls of a process as a dump has them."""
    return {
        **dumps.contents(box),
        "calls": {"columns": list(CALL.names or ()), "rows": calls.tolist()},
        "sites": {str(s): t for s, t in box.sites().items()},
        "state": "ended",
    }


def finish(parts: dict[int, dict[str, Any]], path: Path) -> None:
    """Writes the timeline and its picture, and prints the tables."""
    read = dumps_of(parts)
    timeline.write(read, path)
    found, steps = timeline.rows(read), timeline.steps(read)
    print(timeline.table(found), timeline.slowest_table(steps), sep="\n", flush=True)
    said = f"timeline: {path}"
    try:
        picture.draw(found, steps, path.with_suffix(".png"))
        said += f", picture: {path.with_suffix('.png')}"
    except ModuleNotFoundError:
        said += " (no picture: matplotlib is not installed)"
    print(said, flush=True)

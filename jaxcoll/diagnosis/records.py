"""The dumps of a job, read: its calls, which of them meet, and who was to come."""

import collections
import dataclasses
import functools as ft
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxcoll.diagnosis.dumps import FORMAT

# As csrc/host/exchange.h, Exchange::Execution, and csrc/host/meeting.cc, FirstExecution.
_OCCURRENCE_BITS = 40
# The paths of calls on GPUs, as their sites have them.
OVER_NCCL = "native, over NCCL"
OVER_PEERS = "native, over peer memory"
# Calls come together if what is before them is so many times longer than what is between them.
_TOGETHER = 4


@dataclasses.dataclass(frozen=True)
class Place:
    """A device of the job."""

    process: int
    device: int  # of the process


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one device, as its dump has it; times in ns of the time of day."""

    place: Place
    sequence: int
    site: int
    group: int
    rank: int
    execution: int
    run: int
    arrived: int
    met: int
    moved: int
    resumed: int

    @property
    def key(self) -> tuple[int, ...]:
        """The same for all calls that meet."""
        if self.execution > 0:
            return (self.group, self.site, self.execution)
        return (self.group, self.site, self.execution, self.place.process)

    @property
    def epoch(self) -> int:
        """How often the processes had attached when it was made; 0: a call within a process."""
        return self.execution >> _OCCURRENCE_BITS if self.execution > 0 else 0

    @property
    def occurrence(self) -> int:
        """Of a call that meets others: which one of its series, from 1."""
        return abs(self.execution) & ((1 << _OCCURRENCE_BITS) - 1)

    @property
    def series(self) -> tuple[int, ...]:
        """The same for calls that each rank makes one after another, and counts."""
        counted = abs(self.execution) >> _OCCURRENCE_BITS
        where = () if self.execution > 0 else (self.place.process,)
        return (self.group, self.site, counted, *where)

    @property
    def is_open(self) -> bool:
        """Whether it waits, or waited until it failed."""
        return not self.moved and self.execution != 0


@dataclasses.dataclass
class Dumps:
    """The dumps of a job."""

    by_process: dict[int, dict[str, Any]]
    calls: list[Call]
    offsets: dict[int, int] = dataclasses.field(default_factory=dict)  # of clocks, by process

    def now(self, process: int) -> int:
        """Returns when a process has dumped, on the clock of the calls."""
        return int(self.by_process[process]["clock"]["now_ns"]) + self.offsets[process]

    @ft.cached_property
    def by_series(self) -> dict[tuple[int, ...], list[Call]]:
        """The calls of each series."""
        found: dict[tuple[int, ...], list[Call]] = collections.defaultdict(list)
        for call in self.calls:
            found[call.series].append(call)
        return found

    @property
    def num_processes(self) -> int:
        """Those of the job, whether or not they left dumps."""
        return max(dump["num_processes"] for dump in self.by_process.values())

    def site(self, site: int) -> dict[str, Any]:
        """Returns what some process says of a site; of alike calls, of the one described last."""
        for dump in self.by_process.values():
            if known := dump["sites"].get(str(site)):
                return known[-1]
        return {"text": "an unknown call"}

    def site_text(self, site: int, process: int | None = None) -> str:
        """Returns what a process, or else some, says of a site: of alike calls all."""
        own = {p: dump for p, dump in self.by_process.items() if p == process}
        for dump in (*own.values(), *self.by_process.values()):
            if known := dump["sites"].get(str(site)):
                return ", or ".join(each["text"] for each in known)
        return "an unknown call"

    def ranks_of(self, call: Call) -> int:
        """Returns how many ranks the group of a call has."""
        known = [c.rank for c in self.calls if c.group == call.group]
        return max(self.site(call.site).get("ranks", 0), *(rank + 1 for rank in known))

    def place_of(self, call: Call, rank: int) -> Place | None:
        """Returns where a rank of the group of a call is, if anything tells."""
        for other in self.calls:
            is_it = other.group == call.group and other.rank == rank
            if is_it and (other.execution > 0 or other.place.process == call.place.process):
                return other.place
        site = self.site(call.site)
        ranks, devices, processes, ordinals = (
            site.get(name, ()) for name in ("ranks", "devices", "processes", "ordinals")
        )
        for i in range(0, len(devices), ranks or 1):
            if _hash(devices[i : i + ranks]) == call.group:
                process = processes[i + rank] if processes else call.place.process
                return Place(process, ordinals[i + rank])
        return None


def late(calls: Sequence[Call]) -> tuple[int, list[Call]]:
    """Returns of calls that met when the others had come, and those that came late after these.

    That is the last one; or several that came together after the longest pause between arrivals, as
    ranks of a slow process do: at most half, for where most come after one, that one is early.
    """
    calls = sorted(calls, key=lambda call: call.arrived)
    pauses = [
        (calls[i].arrived - calls[i - 1].arrived, i)
        for i in range(len(calls) - len(calls) // 2, len(calls))
    ]
    pause, first = max(pauses)
    if pause < _TOGETHER * (calls[-1].arrived - calls[first].arrived):
        first = len(calls) - 1
    return calls[first - 1].arrived, calls[first:]


def read(paths: Sequence[str | Path]) -> Dumps:
    """Reads dumps: files, or folders with some.

    Raises:
        ValueError: there are none, or a file is none.
    """
    folders = [Path(path) for path in paths]
    for path in folders:
        if not path.exists():
            raise ValueError(
                f"doctor: {path}: no such folder or file; expected one with dumps, as an error or "
                "jaxcoll.dump() names it."
            )
    files = [
        file
        for path in folders
        for file in (sorted(path.glob("process_*.json")) if path.is_dir() else [path])
    ]
    if not files:
        raise ValueError(f"doctor: no dumps (process_*.json) in {', '.join(map(str, paths))}.")
    dumps: dict[int, dict[str, Any]] = {}
    for file in files:
        try:
            dump = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} can't be read: {error}") from error
        if not isinstance(dump, dict) or dump.get("format") != FORMAT:
            raise ValueError(f'{file}: expected a "{FORMAT}".')
        dumps[dump["process"]] = dump
    # A folder may have some of an older job.
    newest = max(dumps.values(), key=lambda dump: dump["clock"]["wall_ns"])
    return dumps_of({p: dump for p, dump in dumps.items() if dump["job"] == newest["job"]})


def dumps_of(dumps: dict[int, dict[str, Any]]) -> Dumps:
    """Returns dumps by process, with their calls on one clock: that of the day.

    Processes of one boot of a host have one clock, and so get one offset to the day's. The clocks
    of several hosts are brought to that of the first by the moment at which their processes met, if
    the dumps have that; else each host's day counts.
    """
    first = next(iter(dumps.values()))["clock"]
    have_met = all(dump["clock"].get("met_ns") for dump in dumps.values())
    of_boot: dict[Any, int] = {}
    offsets = {}
    for process, dump in dumps.items():
        clock = dump["clock"]
        offset = clock["wall_ns"] - clock["now_ns"]
        if have_met:
            offset = first["wall_ns"] - first["now_ns"] + first["met_ns"] - clock["met_ns"]
        offsets[process] = of_boot.setdefault(dump.get("boot") or process, offset)
    calls = [call for process, dump in dumps.items() for call in _calls(dump, offsets[process])]
    return Dumps(dumps, calls, offsets)


def _calls(dump: Mapping[str, Any], offset: int) -> Iterator[Call]:
    columns = dump["calls"]["columns"]
    for row in dump["calls"]["rows"]:
        known = dict(zip(columns, row, strict=True))
        times = {
            name: known[name] + offset if known[name] else 0
            for name in ("arrived", "met", "moved", "resumed")
        }
        names = ("sequence", "site", "group", "rank", "execution", "run")
        place = Place(dump["process"], known["device"])
        yield Call(place, **{name: known[name] for name in names}, **times)


def _hash(devices: Iterable[int]) -> int:
    """As csrc/core/group_id.h: FNV-1a."""
    value = 0xCBF29CE484222325
    for device in devices:
        for byte in device.to_bytes(8, "little", signed=True):
            value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return value

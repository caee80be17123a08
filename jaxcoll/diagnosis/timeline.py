"""The timeline of a job from its dumps: for Perfetto, and as tables."""

import collections
import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxcoll.diagnosis.records import Call, Dumps, Place, late

# Tracks of a device, for calls that are under way at the same time.
_LANES = 100
# Steps to be shown on their own.
_SLOWEST = 3
_FUSED = ("all_gather_matmul", "matmul_reduce_scatter")  # which multiply meanwhile


@dataclasses.dataclass(frozen=True)
class Row:
    """What the calls of one device took, in the steps of a timeline: executions of programs.

    Attributes:
        place: the device.
        steps: how many.
        calls: of all steps.
        step_ms: the median time from a step's first call to that of the next step.
        waiting_ms: of a step, the mean time in which calls waited for ranks that had not come.
        moving_ms: of a step, the mean time between the last arrival and the end of calls.
        exposed: the share of the time in which the device was in some call, but for the time in
            which collective matmuls multiply. What XLA computes beside a call is not seen: the
            share is at most this.
        overlap: the share of the time of calls that passed beside other calls or a matmul's own
            work, and so did not add to `exposed`.
        last: the share of calls to which the device came last, by itself or together with others.
        late_ms: by how much it then came later than the rest, the sum over all steps.
    """

    place: Place
    steps: int
    calls: int
    step_ms: float
    waiting_ms: float
    moving_ms: float
    exposed: float
    overlap: float
    last: float
    late_ms: float


@dataclasses.dataclass(frozen=True)
class Step:
    """A step: an execution of a program, on all devices whose calls met in it.

    Attributes:
        number: from 1, in the timeline, in the order of ends.
        ms: to the end of its last call from that of the step before, of whichever of its devices
            had ended that first, or, of the first step, from its first call: what delays a call is
            of the call's step.
        exposed: the share of this time in which a device was in calls, the mean over its devices.
        overlap: the share of the time of its calls that passed beside others of them on the device,
            or beside a matmul's own work.
        last: the device that came last by most, over the calls of the step; None: nobody waited.
        late_ms: how much later than the first one, over these calls.
    """

    number: int
    ms: float
    exposed: float
    overlap: float
    last: Place | None
    late_ms: float


def met(dumps: Dumps) -> dict[tuple[int, ...], list[Call]]:
    """Returns the calls that met, by their key, those that arrived first ahead."""
    found: dict[tuple[int, ...], list[Call]] = collections.defaultdict(list)
    for call in sorted(dumps.calls, key=lambda call: call.arrived):
        if call.execution:
            found[call.key].append(call)
    return found


class Span(NamedTuple):
    """A call that is whole, and its times in ns.

    Attributes:
        call: which.
        met: when all its ranks had come.
        end: until when its device was in it: a collective matmul multiplies once all have come.
    """

    call: Call
    met: int
    end: int


def spans(dumps: Dumps) -> list[Span]:
    """Returns the calls that are whole, those that arrived first ahead."""
    last_of = {key: calls[-1] for key, calls in met(dumps).items()}
    found = []
    for call in sorted(dumps.calls, key=lambda call: call.arrived):
        if call.moved and call.resumed:
            last = last_of.get(call.key, call)
            meeting = min(max(last.arrived, call.arrived), call.resumed)
            op, *_ = dumps.site(call.site).get("op", "").split() or [""]
            found.append(Span(call, meeting, meeting if op in _FUSED else call.resumed))
    return found


# ---- Perfetto ------------------------------------------------------------------------------------


def events(dumps: Dumps) -> Iterator[dict[str, Any]]:
    """Yields the events of the Trace Event Format: a track for each device, times in us.

    A call is a slice, in it one of waiting, until its last rank came, and one of moving. Arrows
    lead from the last rank's arrival to where the others went on.
    """
    begin = min((call.arrived for call in dumps.calls), default=0)

    def us(ns: int) -> float:
        return (ns - begin) / 1000

    for process, dump in dumps.by_process.items():
        name = f"process {process} ({dump['host']}, pid {dump['pid']})"
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    tracks = _tracks(dumps.calls)
    for place, lane in sorted({(c.place, tracks[id(c)]) for c in dumps.calls}, key=str):
        name = f"device {place.device}" + (f", beside {lane}" if lane else "")
        track = {"pid": place.process, "tid": _LANES * place.device + lane}
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": name}}
    for number, calls in enumerate(met(dumps).values()):
        last = calls[-1]
        for call in calls:
            track = {
                "pid": call.place.process,
                "tid": _LANES * call.place.device + tracks[id(call)],
            }
            site = dumps.site(call.site)
            op = site.get("op", site["text"])
            end = call.resumed or max(c.resumed or c.arrived for c in calls)
            meeting = min(max(last.arrived, call.arrived), end) if call.moved else end
            details = {
                **{
                    key: site[key]
                    for key in ("operands", "bytes", "axes", "parameters", "path", "source")
                    if key in site
                },
                "rank": call.rank,
                "last to come": f"rank {last.rank}",
            }
            yield _slice(op, "call", track, us(call.arrived), us(end), details)
            if meeting > call.arrived:
                yield _slice("waiting", "waiting", track, us(call.arrived), us(meeting), {})
            if end > meeting:
                yield _slice("moving", "moving", track, us(meeting), us(end), {})
            if call is not last and call.moved:
                arrow = {"name": "came last", "cat": "arrival", "id": f"{number}.{call.rank}"}
                source = {
                    "pid": last.place.process,
                    "tid": _LANES * last.place.device + tracks[id(last)],
                }
                yield {"ph": "s", **arrow, **source, "ts": us(last.arrived)}
                yield {"ph": "f", "bp": "e", **arrow, **track, "ts": us(meeting)}


def _slice(
    name: str,
    category: str,
    track: Mapping[str, int],
    begin_us: float,
    end_us: float,
    details: Mapping[str, Any],
) -> dict[str, Any]:
    times = {"ts": begin_us, "dur": end_us - begin_us}
    return {"ph": "X", "name": name, "cat": category, **track, **times, "args": dict(details)}


def _tracks(calls: Iterable[Call]) -> dict[int, int]:
    """Returns a track for each call, by its id: calls of one track don't overlap."""
    ends: dict[Place, list[int]] = collections.defaultdict(list)
    found = {}
    for call in sorted(calls, key=lambda call: call.arrived):
        lanes = ends[call.place]
        free = (i for i, end in enumerate(lanes) if end <= call.arrived)
        lane = next(free, len(lanes))
        lanes[lane : lane + 1] = [call.resumed or 1 << 62]
        found[id(call)] = min(lane, _LANES - 1)
    return found


def write(dumps: Dumps, path: Path) -> None:
    """Writes the timeline that Perfetto and chrome://tracing open."""
    content = {"traceEvents": list(events(dumps)), "displayTimeUnit": "ms"}
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content))
    part.replace(path)


# ---- Tables --------------------------------------------------------------------------------------


def rows(dumps: Dumps) -> list[Row]:
    """Returns a row for each device; steps and calls that are whole count."""
    late_ns: dict[Place, int] = collections.Counter()
    num_last: dict[Place, int] = collections.Counter()
    for calls in _meetings(dumps):
        others_ns, those = late(calls)
        for call in those:
            num_last[call.place] += 1
            late_ns[call.place] += call.arrived - others_ns
    found = []
    for place, own in _by_place(spans(dumps)).items():
        begins = sorted({span.call.run: span.call.arrived for span in reversed(own)}.values())
        whole = _end(own) - own[0].call.arrived
        covered, total = _covered(own), _total(own)
        waiting = sum(span.met - span.call.arrived for span in own)
        found.append(
            Row(
                place=place,
                steps=len(begins),
                calls=len(own),
                step_ms=statistics.median(_gaps(begins, own)) * 1e-6,
                waiting_ms=waiting / len(begins) * 1e-6,
                moving_ms=(total - waiting) / len(begins) * 1e-6,
                exposed=covered / whole if whole else 0.0,
                overlap=1 - covered / total if total else 0.0,
                last=num_last[place] / len(own),
                late_ms=late_ns[place] * 1e-6,
            )
        )
    return found


def steps(dumps: Dumps) -> list[Step]:
    """Returns the steps, in the order of their ends."""
    step_of = _joined(dumps)
    parts: dict[_Run, list[Span]] = collections.defaultdict(list)
    for span in spans(dumps):
        parts[step_of[_run(span.call)]].append(span)
    late_ns: dict[_Run, dict[Place, int]] = collections.defaultdict(collections.Counter)
    for first, *_, last in _meetings(dumps):
        if last.arrived > first.arrived and last.moved and last.resumed:
            late_ns[step_of[_run(last)]][last.place] += last.arrived - first.arrived
    found = []
    before: dict[Place, int] = {}  # when the last step that it took part in had ended, everywhere
    for step, part in sorted(parts.items(), key=lambda part: _end(part[1])):
        own_of = _by_place(part)
        end = _end(part)
        begin = min(before.get(place, own[0].call.arrived) for place, own in own_of.items())
        before |= dict.fromkeys(own_of, end)
        total = _total(part)
        late = late_ns[step]
        last = max(late, key=late.__getitem__, default=None)
        found.append(
            Step(
                number=len(found) + 1,
                ms=(end - begin) * 1e-6,
                exposed=statistics.fmean(_covered(own, begin) for own in own_of.values())
                / max(1, end - begin),
                overlap=1 - sum(map(_covered, own_of.values())) / total if total else 0.0,
                last=last,
                late_ms=late[last] * 1e-6 if last else 0.0,
            )
        )
    return found


# An execution of a program in a process.
_Run = tuple[int, int]


def _run(call: Call) -> _Run:
    return call.place.process, call.run


def _joined(dumps: Dumps) -> dict[_Run, _Run]:
    """Returns for each execution in a process one that stands for all that calls of it met.

    Processes number theirs for themselves, and one can make more than another.
    """
    up = {_run(call): _run(call) for call in dumps.calls}

    def root(run: _Run) -> _Run:
        while up[run] != run:
            up[run] = run = up[up[run]]
        return run

    for first, *others in _meetings(dumps):
        for other in others:
            up[root(_run(other))] = root(_run(first))
    return {run: root(run) for run in up}


def _by_place(of: Iterable[Span]) -> dict[Place, list[Span]]:
    """Returns the calls of each device, in their order."""
    found: dict[Place, list[Span]] = collections.defaultdict(list)
    for span in of:
        found[span.call.place].append(span)
    return dict(sorted(found.items(), key=lambda item: (item[0].process, item[0].device)))


def _meetings(dumps: Dumps) -> list[list[Call]]:
    """Returns the calls that met others, those that arrived first ahead."""
    return [calls for calls in met(dumps).values() if len(calls) > 1]


def _end(of: Iterable[Span]) -> int:
    return max(span.call.resumed for span in of)


def _total(of: Iterable[Span]) -> int:
    """Returns how long calls took, each for itself."""
    return sum(span.call.resumed - span.call.arrived for span in of)


def _gaps(begins: list[int], own: list[Span]) -> list[int]:
    ends = [*begins[1:], _end(own)]
    gaps = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return gaps[:-1] or gaps  # the last one has no next step


def _covered(own: list[Span], since: int = 0) -> int:
    """Returns for how much of the time since then a device was in one call or several."""
    covered, until = 0, since
    for span in own:  # in the order of arrivals
        covered += max(0, span.end - max(span.call.arrived, until))
        until = max(until, span.end)
    return covered


def table(found: list[Row]) -> str:
    """Returns the rows as text."""
    lines = [
        "process device  steps    calls  step ms  waiting   moving  exposed  overlap  "
        "last to come  late ms"
    ]
    lines += [
        f"{row.place.process:7} {row.place.device:6} {row.steps:6} {row.calls:8} "
        f"{row.step_ms:8.3f} {row.waiting_ms:8.3f} {row.moving_ms:8.3f} {row.exposed:8.0%} "
        f"{row.overlap:8.0%} {row.last:13.0%} {row.late_ms:8.1f}"
        for row in found
    ]
    return "\n".join(lines)


def slowest(found: list[Step]) -> list[Step]:
    """Returns the few steps that took longest, the longest first."""
    return sorted(found, key=lambda step: -step.ms)[:_SLOWEST]


def slowest_table(found: list[Step]) -> str:
    """Returns the slowest of these steps as text."""
    lines = ["slowest steps  step ms  exposed  overlap  last to come  late ms"]
    lines += [
        f"{step.number:13} {step.ms:8.3f} {step.exposed:8.0%} {step.overlap:8.0%} "
        f"{name_of(step.last) if step.last else '-':>13} {step.late_ms:8.1f}"
        for step in slowest(found)
    ]
    return "\n".join(lines)


def name_of(place: Place) -> str:
    """Returns a device as `process.device`."""
    return f"{place.process}.{place.device}"

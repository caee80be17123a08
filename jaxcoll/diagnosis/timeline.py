"""The timeline of a job from its dumps: for Perfetto, as a table, and as a picture."""

import collections
import dataclasses
import itertools as it
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxcoll.diagnosis.records import Call, Dumps, Place

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
        last: the share of calls to which the device came last.
        late_ms: by how much it then came later than the one before it, the sum over all steps.
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
    """A step over all devices: as the n-th one counts the n-th execution of a program on each.

    Attributes:
        number: from 1, in the timeline.
        ms: to the end of its last call from that of the step before, or, of the first step, from
            its first call: what delays a call is of the call's step.
        exposed: the share of this time in which a device was in calls, the mean over devices.
        last: the device that came last by most, over the calls of the step; None: nobody waited.
        late_ms: how much later than the first one, over these calls.
    """

    number: int
    ms: float
    exposed: float
    last: Place | None
    late_ms: float


def met(dumps: Dumps) -> dict[tuple[int, ...], list[Call]]:
    """Returns the calls that met, by their key, those that arrived first ahead."""
    found: dict[tuple[int, ...], list[Call]] = collections.defaultdict(list)
    for call in sorted(dumps.calls, key=lambda call: call.arrived):
        if call.execution:
            found[call.key].append(call)
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
                    for key in ("operands", "bytes", "axes", "path", "source")
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


# ---- Table and picture ---------------------------------------------------------------------------


def rows(dumps: Dumps) -> list[Row]:
    """Returns a row for each device; steps and calls that are whole count."""
    meetings = _meetings(dumps)
    last_of = {calls[-1].key: calls[-1] for calls in meetings}
    late_ns: dict[Place, int] = collections.Counter()
    num_last: dict[Place, int] = collections.Counter()
    for calls in meetings:
        num_last[calls[-1].place] += 1
        late_ns[calls[-1].place] += calls[-1].arrived - calls[-2].arrived
    found = []
    for place, own in _by_place(dumps).items():
        begins = [calls[0].arrived for calls in _steps_of(own)]
        span = max(call.resumed for call in own) - own[0].arrived
        waiting = moving = 0
        for call in own:
            meeting = _meeting(call, last_of)
            waiting += meeting - call.arrived
            moving += call.resumed - meeting
        covered = _covered(_spans(own, last_of, dumps))
        total = waiting + moving
        found.append(
            Row(
                place=place,
                steps=len(begins),
                calls=len(own),
                step_ms=statistics.median(_gaps(begins, own)) * 1e-6,
                waiting_ms=waiting / len(begins) * 1e-6,
                moving_ms=moving / len(begins) * 1e-6,
                exposed=covered / span if span else 0.0,
                overlap=1 - covered / total if total else 0.0,
                last=num_last[place] / len(own),
                late_ms=late_ns[place] * 1e-6,
            )
        )
    return found


def steps(dumps: Dumps) -> list[Step]:
    """Returns the steps, in order."""
    meetings = _meetings(dumps)
    last_of = {calls[-1].key: calls[-1] for calls in meetings}
    number_of: dict[int, int] = {}  # by the id of a call
    ends: dict[int, int] = collections.Counter()
    exposed: dict[int, list[float]] = collections.defaultdict(list)
    for own in _by_place(dumps).values():
        begin = own[0].arrived
        for number, part in enumerate(_steps_of(own), 1):
            end = max(begin + 1, *(call.resumed for call in part))
            exposed[number].append(min(1.0, _covered(_spans(part, last_of, dumps)) / (end - begin)))
            number_of.update((id(call), number) for call in part)
            ends[number] = max(ends[number], end)
            begin = end
    late_ns: dict[int, dict[Place, int]] = collections.defaultdict(collections.Counter)
    for first, *_, last in meetings:
        if last.arrived > first.arrived and id(last) in number_of:
            late_ns[number_of[id(last)]][last.place] += last.arrived - first.arrived
    found = []
    before = min((call.arrived for call in dumps.calls), default=0)
    for number, end in ends.items():
        late = late_ns[number]
        last = max(late, key=late.__getitem__, default=None)
        late_ms = late[last] * 1e-6 if last else 0.0
        mean = statistics.fmean(exposed[number])
        found.append(Step(number, (end - before) * 1e-6, mean, last, late_ms))
        before = end
    return found


def _by_place(dumps: Dumps) -> dict[Place, list[Call]]:
    """Returns the calls of each device that are whole, in their order."""
    found: dict[Place, list[Call]] = collections.defaultdict(list)
    for call in sorted(dumps.calls, key=lambda call: call.arrived):
        if call.moved and call.resumed:
            found[call.place].append(call)
    return dict(sorted(found.items(), key=lambda item: (item[0].process, item[0].device)))


def _meetings(dumps: Dumps) -> list[list[Call]]:
    """Returns the calls that met others, those that arrived first ahead."""
    return [calls for calls in met(dumps).values() if len(calls) > 1]


def _meeting(call: Call, last_of: Mapping[tuple[int, ...], Call]) -> int:
    """Returns when all had come to a call."""
    last = last_of.get(call.key, call)
    return min(max(last.arrived, call.arrived), call.resumed)


def _spans(
    calls: list[Call], last_of: Mapping[tuple[int, ...], Call], dumps: Dumps
) -> list[tuple[int, int]]:
    """Returns when the device was in calls, but for the time in which these multiply."""
    spans = []
    for call in calls:
        is_fused = dumps.site(call.site).get("op", "").split()[0:1] in [[f] for f in _FUSED]
        spans.append((call.arrived, _meeting(call, last_of) if is_fused else call.resumed))
    return spans


def _steps_of(own: list[Call]) -> list[list[Call]]:
    """Returns the calls of each execution of a program."""
    return [list(part) for _, part in it.groupby(own, key=lambda call: call.run)]


def _gaps(begins: list[int], own: list[Call]) -> list[int]:
    ends = [*begins[1:], max(call.resumed for call in own)]
    gaps = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return gaps[:-1] or gaps  # the last one has no next step


def _covered(spans: list[tuple[int, int]]) -> int:
    """Returns how much time lies in one span or several."""
    covered, until = 0, 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, until))
        until = max(until, end)
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
    lines = ["slowest steps  step ms  exposed  last to come  late ms"]
    lines += [
        f"{step.number:13} {step.ms:8.3f} {step.exposed:8.0%} "
        f"{_name(step.last) if step.last else '-':>13} {step.late_ms:8.1f}"
        for step in slowest(found)
    ]
    return "\n".join(lines)


def _name(place: Place) -> str:
    return f"{place.process}.{place.device}"


def draw(found: list[Row], all_steps: list[Step], path: Path) -> None:
    """Draws the steps, what one of each device is made of, and how late each came.

    Needs matplotlib.
    """
    from matplotlib.figure import Figure

    names = [_name(row.place) for row in found]
    figure = Figure(figsize=(max(5.0, 1.5 + 0.6 * len(found)), 7.5), layout="constrained")
    times, steps, late = figure.subplots(3, 1, height_ratios=(2, 2, 1))
    times.plot([s.number for s in all_steps], [s.ms for s in all_steps], color="#888888", lw=1)
    for place, step in enumerate(slowest(all_steps)):
        told = f"{step.number}" + (f", {_name(step.last)} last" if step.last else "")
        side = -1 if step.number > len(all_steps) / 2 else 1
        times.plot([step.number], [step.ms], "o", ms=4, color="#b0563b")
        times.annotate(
            told,
            (step.number, step.ms),
            (5 * side, 9 * (_SLOWEST - 1 - place)),  # of neighbours each can be read
            textcoords="offset points",
            fontsize=8,
            ha="right" if side < 0 else "left",
        )
    times.margins(y=0.25)
    times.set_xlabel("step")
    times.set_ylabel("ms")
    times.set_ylim(bottom=0)
    bottom = [0.0] * len(found)
    for label, color, values in (
        ("waiting for ranks", "#b0563b", [row.waiting_ms for row in found]),
        ("moving data", "#1b7837", [row.moving_ms for row in found]),
        (
            "outside of calls",
            "#cccccc",
            [max(0.0, row.step_ms - row.waiting_ms - row.moving_ms) for row in found],
        ),
    ):
        steps.bar(names, values, bottom=bottom, label=label, color=color)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    steps.set_ylabel("ms of a step")
    steps.margins(y=0.25)
    steps.legend(fontsize=8, ncols=3, loc="upper center")
    late.bar(names, [row.late_ms for row in found], color="#7b7b9d")
    late.set_ylabel("ms that others\nwaited for it")
    late.set_xlabel("process.device")
    figure.savefig(path, dpi=110)

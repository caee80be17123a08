"""The timeline of a job from its dumps: for Perfetto, as a table, and as a picture."""

import collections
import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxcoll.diagnosis.records import Call, Dumps, Place

# Tracks of a device, for calls that are under way at the same time.
_LANES = 100
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
    meetings = met(dumps)
    last_of = {key: calls[-1] for key, calls in meetings.items() if len(calls) > 1}
    late_ns: dict[Place, int] = collections.Counter()
    num_last: dict[Place, int] = collections.Counter()
    for calls in meetings.values():
        if len(calls) > 1:
            num_last[calls[-1].place] += 1
            late_ns[calls[-1].place] += calls[-1].arrived - calls[-2].arrived
    by_place: dict[Place, list[Call]] = collections.defaultdict(list)
    for call in dumps.calls:
        if call.moved and call.resumed:
            by_place[call.place].append(call)
    found = []
    for place, own in sorted(by_place.items(), key=lambda item: (item[0].process, item[0].device)):
        own.sort(key=lambda call: call.arrived)
        begins = _step_begins(own)
        span = max(call.resumed for call in own) - own[0].arrived
        waiting = moving = 0
        spans = []
        for call in own:
            last = last_of.get(call.key, call)
            meeting = min(max(last.arrived, call.arrived), call.resumed)
            waiting += meeting - call.arrived
            moving += call.resumed - meeting
            is_fused = dumps.site(call.site).get("op", "").split()[0:1] in [[f] for f in _FUSED]
            spans.append((call.arrived, meeting if is_fused else call.resumed))
        covered = _covered(spans)
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


def _step_begins(own: list[Call]) -> list[int]:
    """Returns when each execution of a program made its first call."""
    begins, seen = [], None
    for call in own:
        if call.run != seen:
            begins.append(call.arrived)
            seen = call.run
    return begins


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


def draw(found: list[Row], path: Path) -> None:
    """Draws what a step of each device is made of, and how late each came. Needs matplotlib."""
    from matplotlib.figure import Figure

    names = [f"{row.place.process}.{row.place.device}" for row in found]
    figure = Figure(figsize=(max(5.0, 1.5 + 0.6 * len(found)), 5.5), layout="constrained")
    steps, late = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
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

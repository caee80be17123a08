"""`jaxcoll doctor`: what the dumps of a job say about why it does not go on, or is slow."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxcoll.diagnosis import black_box, errors
from jaxcoll.diagnosis.records import OVER_NCCL, OVER_PEERS, Call, Dumps, Place, late, read

# Exit status by finding, the most serious first; FAILED: an error that no other explains.
GONE, MISMATCH, BEHIND, SLOW, FAILED = 3, 4, 5, 6, 7

# A rank is a straggler where it comes last so often, by so much, and the others wait for it for so
# much of the time.
_LEAST_CALLS = 10
_LATE_NS = 1_000_000
_WAIT_SHARE = 0.1
# A call of a job that runs waits long from so long on, and from so many times what those of its
# site usually take, where enough of them are known.
_LONG_WAIT_NS = 1_000_000_000
_LONG_WAIT = 3.0
# A group is slow where it moves the same data so many times slower than the other groups.
_SLOW_LINK = 3.0
_MOST_SHOWN = 8
_ENDED = black_box.PHASES[black_box.ENDED]
_MOST_CALLS = 3  # to which a straggler comes late


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that explains what is wrong.

    Attributes:
        status: GONE, MISMATCH, BEHIND, SLOW or FAILED.
        text: in plain words; lines.
    """

    status: int
    text: str


def diagnose(dumps: Dumps) -> list[Finding]:
    """Returns what is wrong, the cause first."""
    open_calls = _open_calls(dumps)
    found = [*_gone(dumps, open_calls), *_missing(dumps, open_calls)]
    if all(finding.status not in (GONE, MISMATCH) for finding in found):
        found += _different(dumps)
    if not found and _reasons(dumps):
        found = [Finding(FAILED, _no_call_tells(dumps))]
    if not found:
        found = [*_stragglers(dumps), *_slow_groups(dumps)]
    if not found and _reports(dumps):
        found = [Finding(FAILED, _no_call_tells(dumps))]
    return sorted(found, key=lambda finding: finding.status)


def report(paths: Sequence[str | Path]) -> tuple[str, int]:
    """Returns what `jaxcoll doctor` prints, and its exit status."""
    dumps = read(paths)
    found = diagnose(dumps)
    lines = [_head(dumps)]
    lines += [f"error: {reason}" for reason in _reasons(dumps)]
    lines += [finding.text for finding in found]
    if not found:
        lines.append(
            "nothing is wrong: no rank is waited for long, and none is late again and again"
        )
    return "\n\n".join(lines), found[0].status if found else 0


def _no_call_tells(dumps: Dumps) -> str:
    """Says what the processes did where no call on the native path shows who is late."""
    lines = [f"process {process}: {report}" for process, report in _reports(dumps).items()]
    lines.append("no call in the dumps shows more; who is late may show in what each process did:")
    for process in list(range(dumps.num_processes))[:_MOST_SHOWN]:
        if process in dumps.by_process:
            lines += [f"process {process}:", *_doing(dumps, process)]
        else:
            lines.append(f"process {process} has left no dump: is it stopped, or gone?")
    return "\n".join(lines)


def _head(dumps: Dumps) -> str:
    hosts = {dump["host"] for dump in dumps.by_process.values()}
    devices = {call.place for call in dumps.calls}
    text = (
        f"{_count(dumps.num_processes, 'process', 'es')}, {_count(len(dumps.by_process), 'dump')}, "
        f"{_count(len(dumps.calls), 'call')} of {_count(len(devices), 'device')}, on "
        f"{_joined(sorted(hosts))}"
    )
    silent = sorted(set(range(dumps.num_processes)) - set(dumps.by_process))
    return text + (f"; no dump of process {_joined(silent)}" if silent else "")


def _reasons(dumps: Dumps) -> list[str]:
    """Returns the errors with which calls have failed."""
    reasons = (dump.get("reason") for dump in dumps.by_process.values())
    return sorted({reason.splitlines()[0] for reason in reasons if reason})


def _reports(dumps: Dumps) -> dict[int, str]:
    """Returns what processes have reported of hangs that no call has failed of."""
    found = {process: dump.get("report", "") for process, dump in dumps.by_process.items()}
    return {process: text.removeprefix("jaxcoll: ") for process, text in found.items() if text}


def _joined(parts: Iterable[object], by: str = ", ") -> str:
    return by.join(map(str, parts))


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"


# ---- Hangs ---------------------------------------------------------------------------------------


def _open_calls(dumps: Dumps) -> list[list[Call]]:
    """Returns the calls that did not end, those of ranks that met together; the oldest first.

    A call that failed has been dealt with where the processes have attached anew since, or its
    device has gone on to another program. One that did not fail is no news where all have come,
    or it does not wait for long.
    """
    met: dict[tuple[int, ...], list[Call]] = collections.defaultdict(list)
    epoch = max((call.epoch for call in dumps.calls), default=0)
    went_on: dict[Place, Call] = {}
    for call in dumps.calls:
        before = went_on.get(call.place)
        if call.moved and (before is None or before.sequence < call.sequence):
            went_on[call.place] = call
    for call in dumps.calls:
        after = went_on.get(call.place)
        is_past = after is not None and after.sequence > call.sequence and after.run != call.run
        if call.is_open and call.epoch in (0, epoch) and not (call.resumed and is_past):
            met[call.key].append(call)
    hangs = [calls for calls in met.values() if _missing_ranks(dumps, calls)]
    hangs = [calls for calls in hangs if _failed(calls) or _waits_long(dumps, calls)]
    return sorted(hangs, key=lambda calls: min(call.arrived for call in calls))


def _missing_ranks(dumps: Dumps, calls: list[Call]) -> list[int]:
    """Returns the ranks that did not come to a call.

    The dumps of a job that runs are not of one moment: whose dump has the call as ended, or a later
    one of its site, has come.
    """
    known = dumps.by_series[calls[0].series]
    came = {call.rank for call in known if call.occurrence >= calls[0].occurrence}
    return sorted(set(range(dumps.ranks_of(calls[0]))) - came)


def _failed(calls: list[Call]) -> bool:
    return any(call.resumed for call in calls)


def _waited(dumps: Dumps, calls: list[Call]) -> int:
    """Returns for how long the first one to come has waited, in ns."""
    ends = max(call.resumed or _now(dumps, call) for call in calls)
    return ends - min(call.arrived for call in calls)


def _waits_long(dumps: Dumps, calls: list[Call]) -> bool:
    took: dict[tuple[int, ...], int] = collections.defaultdict(int)
    for call in dumps.by_series[calls[0].series]:
        if call.moved:
            took[call.key] = max(took[call.key], call.moved - call.arrived)
    usual = statistics.median(took.values()) if len(took) >= _LEAST_CALLS else 0
    return _waited(dumps, calls) > max(_LONG_WAIT_NS, _LONG_WAIT * usual)


def _gone(dumps: Dumps, open_calls: list[list[Call]]) -> Iterator[Finding]:
    silent = set(range(dumps.num_processes)) - set(dumps.by_process)
    for process, dump in sorted(dumps.by_process.items()):
        if dump["state"] == "gone":
            lines = [f"process {process} {_end_text(dump)}"]
            for calls in open_calls:
                missing = [p for p in _missing_places(dumps, calls) if p and p.process == process]
                if missing:
                    lines += _did_not_come(dumps, calls, missing)
                    break  # it may be to blame for others, which began later
            yield Finding(GONE, "\n".join([*lines, *_doing(dumps, process)]))
    places = [place for calls in open_calls for place in _missing_places(dumps, calls)]
    missed = {place.process for place in places if place is not None}
    # A rank whose place nobody knows is where nothing is known.
    for process in sorted(silent if None in places else silent & missed):
        yield Finding(GONE, f"process {process} is gone, or can't write its dump, and others wait.")


def _end_text(dump: Mapping[str, Any]) -> str:
    if dump["phase"] != _ENDED:
        return "is gone."
    if dump["stack"]:
        return f"has ended with {dump['stack']}."
    return "has come to the end of its program: did it make fewer steps than the others?"


def _missing_places(dumps: Dumps, calls: list[Call]) -> list[Place | None]:
    return [dumps.place_of(calls[0], rank) for rank in _missing_ranks(dumps, calls)]


def _missing(dumps: Dumps, open_calls: list[list[Call]]) -> Iterator[Finding]:
    """Ranks that did not come to calls in which others wait.

    Who waits in another call may only wait for somebody else: to blame are those that wait nowhere.
    Where there are none, ranks wait for each other. Who has gone on to another program since the
    call failed is not behind any more.
    """
    waits: dict[Place, list[list[Call]]] = collections.defaultdict(list)
    for calls in open_calls:
        for call in calls:
            waits[call.place].append(calls)
    missing = {id(calls): _missing_places(dumps, calls) for calls in open_calls}
    seen: set[Place] = set()
    for calls in open_calls:
        blamed = _blamed(calls, missing, waits)
        behind = [
            place
            for place in missing[id(calls)]
            if place in blamed
            and place is not None
            and place not in seen
            and dumps.by_process.get(place.process, {}).get("state", "gone") != "gone"
            and not _has_gone_on(dumps, place, calls)
        ]
        if behind:
            seen |= set(behind)
            yield Finding(BEHIND, _behind_text(dumps, calls, behind))
        elsewhere = [
            place for place in missing[id(calls)] if place is not None and place not in seen
        ]
        if not blamed and elsewhere:
            seen |= {*elsewhere, *(call.place for call in calls)}
            others = [met for place in elsewhere for met in waits[place]]
            yield Finding(MISMATCH, _side_by_side(dumps, calls, others))


def _has_gone_on(dumps: Dumps, place: Place, calls: list[Call]) -> bool:
    """Returns whether a device has ended a call of another run since this one failed."""
    failed_at = max(call.resumed for call in calls)
    return failed_at > 0 and any(
        call.place == place and call.moved and call.run != calls[0].run and call.arrived > failed_at
        for call in dumps.calls
    )


def _blamed(
    calls: list[Call],
    missing: dict[int, list[Place | None]],
    waits: dict[Place, list[list[Call]]],
) -> set[Place | None]:
    """Returns those that wait nowhere among whom the ranks of a call wait for, in the end."""
    found: set[Place | None] = set()
    looked_at: set[int] = set()
    left = [calls]
    while left:
        met = left.pop()
        if id(met) in looked_at:
            continue
        looked_at.add(id(met))
        for place in missing[id(met)]:
            if place is None or place not in waits:
                found.add(place)
            else:
                left.extend(waits[place])
    return found


def _different(dumps: Dumps) -> Iterator[Finding]:
    """Different collectives that only the errors tell of: who made one has gone on."""
    for reason in _reasons(dumps):
        if lines := errors.doings(reason):
            head = reason.partition(": ")[0]
            yield Finding(MISMATCH, "\n  ".join([f"{head}:", *lines]))


def _side_by_side(dumps: Dumps, calls: list[Call], others: list[list[Call]]) -> str:
    lines = ["ranks wait in different calls, and each for the others:"]
    shown: list[list[Call]] = []
    for met in [calls, *others]:
        if met not in shown:
            shown.append(met)
            lines.append(f"  {_ranks(met)}:")
            lines.append(f"    {_call_text(dumps, met[0])}")
            if (before := _before(dumps, met[0])) is not None:
                lines.append(f"    after {_call_text(dumps, before)}")
    return "\n".join(lines)


def _before(dumps: Dumps, call: Call) -> Call | None:
    """Returns the call that a device made before this one."""
    return max(
        (c for c in dumps.calls if c.place == call.place and c.sequence < call.sequence),
        key=lambda c: c.sequence,
        default=None,
    )


def _behind_text(dumps: Dumps, calls: list[Call], those: list[Place]) -> str:
    lines = _did_not_come(dumps, calls, those, " is behind: it")
    for process in dict.fromkeys(place.process for place in those):
        lines += _doing(dumps, process)
    return "\n".join(lines)


def _did_not_come(dumps: Dumps, calls: list[Call], those: list[Place], why: str = "") -> list[str]:
    ranks = _missing_ranks(dumps, calls)
    missing = [rank for rank in ranks if dumps.place_of(calls[0], rank) in those]
    return [
        f"rank {_joined(missing)} ({_joined(map(_place_text, those), '; ')}){why} did not come to",
        f"  {_call_text(dumps, calls[0])},",
        f"in which {_ranks(calls)} waited for {_waited(dumps, calls) * 1e-9:.1f} s.",
    ]


def _now(dumps: Dumps, call: Call) -> int:
    return dumps.now(call.place.process)


def _doing(dumps: Dumps, process: int) -> list[str]:
    """Says what a process did last."""
    dump = dumps.by_process[process]
    own = [call for call in dumps.calls if call.place.process == process]
    ended = max((c for c in own if c.moved and c.resumed), key=lambda c: c.resumed, default=None)
    lines = [f"It is {dump['state']}."] if dump["state"] == "stopped" else []
    if ended is not None:
        ago = (dumps.now(process) - ended.resumed) * 1e-9
        lines.append(f"Its last call ended {ago:.1f} s before: {_call_text(dumps, ended)}")
    else:
        lines.append("It has ended no call.")
    if dump["stack_at_ns"] and dump["phase"] != _ENDED:
        since = (dump["stack_at_ns"] - dump["phase_since_ns"]) * 1e-9
        ago = (dump["clock"]["now_ns"] - dump["stack_at_ns"]) * 1e-9
        seen_at = dump["stack_at_ns"] + dumps.offsets[process]
        if ended is not None and seen_at < ended.resumed:  # it has gone on since
            if dump["stack"]:
                lines.append(f"Its Python stack, {ago:.1f} s before, when that call had not ended:")
        else:
            seen = (
                "" if dump["state"] == "running" else f" when it was seen last, {ago:.1f} s before"
            )
            where = ", at" if dump["stack"] else "; no Python code of the user's ran."
            pause = _pause_text(dump)
            lines.append(f"It was {dump['phase']} for {since:.1f} s{seen}{pause}{where}")
        lines += [f"  {line}" for line in dump["stack"].splitlines()]
    return lines


def _pause_text(dump: Mapping[str, Any]) -> str:
    """Says of an `allow_pause` that was too short how long it had been over."""
    over_ns = dump["clock"]["now_ns"] - dump.get("paused_until_ns", 0)
    if not dump.get("paused_until_ns") or over_ns < 0:
        return ""
    return f", its allow_pause over for {over_ns * 1e-9:.1f} s"


def _place_text(place: Place) -> str:
    return f"process {place.process}, device {place.device}"


def _ranks(calls: Sequence[Call]) -> str:
    return "rank " + _joined(sorted({call.rank for call in calls}))


def _call_text(dumps: Dumps, call: Call) -> str:
    which = f", execution {call.occurrence}" if call.execution > 0 else ""
    return f"{dumps.site_text(call.site, call.place.process)}{which}"


# ---- Slow jobs -----------------------------------------------------------------------------------


def _whole(dumps: Dumps) -> dict[tuple[int, ...], list[Call]]:
    """Returns the calls of which all ranks are known, and when their devices came to them.

    That is not known of those on GPUs: they stand in the records from when they are put on a
    stream, which may be long before.
    """
    met: dict[tuple[int, ...], list[Call]] = collections.defaultdict(list)
    for call in dumps.calls:
        if not call.is_open and dumps.site(call.site).get("path") not in (OVER_NCCL, OVER_PEERS):
            met[call.key].append(call)
    sizes = {key: dumps.site(calls[0].site).get("ranks", 0) for key, calls in met.items()}
    return {key: calls for key, calls in met.items() if len(calls) == sizes[key] > 1}


def _stragglers(dumps: Dumps) -> Iterator[Finding]:
    """Processes, or devices of the only one, for which the others wait again and again."""
    whole = _whole(dumps)
    waits: dict[Any, dict[str, list[int]]] = collections.defaultdict(  # by what the calls are
        lambda: collections.defaultdict(list)
    )
    devices: dict[Any, set[Place]] = collections.defaultdict(set)
    num_calls: dict[Any, int] = collections.Counter()

    def who(place: Place) -> Any:
        return place.process if dumps.num_processes > 1 else place

    for calls in whole.values():
        num_calls.update({who(call.place) for call in calls})
        others_ns, those = late(calls)
        for one in {who(call.place) for call in those}:
            own = [call for call in those if who(call.place) == one]
            wait = min(call.arrived for call in own) - others_ns
            if wait > _LATE_NS:
                devices[one] |= {call.place for call in own}
                waits[one][dumps.site_text(own[0].site, own[0].place.process)].append(wait)
    if not waits:
        return
    span = max(c.resumed for calls in whole.values() for c in calls) - min(
        c.arrived for calls in whole.values() for c in calls
    )
    for one, by_call in sorted(waits.items(), key=lambda item: -sum(map(sum, item[1].values()))):
        all_waits = [wait for some in by_call.values() for wait in some]
        if len(all_waits) >= _LEAST_CALLS and sum(all_waits) > _WAIT_SHARE * span:
            yield Finding(SLOW, _straggler_text(devices[one], by_call, num_calls[one], span))


def _straggler_text(
    devices: set[Place], by_call: dict[str, list[int]], num_calls: int, span: int
) -> str:
    waits = [wait for some in by_call.values() for wait in some]
    median_ms, most_ms = statistics.median(waits) * 1e-6, max(waits) * 1e-6
    places = sorted(devices, key=lambda place: (place.process, place.device))
    what, they, others = "is a straggler", "it", "They"
    if len(places) > 1:
        what, they, others = "are stragglers", "they", "The others"
    lines = [
        f"{_joined(map(_place_text, places), '; ')} {what}: to {len(waits):,} of {num_calls:,} "
        f"calls {they} came last, {median_ms:.1f} ms after the others (at most {most_ms:.1f} ms), "
        f"which is {sum(waits) / span:.0%} of the time. {others} waited longest, in all, in"
    ]
    longest = sorted(by_call.items(), key=lambda item: -sum(item[1]))[:_MOST_CALLS]
    lines += [
        f"  {text} ({_count(len(some), 'time')}, {sum(some) * 1e-6:.1f} ms in all)"
        for text, some in longest
    ]
    return "\n".join(lines)


def _slow_groups(dumps: Dumps) -> Iterator[Finding]:
    """Groups that move the same data much slower than others do at the same site."""
    moved: dict[int, dict[int, list[int]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    members: dict[int, set[Place]] = collections.defaultdict(set)
    for calls in _whole(dumps).values():
        # Each process's own last rank has met: the last one of all begins the move.
        took = max(c.moved for c in calls) - max(c.met for c in calls)
        moved[calls[0].site][calls[0].group].append(took)
        members[calls[0].group] |= {call.place for call in calls}
    for site, groups in moved.items():
        times = {g: statistics.median(t) for g, t in groups.items() if len(t) >= _LEAST_CALLS}
        for group, time_ns in times.items():
            others = [t for g, t in times.items() if g != group]
            if others and time_ns > _SLOW_LINK * statistics.median(others):
                where = "; ".join(map(_place_text, sorted(members[group], key=str)[:_MOST_SHOWN]))
                yield Finding(
                    SLOW,
                    f"the link between {where} is slow: {dumps.site_text(site)} moves in "
                    f"{time_ns * 1e-3:.0f} us there, in {statistics.median(others) * 1e-3:.0f} us "
                    "in other groups.",
                )

"""`error_info`, and what the texts of the engine's errors say, as fields."""

import dataclasses
import itertools
import re
from typing import Literal, NamedTuple

from jaxcoll import _steps
from jaxcoll._errors import MARK, CollectiveError

_CALL = re.compile(
    r'(?P<op>\w+) over (?P<axes>"[^"]+"(?:, "[^"]+")*|no axis) of (?P<operands>.+?) '
    r"\((?P<bytes>[\d,]+) bytes(?:, [^()\n]+)?\), called at "
    r"(?P<source>[^\n]*?:\d+ \([^\n]*?\)|unknown line)"
)
# XLA's own, which the engine runs: `for` the operations that they are part of.
_XLA_CALL = re.compile(
    r"(?P<op>\w+) of XLA(?: \(\w+\))?: (?P<operands>\w+\[\d+\]) \((?P<bytes>\d+) bytes\), "
    r"(?:devices [\d, .()-]+?|from device \d+ to device \d+)(?:, for (?P<origins>.+?))?"
    r"(?=: waited|, execution \d)"
)
_MISMATCH = re.compile("the (processes|devices)( of process \\d+)? called different collectives")
_OR = ", or "  # between alike calls
# Of a mismatch: those that do the same, and each thing that they do.
_DOING = re.compile(r"(?:^|; )(?:process|device) (\d+)(?: \(and ([\d, ]+)\))? (?=waits|has ended)")
_IN = re.compile(r"(?:waits in|and in|before others came to it,) ")
_WAITED = re.compile(r"waited (\d+\.\d) s")
_LIMIT = re.compile(r"the limit is (\d+\.\d) s")
_EXECUTION = re.compile(r"execution (\d+) of this call")
_OF_PROCESS = re.compile(
    r"rank ([\d, ]+) \(process (\d+)(?:(?:, pid (\d+))?, ([a-z ]+))?"
    r"(?:, (?:device|partition) \d+)?\)"
)
_OF_DEVICE = re.compile(r"(\d+) \((?:device|partition) (\d+)\)")
# How many ranks the group has; where it is not said, all of them are named.
_NUM_RANKS = re.compile(r"\) of (\d+)[,;]")
_DETAIL = re.compile(r"^  rank ([\d, ]+): (.*)$", re.M)
_FOLDER = re.compile(r'^  more: jaxcoll doctor "([^"\n]*)"', re.M)


@dataclasses.dataclass(frozen=True)
class MissingRank:
    """A rank that others waited for.

    Attributes:
        rank: its number in the group.
        process: its process, as `jax.process_index()` counts; None in a job of one process.
        pid: that process's id; None in a job of one process, or where it is on another host.
        state: `running`, `stopped`, `leaving` or `ended` (its program came to its end), `gone`
            (it was killed, say), `failed` (on GPUs: its part of the group has) or `not there yet`;
            `running` in a job of one process.
        last_call: the call that it waits in, and the one that it has ended last, as a text; empty
            where not known.
    """

    rank: int
    process: int | None
    pid: int | None
    state: str
    last_call: str


@dataclasses.dataclass(frozen=True)
class MismatchedCall:
    """One of the different collectives that ranks called.

    What the text does not say of it is None or empty.

    Attributes:
        where: the processes that wait in it, or have ended it before others came to it; devices
            where those of one process called different collectives.
        op: the collective, `all_reduce`.
        axes: the mesh axes of the call.
        operands: types of the operands of one rank, as in `f32[8,128]`; more than four are counted
            in the last entry.
        bytes: of all operands of one rank.
        source: the user's `file:line (function)`, or several with `or`.
        execution: which execution of that call it is, as `ErrorInfo.execution` counts.
    """

    where: tuple[int, ...]
    op: str | None
    axes: tuple[str, ...]
    operands: tuple[str, ...]
    bytes: int | None
    source: str | None
    execution: int | None


@dataclasses.dataclass(frozen=True)
class ErrorInfo:
    """What a `CollectiveError` says.

    Attributes:
        kind: `missing`: not all ranks came in time; `mismatch`: ranks called different
            collectives; `other`.
        op: the collective, `all_reduce`; None where the text names several or none.
        axes: the mesh axes of the call.
        operands: types of the operands of one rank, as in `f32[8,128]`; more than four are counted
            in the last entry.
        bytes: of all operands of one rank; None as for `op`.
        source: the user's `file:line (function)`, or several with `or`: alike calls in programs of
            one name can't be told apart; None as for `op`.
        execution: which execution of that call it was, from 1: in a job of several processes since
            they attached, else in the run of the program.
        waited_s: seconds until the error, since the last time that there was a reason to wait for
            somebody: it compiled, or paused.
        limit_s: the limit, where that was the reason.
        group: where its ranks are, in their order: processes, or devices in a job of one process;
            empty where the text has not all.
        arrived: ranks of the group that had come.
        missing: those that had not.
        calls: of a mismatch, the different calls; those that the fewest wait in first.
        dump: the folder with the dumps of the job, for `jaxcoll doctor`.
        text: all that was said.
    """

    kind: Literal["missing", "mismatch", "other"]
    op: str | None
    axes: tuple[str, ...]
    operands: tuple[str, ...]
    bytes: int | None
    source: str | None
    execution: int | None
    waited_s: float | None
    limit_s: float | None
    group: tuple[int, ...]
    arrived: tuple[int, ...]
    missing: tuple[MissingRank, ...]
    calls: tuple[MismatchedCall, ...]
    dump: str | None
    text: str


def error_info(error: BaseException | str) -> ErrorInfo | None:
    """Returns what a failed collective says, as fields.

    Args:
        error: an exception of JAX or `jaxcoll.CollectiveError`, or its text, from a log.

    Returns:
        None where it does not come from a collective of the native path. Errors that follow from
        another one are looked through (`__cause__`, `__context__`).

    Example:
        >>> try:
        ...     jax.block_until_ready(train_step(state, batch))
        ... except RuntimeError as error:
        ...     info = jaxcoll.error_info(error)
        ...     print(info.op, info.source, [late.rank for late in info.missing])
    """
    text = collective_text(error)
    if text is None:
        return None
    note_seen(text)
    head = text.splitlines()[0]
    waited, limit = _WAITED.search(head), _LIMIT.search(head)
    is_mismatch = _MISMATCH.match(head) is not None
    execution = None if is_mismatch else _EXECUTION.search(head)
    folder = _FOLDER.search(text)
    calls, end = _calls(head)
    call = _common(calls if head.startswith(":", end) else [])
    places, came, missing = _ranks(head, dict(_details(text)))
    ranks = sorted(places)
    number = _NUM_RANKS.search(head)
    are_all = ranks == list(range(int(number[1]) if number else len(ranks)))
    return ErrorInfo(
        kind="mismatch" if is_mismatch else "missing" if missing else "other",
        op=call.op,
        axes=call.axes,
        operands=call.operands,
        bytes=call.bytes,
        source=call.source,
        execution=int(execution[1]) if execution else None,
        waited_s=float(waited[1]) if waited else None,
        limit_s=float(limit[1]) if limit else None,
        group=tuple(places[r] for r in ranks) if are_all else (),
        arrived=came,
        missing=missing,
        calls=_mismatched(head) if is_mismatch else (),
        dump=folder[1] if folder else None,
        text=text,
    )


def collective_text(error: BaseException | str, in_context: bool = True) -> str | None:
    """Returns what our engine has said in an error, or in one that it follows from, or None.

    `in_context`: also in one during whose handling it came.
    """
    if isinstance(error, str):
        return error.partition(MARK)[2] or None
    looked_at: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in looked_at:
        text = str(following)
        if isinstance(following, CollectiveError):
            return text
        if MARK in text:
            return text.partition(MARK)[2]
        looked_at.add(id(following))
        before = following.__cause__
        if before is None and in_context and not following.__suppress_context__:
            before = following.__context__
        following = before
    return None


# What XLA says where a callback of the user's has raised.
_OF_A_CALLBACK = "error calling callback"
# First lines of what the user knows.
_seen: set[str] = set()
# What nobody has told the user, by first lines, and how many failures there were then.
_unseen: dict[str, tuple[int | None, str]] = {}
# How many there were when a callback's error was raised, from which the last of them had followed.
_settled: set[int | None] = set()


def note_seen(text: str) -> None:
    """Notes that the user has got an error; the end of the process need not repeat it."""
    _seen.add(_line(text))
    _unseen.pop(_line(text), None)


def note_raised(text: str, num_failures: int) -> None:
    """Notes that JAX raises an error, the engine's or a callback's, after so many failures.

    Where a callback has raised, the other ranks waited in vain: that error is the first cause of
    the last failure, or of some that were found at once; of others the user may know nothing.
    """
    if _steps.awaits_here():
        return
    if MARK in text:
        note_seen(text.partition(MARK)[2])
    elif _OF_A_CALLBACK in text:
        _settled.add(num_failures)


def note_unseen(text: str, num_failures: int | None = None) -> None:
    """Notes that a call has failed, of the engine's one of so many; somebody may get it yet."""
    if _line(text) not in _seen:
        _unseen[_line(text)] = num_failures, text


def unseen() -> list[str]:
    """Returns the errors of which the user does not know."""
    return [
        text
        for line, (number, text) in list(_unseen.items())  # another thread may add to them
        if line not in _seen and number not in _settled
    ]


def forget() -> None:
    """Forgets all that has failed: what fails from now on may have the same text."""
    _seen.clear()
    _unseen.clear()


def _line(text: str) -> str:
    return text.partition("\n")[0].partition(": while running")[0]


class _Call(NamedTuple):
    """What a text says of a call, or of alike ones what they share."""

    op: str | None
    axes: tuple[str, ...]
    operands: tuple[str, ...]
    bytes: int | None
    source: str | None


def _calls(text: str, at: int = 0) -> tuple[list[_Call], int]:
    """Returns the call at a place of a text, or the alike ones between which it can't tell.

    And where they end.
    """
    if (call := _XLA_CALL.match(text, at)) is not None:
        origins = (call["origins"] or "").split(_OR)
        source = " or ".join(filter(None, (origin.rpartition(" at ")[2] for origin in origins)))
        said = _Call(call["op"], (), (call["operands"],), int(call["bytes"]), source or None)
        return [said], call.end()
    calls: list[_Call] = []
    end = at
    while (call := _CALL.match(text, at)) is not None:
        axes = tuple(re.findall(r'"([^"]+)"', call["axes"]))
        size = int(call["bytes"].replace(",", ""))
        calls.append(_Call(call["op"], axes, _operands(call["operands"]), size, call["source"]))
        end = call.end()
        at = end + len(_OR)
        if not text.startswith(_OR, end):
            break
    return calls, end


def _common(calls: list[_Call]) -> _Call:
    """Returns what all calls share, and the source lines of all."""
    if not calls:
        return _Call(None, (), (), None, None)
    common = calls[0]
    for call in calls[1:]:
        common = _Call(
            common.op if call.op == common.op else None,
            common.axes if call.axes == common.axes else (),
            common.operands if call.operands == common.operands else (),
            common.bytes if call.bytes == common.bytes else None,
            " or ".join(filter(None, (common.source, call.source))) or None,
        )
    return common


def _mismatched(head: str) -> tuple[MismatchedCall, ...]:
    """Returns the calls that a mismatch names."""
    calls: list[MismatchedCall] = []
    doings = _DOING.split(head[head.index(": ") + 2 :])[1:]
    for first, others, doing in zip(*[iter(doings)] * 3, strict=True):
        where = (int(first), *map(int, others.split(", ") if others else ()))
        end = 0
        while (begin := _IN.search(doing, end)) is not None:  # not in a call's own path
            found, end = _calls(doing, begin.end())
            execution = _EXECUTION.search(doing, end)
            number = int(execution[1]) if execution else None
            calls.append(MismatchedCall(where, *_common(found), number))
    return tuple(calls)


def doings(text: str) -> list[str]:
    """Returns what ranks did that called different collectives, if an error says that."""
    head = text.partition("\n")[0]
    if not _MISMATCH.match(head):
        return []
    said = re.sub(r"; run -?\d+$", "", head.partition(": ")[2])
    begins = [found.start() for found in _DOING.finditer(said)]
    return [
        said[begin:end].removeprefix("; ")
        for begin, end in itertools.pairwise([*begins, len(said)])
    ]


def _operands(text: str) -> tuple[str, ...]:
    types, _, more = text.partition(" and ")
    return (*re.findall(r"\w+\[[\d,]*\]", types), *([more] if more else []))


def _details(text: str) -> list[tuple[int, str]]:
    return [
        (int(rank), said) for ranks, said in _DETAIL.findall(text) for rank in ranks.split(", ")
    ]


def _ranks(
    head: str, details: dict[int, str]
) -> tuple[dict[int, int], tuple[int, ...], tuple[MissingRank, ...]]:
    """Returns where which rank is, and who has arrived, and who is missing."""
    late, found, came = head.partition("; arrived: ")
    if not found:
        return {}, (), ()
    late = late.rpartition(" for rank ")[0] and late[late.index(" s ") :]
    if _OF_PROCESS.search(late) or _OF_PROCESS.search(came):
        arrived = {
            int(rank): int(process)
            for ranks, process, *_ in _OF_PROCESS.findall(came)
            for rank in ranks.split(", ")
        }
        missing = [
            MissingRank(rank, int(process), int(pid) if pid else None, state, details.get(rank, ""))
            for ranks, process, pid, state in _OF_PROCESS.findall(late)
            for rank in map(int, ranks.split(", "))
        ]
        places = arrived | {each.rank: each.process or 0 for each in missing}
        if not arrived:  # of a group on GPUs, whose own ranks are named by device
            return {}, tuple(int(rank) for rank, _ in _OF_DEVICE.findall(came)), tuple(missing)
    else:
        arrived = {int(rank): int(device) for rank, device in _OF_DEVICE.findall(came)}
        late_at = {int(rank): int(device) for rank, device in _OF_DEVICE.findall(late)}
        missing = [
            MissingRank(rank, None, None, "running", details.get(rank, "")) for rank in late_at
        ]
        places = arrived | late_at
    return places, tuple(arrived), tuple(missing)

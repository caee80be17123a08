"""`error_info`, and what the texts of the engine's errors say, as fields."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from jaxcoll import _steps
from jaxcoll._errors import CollectiveError

_MARK = "jaxcoll.CollectiveError: "
_CALL = re.compile(
    r'(?P<op>\w+) over (?P<axes>"[^"]+"(?:, "[^"]+")*|no axis) of (?P<operands>.+?) '
    r"\((?P<bytes>[\d,]+) bytes\), called at (?P<source>[^\n]*?:\d+ \([^\n]*?\)|unknown line)"
)
# XLA's own, which the engine runs: `for` the operations that they are part of.
_XLA_CALL = re.compile(
    r"(?P<op>\w+) of XLA(?: \(\w+\))?: (?P<operands>\w+\[\d+\]) \((?P<bytes>\d+) bytes\), "
    r"(?:devices [\d, .()-]+?|from device \d+ to device \d+)(?:, for (?P<origins>.+?))?: waited"
)
_MISMATCH = re.compile("the (processes|devices)( of process \\d+)? called different collectives")
_OR = ", or "  # between alike calls
_WAITED = re.compile(r"waited (\d+\.\d) s")
_LIMIT = re.compile(r"the limit is (\d+\.\d) s")
_EXECUTION = re.compile(r"execution (\d+) of this call")
_OF_PROCESS = re.compile(r"rank ([\d, ]+) \(process (\d+)(?:, pid (\d+), ([a-z ]+))?\)")
_OF_DEVICE = re.compile(r"(\d+) \((?:device|partition) (\d+)\)")
_DETAIL = re.compile(r"^  rank ([\d, ]+): (.*)$", re.M)
_FOLDER = re.compile(r'^  more: jaxcoll doctor "([^"\n]*)"', re.M)


@dataclasses.dataclass(frozen=True)
class MissingRank:
    """A rank that others waited for.

    Attributes:
        rank: its number in the group.
        process: its process, as `jax.process_index()` counts; None in a job of one process.
        pid: that process's id; None in a job of one process.
        state: `running`, `stopped`, `gone`, `leaving` or `not there yet`; `running` in a job of one
            process.
        last_call: the call that it waits in or has ended last, as a text; empty where not known.
    """

    rank: int
    process: int | None
    pid: int | None
    state: str
    last_call: str


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
    execution, folder = _EXECUTION.search(head), _FOLDER.search(text)
    calls = _calls(head)
    sizes = {call.bytes for call in calls}
    places, came, missing = _ranks(head, dict(_details(text)))
    ranks = sorted(places)
    return ErrorInfo(
        kind="mismatch" if _MISMATCH.match(head) else "missing" if missing else "other",
        op=_common(call.op for call in calls),
        axes=tuple(re.findall(r'"([^"]+)"', _common(call.axes for call in calls) or "")),
        operands=_operands(_common(call.operands for call in calls) or ""),
        bytes=sizes.pop() if len(sizes) == 1 else None,
        source=" or ".join(call.source for call in calls if call.source) or None,
        execution=int(execution[1]) if execution else None,
        waited_s=float(waited[1]) if waited else None,
        limit_s=float(limit[1]) if limit else None,
        group=tuple(places[r] for r in ranks) if ranks == list(range(len(ranks))) else (),
        arrived=came,
        missing=missing,
        dump=folder[1] if folder else None,
        text=text,
    )


def collective_text(error: BaseException | str, in_context: bool = True) -> str | None:
    """Returns what our engine has said in an error, or in one that it follows from, or None.

    `in_context`: also in one during whose handling it came.
    """
    if isinstance(error, str):
        return error.partition(_MARK)[2] or None
    looked_at: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in looked_at:
        text = str(following)
        if isinstance(following, CollectiveError):
            return text
        if _MARK in text:
            return text.partition(_MARK)[2]
        looked_at.add(id(following))
        before = following.__cause__
        if before is None and in_context and not following.__suppress_context__:
            before = following.__context__
        following = before
    return None


# First lines of what the user knows.
_seen: set[str] = set()
# What nobody has told the user, by first lines.
_unseen: dict[str, str] = {}


def note_seen(text: str) -> None:
    """Notes that the user has got an error; the end of the process need not repeat it."""
    _seen.add(_line(text))
    _unseen.pop(_line(text), None)


def note_raised(text: str) -> None:
    """Notes that JAX raises an error, if it is the engine's."""
    if _MARK in text and not _steps.awaits_here():
        note_seen(text.partition(_MARK)[2])


def note_unseen(text: str) -> None:
    """Notes that a call has failed; somebody may get the error yet."""
    if _line(text) not in _seen:
        _unseen[_line(text)] = text


def unseen() -> list[str]:
    """Returns the errors of which the user does not know."""
    return [text for line, text in _unseen.items() if line not in _seen]


def forget() -> None:
    """Forgets all that has failed: what fails from now on may have the same text."""
    _seen.clear()
    _unseen.clear()


def _line(text: str) -> str:
    return text.partition("\n")[0].partition(": while running")[0]


class _Call(NamedTuple):
    """What a text says of a call."""

    op: str
    axes: str
    operands: str
    bytes: int
    source: str | None


def _calls(head: str) -> list[_Call]:
    """Returns the call that a text begins with, or the alike ones between which it can't tell."""
    if (call := _XLA_CALL.match(head)) is not None:
        origins = (call["origins"] or "").split(_OR)
        source = " or ".join(filter(None, (origin.rpartition(" at ")[2] for origin in origins)))
        return [_Call(call["op"], "", call["operands"], int(call["bytes"]), source or None)]
    calls: list[_Call] = []
    at = end = 0
    while (call := _CALL.match(head, at)) is not None:
        size = int(call["bytes"].replace(",", ""))
        calls.append(_Call(call["op"], call["axes"], call["operands"], size, call["source"]))
        end = call.end()
        at = end + len(_OR)
        if not head.startswith(_OR, end):
            break
    return calls if head.startswith(":", end) else []


def _common(texts: Iterable[str]) -> str | None:
    """Returns what all texts say, or None."""
    different = {*texts}
    return different.pop() if len(different) == 1 else None


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
    if _OF_PROCESS.search(came):
        arrived = {
            int(rank): int(process)
            for ranks, process, *_ in _OF_PROCESS.findall(came)
            for rank in ranks.split(", ")
        }
        missing = [
            MissingRank(int(rank), int(process), int(pid), state, details.get(int(rank), ""))
            for ranks, process, pid, state in _OF_PROCESS.findall(late)
            for rank in ranks.split(", ")
        ]
        places = arrived | {each.rank: each.process or 0 for each in missing}
    else:
        arrived = {int(rank): int(device) for rank, device in _OF_DEVICE.findall(came)}
        late_at = {int(rank): int(device) for rank, device in _OF_DEVICE.findall(late)}
        missing = [
            MissingRank(rank, None, None, "running", details.get(rank, "")) for rank in late_at
        ]
        places = arrived | late_at
    return places, tuple(arrived), tuple(missing)

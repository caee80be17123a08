"""The engine across processes: this host's processes share memory, or say why they do not.

All processes of a job attach together, through the key-value store of JAX's coordination service.
They also compare there what must be the same on all, since a collective on which two processes
decide differently would hang.
"""

import atexit
import collections
import contextlib
import dataclasses
import functools as ft
import math
import os
import re
import secrets
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from jaxcoll import _compat, _crossovers, _cuda, _door, _native, _processes, _segments
from jaxcoll._board import Board
from jaxcoll._config import accelerates_lax, config, logger
from jaxcoll._host import host
from jaxcoll._steps import await_steps
from jaxcoll.diagnosis import black_box, dumps, watcher

# Of a process: for calls that are left ahead of the others (csrc/host/job.cc, kMostAhead), and for
# those of each device that may be open at once; JAX keeps at most 32 executions in flight.
_LANES_AHEAD = 16
_LANES_PER_DEVICE = 3
_MIN_LANES = 32
# Of each call, for each rank of the host: four rounds, see csrc/host/route.h. In all about as much
# as the L2 cache of a core: what is written again has then left the caches of those who have read
# it. Measured on 2 and 4 processes: beyond the limit nothing is gained.
_WINDOW_PER_RANK = 512 << 10
_MAX_WINDOW = 1 << 20
_ROUNDS_IN_WINDOW = 4
_PAGE = 4096


@dataclasses.dataclass
class _State:
    attachments: int = 0
    host_of: Sequence[str] = ()
    pids: Mapping[int, int] = dataclasses.field(default_factory=dict)  # of this host's processes
    copy_costs: Sequence[float] | None = None
    problem: str | None = None
    window_bytes: int = 0
    has_spare_cores: bool = False
    multiplies_alike: bool = True


_state = _State()
_placed: list[Primitive] = []
_cuda.prepare_environment()


def reset() -> None:
    """Makes collectives between processes work again after an error; call it on all processes.

    After a `CollectiveError` between processes, every further call between them fails with the same
    cause, because the processes may stand at different places of their programs. This waits for the
    steps in flight whose results are still held (wait for others yourself), and until all processes
    have come here, makes them a new shared memory, and forgets the old one. Where one process comes
    for a reason of its own, the calls fail in which others wait for it. What the failed
    programs were to compute, and arrays that were donated to them, is lost. In a job of one process
    the next program runs anyway, but for XLA's own collectives, where those run on the engine
    (`initialize(accelerate=True)`). What has failed before makes the process's end no error.

    Raises:
        RuntimeError: a process has ended, after which the whole job is to be started anew, or does
            not come within `config.timeout_s`; or `jaxcoll.initialize()` was not called.

    Example:
        >>> try:
        ...     state = jax.block_until_ready(train_step(state, batch))
        ... except (jax.errors.JaxRuntimeError, ValueError):
        ...     jaxcoll.reset()
        ...     state = restore(checkpoint)
    """
    if _compat.process_id_and_count()[1] == 1:
        await_steps()
        watcher.forget_failures()
        _cuda.reset(alone=True)
        if _door.is_open():
            _door.reset()
        return
    if not _state.attachments:
        raise RuntimeError("reset(): call jaxcoll.initialize() first, on all processes.")
    await_steps()  # none of them may meet a step of the time after
    watcher.forget_failures()  # who resets knows of them
    _cuda.reset(alone=False)
    with _told_to_others():
        attach("reset")
    _door.reset()


@contextlib.contextmanager
def _told_to_others() -> Iterator[None]:
    """Has the calls fail that others wait in: this process does not come to them any more."""
    core = _native.core()
    if core is None:
        yield
        return
    core.note_reset(True)
    try:
        yield
    except BaseException:
        core.note_reset(False)  # it is in the old memory still
        raise


def attach(call: str = "initialize") -> None:
    """Joins the memory of this host's processes; all processes of the job do so together.

    Raises:
        RuntimeError: settings differ between processes, or a process does not come.
    """
    process, num_processes = _compat.process_id_and_count()
    if num_processes == 1:
        return
    # The same number on all: it counts what has succeeded, and who fails may try again.
    attempt = _state.attachments + 1
    board = Board(call, f"jaxcoll/{attempt}", process, range(num_processes))
    board.watch(_state.pids)

    cards = board.exchange("settings", _card())
    _compare(call, [card["settings"] for card in cards])
    hosts = [card["host"] for card in cards]
    here = [i for i, host in enumerate(hosts) if host == hosts[process]]
    _state.pids = {i: cards[i]["pid"] for i in here}
    board.watch(_state.pids)
    devices = [cards[i]["devices"] for i in here]
    # Alone on the host there is nobody to share with: the seat alone counts.
    lanes, window = _measures(devices) if len(here) > 1 else (1, _PAGE)
    core = _native.core()
    problem = _first_reasons([card["missing"] for card in cards])
    if core is not None and not problem:
        for kind in _segments.KINDS:
            reason = _share(board, kind, core, (len(here), lanes, window), here, process)
            problem = _first_reasons(board.exchange(f"attached/{kind}", reason))
            if not problem:
                _observe(core, cards, here, process)
                _start(board, core, here)
                _use(core)
                break
    if core is not None:
        core.set_process(process, num_processes)
        met_ns = 0 if len(here) == num_processes else board.moment("clock")  # a host has one
        dumps.observe(_black_boxes(cards, here, process), cards[0]["dumps"], met_ns)
        watcher.start()
    changes = _state.attachments == 0 or problem != _state.problem
    _state.attachments, _state.host_of = attempt, hosts
    _cuda.know(_state.pids)
    _cuda.set_generation(attempt)
    _state.problem, _state.window_bytes = problem, window
    _state.has_spare_cores = any(card["cores"] > card["devices"] for card in cards)
    _state.multiplies_alike = all(card["multiplies"] == cards[0]["multiplies"] for card in cards)
    if problem:
        logger.warning(
            "jaxcoll: no native calls between processes (%s); they run on jax.lax.", problem
        )
    if changes and _compat.backends_are_initialized():
        jax.clear_caches()  # what is compiled has taken the other path


def _start(board: Board, core: Any, here: Sequence[int]) -> None:
    """Begins to use the segment, when all processes have joined it."""
    # What is compiled stands on what was measured first.
    own = _state.copy_costs or core.copy_costs()
    answers = board.exchange("reading", (core.probe_peers(), own))
    # One that may not read another's memory, as in some containers, decides for all.
    may_read = all(may for may, _ in answers)
    _state.copy_costs = agreed_costs([answers[process][1] for process in here])
    if may_read and len(here) > 1 and math.isinf(_state.copy_costs[-1]):
        logger.info(
            "jaxcoll: copies between processes go through shared memory: how fast they are read "
            "was not measured (a process came late, or windows are small)."
        )
    core.start(may_read, _state.copy_costs)


def agreed_costs(of_processes: Sequence[Sequence[float]]) -> list[float]:
    """Returns what one of the processes has, of each kind of copy.

    So processes that have agreed before agree on the same.
    """
    return [statistics.median_high(kind) for kind in zip(*of_processes, strict=True)]


def _observe(
    core: Any, cards: Sequence[Mapping[str, Any]], here: Sequence[int], process: int
) -> None:
    """Lets errors say what the other processes of this host do, as far as they may be read."""
    for other in here:
        path = cards[other]["black box"]
        if other != process and path is not None:
            with contextlib.suppress(OSError):
                _segments.join(path, lambda memory, other=other: core.observe(other, memory))


def _black_boxes(
    cards: Sequence[Mapping[str, Any]], here: Sequence[int], process: int
) -> dict[int, black_box.BlackBox]:
    found = {}
    for other in here:
        path = cards[other]["black box"]
        if other != process and path is not None:
            with contextlib.suppress(OSError, ValueError):
                found[other] = black_box.at_path(path)
    return found


def agree(topic: str, reason: str | None) -> str | None:
    """Returns a process's reason against something, or None where no process has one.

    All processes of the job call it, once for a topic.
    """
    process, num_processes = _compat.process_id_and_count()
    board = Board("initialize", f"jaxcoll/agree/{topic}", process, range(num_processes))
    board.watch(_state.pids)
    return _first_reasons(board.exchange(topic, reason))


def _first_reasons(reasons: Sequence[str | None]) -> str | None:
    found = [f"process {i}: {text}" for i, text in enumerate(reasons) if text]
    return "; ".join(found[:3]) or None


def _share(
    board: Board,
    kind: str,
    core: Any,
    measures: tuple[int, int, int],
    here: Sequence[int],
    process: int,
) -> str | None:
    """Makes a segment of a kind for this host's processes and joins it; says why that failed."""
    offer: dict[str, Any] = {"nonce": secrets.randbits(63)}
    segment = None
    if process == here[0]:
        try:
            if problem := _segments.shortage(core.segment_bytes(*measures), kind):
                raise RuntimeError(problem)
            segment = _segments.Segment(kind)
            offer["path"] = segment.path
            core.format_segment(segment.memory, *measures, offer["nonce"])
        except (OSError, RuntimeError) as error:
            offer["problem"] = (
                f"{error}. Give the processes more memory, or set JAXCOLL_SEGMENT_BYTES to less "
                f"than {measures[1] * measures[2]}, the bytes for each of them"
            )
    made = board.exchange(f"segments/{kind}", offer)[here[0]]
    reason = made.get("problem")
    if reason is None:
        try:
            _segments.join(
                made["path"],
                lambda memory: core.join(memory, made["nonce"], list(here), process),
            )
        except (OSError, RuntimeError) as error:
            reason = f"process {here[0]}'s memory can't be opened ({error})"
    board.exchange(f"joined/{kind}", None)
    if segment is not None:
        segment.close()
    return reason


@ft.cache
def _use(core: Any) -> None:
    _compat.lower_for_devices(_placed)
    # Before JAX's own hook, which waits for the other processes.
    atexit.register(_leave, core)


def _leave(core: Any) -> None:
    """Tells the other processes that this one makes no more calls."""
    await_steps()  # which may fail: nobody asked for them
    core.leave()


def problem() -> str | None:
    """Says why calls between processes can't be native, or None; warns once."""
    if jax.process_count() == 1:
        return None
    if _state.attachments == 0:
        _warn_once()
        return "jaxcoll.initialize() was not called in this job of several processes"
    return _state.problem


def problem_of_agreement() -> str | None:
    """Says that the processes of the job have not compared what they have, or None; warns once."""
    if jax.process_count() == 1 or _state.attachments:
        return None
    return problem()


def problem_of_all() -> str | None:
    """Says why not all processes of the job share memory, or None. Does not start JAX."""
    if _state.attachments == 0:
        return "there are no native calls between processes"
    if len(set(_state.host_of)) > 1:
        return "the job has several hosts"
    return _state.problem


def summary() -> tuple[tuple[str, ...], str | None]:
    """Returns what native calls between processes travel over, or why there are none."""
    if _state.attachments == 0:
        return (), "this process is alone, or jaxcoll.initialize() was not called"
    if _state.problem:
        return (), _state.problem
    hosts = len(set(_state.host_of))
    between = ("XLA's own collectives between hosts",) if hosts > 1 else ()
    return ("memory that the processes of a host share", *between), None


@ft.cache
def _warn_once() -> None:
    logger.warning(
        "jaxcoll: this job has several processes and jaxcoll.initialize() was not called: "
        "collectives run on jax.lax. Call it on all processes, before the first collective."
    )


def window_bytes() -> int:
    """Returns the bytes of one call's share of the segment; 0 before there is one."""
    return _state.window_bytes


def has_spare_cores() -> bool:
    """Tells whether a process of the job may run on more cores than it has devices."""
    return _state.has_spare_cores


def multiplies_alike() -> bool:
    """Tells whether all processes of the job know the same of how fast they multiply."""
    return _state.multiplies_alike


def depends_on_places(primitive: Primitive) -> None:
    """Has programs with the primitive lowered for each list of devices, once that matters."""
    _placed.append(primitive)
    if _state.attachments or _cuda.is_likely():
        _compat.lower_for_devices([primitive])


def other_pids() -> dict[int, int]:
    """Returns the pids of the other processes of this host that are known, by process."""
    return {process: pid for process, pid in _state.pids.items() if pid != os.getpid()}


def knows_hosts() -> bool:
    """Tells whether the processes of this job have told each other where they are."""
    return bool(_state.host_of)


def host_of(process: int) -> str:
    """Returns the same for processes on one host."""
    return _state.host_of[process]


def _card() -> dict[str, Any]:
    """What a process tells all others."""
    return {
        "host": host(),
        "pid": os.getpid(),
        "devices": _processes.expected_devices(),
        "cores": _processes.num_cpus(),
        "missing": _native.missing_reason(),
        "multiplies": _native.multiplies(),
        "black box": black_box.path_of_own(),
        "dumps": dumps.card(),
        "settings": {
            "jax": jax.__version__,
            "jaxcoll": _version(),
            "backend": config.backend,
            "accelerate_lax": accelerates_lax(),
            "reduction_order": config.reduction_order,
            "segment bytes": os.environ.get("JAXCOLL_SEGMENT_BYTES", ""),
            "GPUs": _cuda.fingerprint(),
            "crossovers": _crossovers.fingerprint(),
        },
    }


def _compare(call: str, settings: Sequence[dict[str, Any]]) -> None:
    for name, value in settings[0].items():
        for process, other in enumerate(settings):
            if other.get(name) != value:
                raise RuntimeError(
                    f"{call}(): {name} differs between the processes of the job: "
                    f"process 0 has {value!r}, process {process} has {other.get(name)!r}. "
                    "It must be the same on all."
                )


def _measures(devices: Sequence[int]) -> tuple[int, int]:
    """Returns the number of lanes of a process, and the bytes of each one's window.

    `devices` has how many each process of the host has.
    """
    lanes = max(_MIN_LANES, _LANES_AHEAD + _LANES_PER_DEVICE * max(devices))
    window = min(_MAX_WINDOW, _WINDOW_PER_RANK * sum(devices))
    window = max(window, _least_window(sum(devices), max(devices)))
    if chosen := _segment_bytes():
        window = min(window, chosen // lanes)
    return lanes, max(-(-window // _PAGE) if not chosen else window // _PAGE, 1) * _PAGE


def _least_window(ranks: int, most: int) -> int:
    """As csrc/host/route.h, MinWindowBytes: for groups of `ranks`, `most` of them in a process."""
    return _ROUNDS_IN_WINDOW * 64 * (ranks + 1) * most


def window_problem(processes: Sequence[int]) -> str | None:
    """Says that a group with its ranks in these processes does not fit the windows, or None."""
    counts = collections.Counter(processes)
    least = _least_window(len(processes), max(counts.values()))
    if len(counts) == 1 or least <= _state.window_bytes:
        return None
    return (
        f"a group of {len(processes)} ranks needs windows of {least} bytes, and "
        f"JAXCOLL_SEGMENT_BYTES leaves {_state.window_bytes}"
    )


def _segment_bytes() -> int | None:
    """Returns the bytes of one process as they are set, or None."""
    value = os.environ.get("JAXCOLL_SEGMENT_BYTES", "").strip()
    if not value:
        return None
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    match = re.fullmatch(r"(\d+)([KMG]?)", value.upper())
    if match is None or int(match[1]) == 0:
        raise ValueError(
            "environment: JAXCOLL_SEGMENT_BYTES: expected a number of bytes, such as 16M, got "
            f"{value!r}."
        )
    return int(match[1]) * units[match[2]]


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("jaxcoll")
    except metadata.PackageNotFoundError:  # run from its sources
        return "unknown"

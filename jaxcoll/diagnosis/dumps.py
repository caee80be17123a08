"""Dumps: what the processes of a job have done last, a JSON file each, and nothing besides.

`jaxcoll doctor` reads them, and so can anybody: `calls` is a table of the latest calls of each
device, `sites` what stands where they were made, times are nanoseconds of the process's clock,
which `clock` relates to the time of day, and to the clocks of other hosts.
"""

import contextlib
import functools as ft
import getpass
import json
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxcoll import _cuda, _native
from jaxcoll._config import logger
from jaxcoll.diagnosis import black_box, stacks
from jaxcoll.diagnosis.black_box import CALL, BlackBox

FORMAT = "jaxcoll dump 1"

# A process that does not look after itself for so long won't write a dump.
_DEAF_NS = 2_000_000_000


class _Others:
    """The other processes of this host, as far as they may be read."""

    boxes: ClassVar[dict[int, BlackBox]] = {}
    named = os.environ.get("JAXCOLL_JOB")
    job = named or secrets.token_hex(8)
    met_ns = 0  # on this process's clock, a moment of all processes of several hosts


class _Folder:
    """Where dumps go, as the processes of the job have agreed on it."""

    shared: str | None = None


def silent() -> dict[int, BlackBox]:
    """Returns what is left of this host's processes that are gone, or stopped."""
    return {
        process: box
        for process, box in _Others.boxes.items()
        if state_of(box.about()["pid"]) != "running"
    }


def card() -> dict[str, str]:
    """Returns what all processes of a job take from the first one."""
    return {"job": _Others.job, "folder": str(folder() or "")}


def job() -> str:
    """Names the job as all of its processes do; empty where they have not agreed on a name."""
    return _Others.job if _Others.named or _Folder.shared is not None else ""


def observe(others: Mapping[int, BlackBox], first: Mapping[str, str], met_ns: int = 0) -> None:
    """Has dumps tell of these processes, too, when they are gone, all in one folder.

    `first`: the card of the first process. `met_ns`: when this process's clock showed that, it was
    the same moment on all hosts; 0: there is one host.
    """
    _Others.boxes, _Others.job, _Others.met_ns = dict(others), first["job"], met_ns
    _Folder.shared = first["folder"]
    tell_engine()


def tell_engine() -> None:
    """Has errors name the folder."""
    core = _native.core()
    if core is not None:
        core.set_dump_folder(str(folder() or ""))


def folder() -> Path | None:
    """Returns where dumps go, the same for all processes of a job; None where they are off."""
    if _Folder.shared is not None:
        return Path(_Folder.shared) if _Folder.shared else None
    return _own_folder()


@ft.cache
def _own_folder() -> Path | None:
    chosen = os.environ.get("JAXCOLL_DUMP_DIR", "").strip()
    if chosen.lower() == "none":
        return None
    if chosen:
        return Path(chosen).absolute()
    job = os.environ.get("JAXCOLL_JOB") or f"process-{os.getpid()}"
    root = Path(tempfile.gettempdir()) / f"jaxcoll-{_user()}"
    with contextlib.suppress(OSError):
        root.mkdir(mode=0o700, exist_ok=True)
        if hasattr(os, "getuid") and root.lstat().st_uid != os.getuid():  # somebody was faster
            return Path(tempfile.mkdtemp(prefix="jaxcoll-")) / job
    return root / job


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        return str(os.getuid())


def dump(path: str | os.PathLike[str] | None = None) -> Path:
    """Writes what this process has done last, and does now, for `jaxcoll doctor`.

    That is its latest 4,096 calls of each device, of collectives on the native path, and what its
    threads do in Python. It writes a file of its own, `process_0.json` for process 0,
    so that all processes of a job can write to one folder. A process that has used native
    collectives, or `jaxcoll.watch`, writes the same on SIGUSR2 into the folder of errors, also
    where it is stuck.

    Args:
        path: the folder. By default that of errors: `JAXCOLL_DUMP_DIR`, else one for each job in
            the temporary folder.

    Returns:
        The file.

    Raises:
        OSError: it can't be written.
        RuntimeError: there is no native extension, or no folder (`JAXCOLL_DUMP_DIR=none`).

    Example:
        >>> jaxcoll.dump("dumps")
        PosixPath('dumps/process_0.json')
    """
    box = black_box.own()
    if box is None:
        raise RuntimeError("dump: there are no records: this jaxcoll has no native extension.")
    where = folder() if path is None else Path(path)
    if where is None:
        raise RuntimeError("dump(path): expected a folder: JAXCOLL_DUMP_DIR=none.")
    return _write(where, _own(box))


def of_report(report: str) -> Path:
    """Writes the dump of this process with what has been reported, of which no call has failed.

    Raises:
        OSError: it can't be written.
        RuntimeError: as `dump`.
    """
    box, where = black_box.own(), folder()
    if box is None or where is None:
        return dump()
    return _write(where, {**_own(box), "report": report})


def after_failure(reason: str) -> None:
    """Writes the dump of this process, and of those of this host that are gone."""
    box, where = black_box.own(), folder()
    if box is None or where is None:
        return
    try:
        file = _write(where, {**_own(box), "reason": reason})
        for other in _Others.boxes.values():
            about = other.about()
            state = state_of(about["pid"])
            is_deaf = time.monotonic_ns() - about["beat_ns"] > _DEAF_NS
            is_silent = state != "running" or is_deaf
            if is_silent and not _has_dumped(where, about["process"], reason):
                _write(where, {**contents(other), "state": state, "reason": reason})
    except OSError as error:  # it must not hide the failure
        logger.warning("jaxcoll: no dump could be written: %s", error)
        return
    logger.info("jaxcoll: dumped to %s", file)


def _own(box: BlackBox) -> dict[str, Any]:
    """Returns this process's dump."""
    threads = stacks.all_threads()
    return {**contents(box), "state": "running", "reason": _reason(box), "threads": threads}


def _reason(box: BlackBox) -> str:
    """Returns what has failed last, if the process has not gone on since."""
    core = _native.core()
    if core is None:
        return ""
    if failure := core.job_failure():
        return failure
    calls = box.calls()
    has_ended = calls["moved"] > 0
    failed_at = calls["resumed"][~has_ended].max(initial=0)
    has_gone_on = (calls["arrived"][has_ended] > failed_at).any()
    return "" if has_gone_on else (core.failures(0) or _cuda.failures() or [""])[-1]


def _has_dumped(where: Path, process: int, reason: str) -> bool:
    """Tells whether there is a dump of a process for the same failure."""
    try:
        dumped = json.loads(_file(where, process).read_text())
    except (OSError, ValueError):
        return False
    return dumped.get("job") == _Others.job and dumped.get("reason") == reason


def state_of(pid: int) -> str:
    """Returns whether a process is running, stopped or gone."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "running")


def contents(box: BlackBox) -> dict[str, Any]:
    """Returns what stands in a black box, as it does in a dump."""
    stack, stack_at_ns = box.stack()
    calls, sites = box.calls(), box.sites()
    used = {int(site) for site in calls["site"]}
    return {
        "format": FORMAT,
        "job": _Others.job,
        "host": socket.gethostname(),
        "boot": _boot(),
        "clock": {
            "now_ns": time.monotonic_ns(),
            "wall_ns": time.time_ns(),
            "met_ns": _Others.met_ns,
        },
        **box.about(),
        "stack": stack,
        "stack_at_ns": stack_at_ns,
        "command": sys.argv,
        "sites": {str(site): texts for site, texts in sites.items() if site in used},
        "calls": {"columns": list(CALL.names or ()), "rows": calls.tolist()},
    }


def _file(where: Path, process: int) -> Path:
    return where / f"process_{process}.json"


def _boot() -> str | None:
    """Identifies the boot of the machine, with which its clock began; None where that fails."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _write(where: Path, dumped: Mapping[str, Any]) -> Path:
    """Writes a dump where nobody finds a part of it."""
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = _file(where, dumped["process"])
    part = where / f".process_{dumped['process']}.{secrets.token_hex(4)}"
    # Nobody else's file, nor through a link of somebody else's, where many can write.
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(json.dumps(dumped) + "\n")
    part.replace(file)
    return file

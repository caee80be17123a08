"""The memory that the processes of a host share: made by one of them, opened by the others.

Anonymous where that is possible, reached through `/proc` of the process that made it, so that
nothing is left whatever dies. Else a file in /dev/shm, whose name goes as soon as all have opened
it.
"""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAMED = Path("/dev/shm")
_CGROUPS = Path("/sys/fs/cgroup")
KINDS = ("anonymous", "named")


class Segment:
    """A file descriptor of shared memory, made by this process, and how others reach it."""

    def __init__(self, kind: str) -> None:
        """Makes an empty one.

        Raises:
            OSError: this kind is not possible here.
        """
        self._name: Path | None = None
        if kind == "anonymous":
            self.memory = os.memfd_create("jaxcoll", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self.memory}"
        else:
            _remove_leftovers()
            self._name = _NAMED / f"jaxcoll-{os.getpid()}-{os.urandom(8).hex()}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self.memory = os.open(self._name, flags, 0o600)
            self.path = str(self._name)

    def close(self) -> None:
        """Lets go of it; who has mapped it keeps the memory."""
        os.close(self.memory)
        if self._name is not None:
            self._name.unlink(missing_ok=True)


def join(path: str, attach: Callable[[int], Any]) -> None:
    """Calls `attach` with the descriptor of a segment that another process has made.

    Raises:
        OSError: it can't be opened.
    """
    memory = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        attach(memory)
    finally:
        os.close(memory)


def shortage(num_bytes: int, kind: str) -> str | None:
    """Says that so much shared memory is not to be had, or None.

    Anonymous memory beyond what there is would not be refused: the kernel would kill a process.
    """
    left = _memory_left()
    if kind == "named":
        with contextlib.suppress(OSError):
            room = os.statvfs(_NAMED)
            left = min(left, 2 * room.f_bavail * room.f_frsize)
    if num_bytes <= left // 2:
        return None
    return f"no {num_bytes >> 20} MiB of shared memory: half of what is left are {left >> 21} MiB"


def _memory_left() -> int:
    """Returns the bytes that this machine has left, or this container where that is less."""
    left = 1 << 62
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        left = int(match[1]) * 1024 if match else left
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        (own,) = [line.partition("::")[2] for line in lines if line.startswith("0::")]
        group = _CGROUPS / own.lstrip("/")
        for folder in [group, *group.parents]:
            limit = folder / "memory.max"
            if limit.exists() and (most := limit.read_text().strip()) != "max":
                used = int((folder / "memory.current").read_text())
                left = min(left, max(0, int(most) - used))
    return left


def _remove_leftovers() -> None:
    """Removes the files of processes that died before all had opened them."""
    for file in _NAMED.glob("jaxcoll-*-*"):
        pid = file.name.split("-")[1]
        with contextlib.suppress(OSError):
            if file.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                file.unlink()

"""The black box of a process: its latest calls, where they stand, and what its Python does.

Memory that the extension writes (csrc/host/black_box.h) and that any process of the same user can
read, by the measures in its header, also when its own process can't answer.
"""

import contextlib
import dataclasses
import functools as ft
import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxcoll import _native

_MAGIC = 0x6A617863626F0002
_NAME = "jaxcoll-black-box"
_WORDS = struct.Struct("<Q11Q15q")

# Of a site, as csrc/host/black_box.cc, kMaxTexts.
_MOST_TEXTS = 4

PHASES = (
    "unknown",
    "in Python",
    "compiling",
    "in a callback",
    "waiting for results",
    "ended",
    "in a call",
)
PYTHON, COMPILING, CALLBACK, AWAITING, ENDED, CALLING = range(1, 7)

MOMENTS = ("arrived", "opened", "met", "moved", "resumed")
_ENTRY = np.dtype(
    {
        "names": ["sequence", "site", "group", "rank", "execution", "run", "iteration", *MOMENTS],
        "formats": ["<u8"] * 3 + ["<i8"] * 9,
        "itemsize": 128,
    }
)
# Of calls, as `BlackBox.calls` returns them.
CALL = np.dtype([("device", "<i8"), *((name, _ENTRY[name]) for name in _ENTRY.names or ())])


@dataclasses.dataclass(frozen=True)
class _Header:
    magic: int
    bytes: int
    stack_at: int
    stack_bytes: int
    sites_at: int
    site_bytes: int
    max_sites: int
    rings_at: int
    ring_bytes: int
    max_rings: int
    entry_bytes: int
    capacity: int
    pid: int
    process: int
    num_processes: int
    started_ns: int
    started_wall_ns: int
    phase: int
    phase_since_ns: int
    beat_ns: int
    callbacks: int
    paused_until_ns: int
    asked: int
    told: int
    dumps_asked: int
    num_sites: int
    num_rings: int


class BlackBox:
    """A view of one; every method reads it as it is at that moment.

    Args:
        memory: its bytes.

    Raises:
        ValueError: it is not one, or another version's.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        header = self._header()
        if header.magic != _MAGIC or header.entry_bytes != _ENTRY.itemsize:
            raise ValueError("no black box of this version of jaxcoll")

    def _header(self) -> _Header:
        return _Header(*_WORDS.unpack_from(self._memory))

    def about(self) -> dict[str, Any]:
        """Returns which process it is, and since when it does what; times in ns of its clock."""
        header = self._header()
        return {
            "pid": header.pid,
            "process": header.process,
            "num_processes": header.num_processes,
            "started_ns": header.started_ns,
            "started_wall_ns": header.started_wall_ns,
            "phase": PHASES[header.phase],
            "phase_since_ns": header.phase_since_ns,
            "beat_ns": header.beat_ns,
            "paused_until_ns": header.paused_until_ns,
        }

    def stack(self) -> tuple[str, int]:
        """Returns its last Python stack, and when that was taken; 0: never."""
        header = self._header()
        begin, text, at_ns = header.stack_at, "", 0
        for _ in range(100):
            version, at_ns = struct.unpack_from("<Qq", self._memory, begin)
            text = _text(self._memory, begin + 16, header.stack_bytes - 16)
            if version % 2 == 0 and struct.unpack_from("<Q", self._memory, begin) == (version,):
                break
        return text, at_ns

    def sites(self) -> dict[int, list[dict[str, Any]]]:
        """Returns what stands at the sites of calls: for each id the latest texts, with details."""
        header = self._header()
        found: dict[int, dict[str, dict[str, Any]]] = {}
        for i in range(max(0, header.num_sites - header.max_sites), header.num_sites):
            at = header.sites_at + i % header.max_sites * header.site_bytes
            (site,) = struct.unpack_from("<Q", self._memory, at)
            text, _, details = _text(self._memory, at + 8, header.site_bytes - 8).partition("\n")
            if site and (site,) == struct.unpack_from("<Q", self._memory, at):
                known: dict[str, Any] = {}
                with contextlib.suppress(ValueError):  # longer than there is room for
                    known = json.loads(details or "{}")
                texts = found.setdefault(site, {})
                texts.pop(text, None)  # to the end
                texts[text] = {"text": text, **known}
        return {site: list(texts.values())[-_MOST_TEXTS:] for site, texts in found.items()}

    def calls(self, after: Mapping[int, int] | None = None) -> np.ndarray:
        """Returns the latest calls of each device, of dtype `CALL`, by device and sequence.

        `after`: by device, the sequence of the last call that is not wanted.
        """
        header = self._header()
        parts = [np.empty(0, CALL)]
        for i in range(header.num_rings):
            at = header.rings_at + i * header.ring_bytes
            device, last = struct.unpack_from("<qQ", self._memory, at)
            begin = at + header.ring_bytes - header.capacity * header.entry_bytes
            entries = np.frombuffer(self._memory, _ENTRY, header.capacity, begin)
            known = max(0, last - header.capacity, (after or {}).get(device, 0))
            # Those that are not known, by their places in the ring; each is checked to be whole.
            wanted = np.arange(known, last, dtype=np.int64)
            copy = entries[wanted % header.capacity]
            now = entries["sequence"][wanted % header.capacity]
            kept = copy[(copy["sequence"] == wanted + 1) & (now == wanted + 1)]
            calls = np.empty(len(kept), CALL)
            calls["device"] = device
            for name in _ENTRY.names or ():
                calls[name] = kept[name]
            parts.append(calls)
        return np.concatenate(parts)


def _text(memory: Any, at: int, size: int) -> str:
    return bytes(memory[at : at + size]).partition(b"\0")[0].decode(errors="replace")


@ft.cache
def own() -> BlackBox | None:
    """Returns this process's, or None without the extension."""
    core = _native.core()
    return None if core is None else BlackBox(core.black_box())


def of_process(pid: int) -> BlackBox:
    """Returns that of another process.

    Raises:
        OSError: there is no such process, or it may not be read.
        ValueError: it has none.
    """
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if _NAME in os.readlink(file):
                box = at_path(str(file))
                if box.about()["pid"] == pid:  # else another process's, which it reads
                    return box
    raise ValueError(f"process {pid} does not use jaxcoll")


def at_path(path: str) -> BlackBox:
    """Returns the black box in a file.

    Raises:
        OSError: it can't be read.
        ValueError: there is none.
    """
    with open(path, "rb") as file:
        return BlackBox(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def path_of_own() -> str | None:
    """Returns where other processes find this one's, or None where they can't."""
    core = _native.core()
    memory = -1 if core is None else core.black_box_file()
    return None if memory < 0 else f"/proc/{os.getpid()}/fd/{memory}"


def site_text(sites: Mapping[int, list[dict[str, Any]]], site: int) -> str:
    """Returns what errors say of a site."""
    return ", or ".join(known["text"] for known in sites.get(site, ())) or "an unknown call"

"""`jaxcoll top`: what the devices of a running job do now, from its black boxes."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxcoll.diagnosis import black_box, dumps
from jaxcoll.diagnosis.black_box import BlackBox

COLUMNS = ("process", "pid", "device", "state", "calls/s", "MB/s", "in calls", "call", "for")


@dataclasses.dataclass(frozen=True)
class Look:
    """The black box of a process at a moment."""

    about: dict[str, Any]
    calls: np.ndarray
    sites: dict[int, list[dict[str, Any]]]
    at_ns: int


def find(target: str) -> dict[int, BlackBox]:
    """Returns black boxes by pid: of a process, of what it has started, or of a job by its name.

    Raises:
        ValueError: there are none.
    """
    found = {}
    pids = _family(int(target)) if target.isdigit() else _of_job(target)
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            found[pid] = black_box.of_process(pid)
    if not found:
        raise ValueError(
            f"top: {target}: expected the pid of a process that uses jaxcoll, or of `jaxcoll run`, "
            "or the name of a job (JAXCOLL_JOB), of this user on this host."
        )
    return found


def _family(pid: int) -> Iterator[int]:
    """Yields a process and all that it has started, and these."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _family(int(child))


def _of_job(name: str) -> Iterator[int]:
    wanted = f"JAXCOLL_JOB={name}".encode()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def look(box: BlackBox) -> Look:
    """Returns what stands in a black box now."""
    return Look(box.about(), box.calls(), box.sites(), time.monotonic_ns())


def rows(before: dict[int, Look], now: dict[int, Look]) -> list[tuple[str, ...]]:
    """Returns the cells of a table, a row for each device, of what happened between two looks."""
    found = []
    for pid, seen in sorted(now.items(), key=lambda item: (item[1].about["process"], item[0])):
        state = dumps.state_of(pid)
        phase = seen.about["phase"] if state == "running" else state
        devices = sorted({int(d) for d in seen.calls["device"]})
        for device in devices or [-1]:
            own = seen.calls[seen.calls["device"] == device]
            found.append(
                (
                    str(seen.about["process"]),
                    str(pid),
                    "" if device < 0 else str(device),
                    phase,
                    *_rates(own, seen, before.get(pid)),
                    *_current(own, seen),
                )
            )
    return found


def _rates(own: np.ndarray, seen: Look, before: Look | None) -> tuple[str, str, str]:
    """Returns calls and megabytes per second, and the share of the time in calls."""
    if before is None or not len(own):
        return "", "", ""
    known = before.calls[before.calls["device"] == own["device"][0]]
    first = int(known["sequence"].max()) if len(known) else 0
    since_ns = before.at_ns
    if int(own["sequence"].min()) > first + 1:  # the ring holds the latest of what was between
        since_ns = max(since_ns, int(own["arrived"].min()))
    recent = own[(own["resumed"] > since_ns) | (own["resumed"] == 0)]
    bytes_of = {site: texts[0].get("bytes", 0) for site, texts in seen.sites.items()}
    moved = sum(bytes_of.get(int(call["site"]), 0) for call in recent if call["resumed"])
    begins = np.maximum(recent["arrived"], since_ns)
    ends = np.where(recent["resumed"] == 0, seen.at_ns, recent["resumed"])
    busy_ns = float(np.maximum(ends - begins, 0).sum())
    span_ns = max(1, seen.at_ns - since_ns)
    calls = int(own["sequence"].max()) - first
    return (
        f"{calls / max(1, seen.at_ns - before.at_ns) * 1e9:,.0f}",
        f"{moved / span_ns * 1e3:,.1f}",
        f"{min(1.0, busy_ns / span_ns):.0%}",
    )


def _current(own: np.ndarray, seen: Look) -> tuple[str, str]:
    """Returns the call that a device is in, and for how long; or how long it is in none."""
    if not len(own):
        return "", ""
    waiting = own[own["resumed"] == 0]
    if len(waiting):
        call = waiting[-1]
        since_ns = seen.at_ns - int(call["arrived"])
        return black_box.site_text(seen.sites, int(call["site"])), f"{since_ns * 1e-9:.1f} s"
    since_ns = seen.at_ns - int(own["resumed"].max())
    return "none", f"{max(0, since_ns) * 1e-9:.1f} s"


def table(cells: list[tuple[str, ...]]) -> Any:
    """Returns a table that rich prints."""
    from rich.table import Table

    made = Table(*COLUMNS, title=f"jaxcoll top, {time.strftime('%H:%M:%S')}")
    for row in cells:
        made.add_row(*row)
    return made


def follow(target: str, seconds: float, times: int | None) -> None:
    """Prints the table anew again and again, or `times` times one below the other.

    Ends when all of the processes are gone.

    Raises:
        ValueError: there is nothing to look at.
    """
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError:
        raise ValueError("top: rich is not installed: pip install 'jaxcoll[top]'.") from None
    boxes = find(target)
    before = {pid: look(box) for pid, box in boxes.items()}
    console = Console(width=None if os.isatty(1) else 160)
    count = 0
    with contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=console)) if times is None else None
        while times is None or count < times:
            time.sleep(seconds)
            now = {pid: look(box) for pid, box in boxes.items()}
            shown = table(rows(before, now))
            if live is not None:
                live.update(shown)
            else:
                console.print(shown)
            if all(dumps.state_of(pid) == "gone" for pid in boxes):
                return
            before, count = now, count + 1

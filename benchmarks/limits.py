"""What bounds calls between processes of this machine: copies between them, and switches on a core.

    python benchmarks/limits.py

Two processes, on a core each unless it says otherwise. Medians. What a program across processes
takes can't be less than the copies that it makes and, where ranks share a core, the switches.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from environment import environment, machine

SIZES = [1 << 16, 1 << 20, 1 << 24]
SWITCHES = 20_000


class Vector(ctypes.Structure):
    """An element of the lists of process_vm_readv(2)."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def median_s(work: Callable[[], object], budget_s: float = 0.5) -> float:
    times = []
    until = time.perf_counter() + budget_s
    while time.perf_counter() < until or len(times) < 5:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def lend(core: int, size: int, pipe: Connection) -> None:
    """Holds memory that the other process reads."""
    os.sched_setaffinity(0, {core})
    block = np.ones(size, np.uint8)
    pipe.send(block.ctypes.data)
    pipe.recv()


def copies(cores: list[int]) -> list[dict[str, float]]:
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    rows = []
    for size in SIZES:
        ours, theirs = Pipe()
        lender = Process(target=lend, args=(cores[-1], size, theirs))
        lender.start()
        address = ours.recv()
        target, source = np.zeros(size, np.uint8), np.ones(size, np.uint8)
        there, here = Vector(address, size), Vector(target.ctypes.data, size)

        def from_peer(pid: int = lender.pid or 0, here: Vector = here, there: Vector = there):
            got = read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            assert got == here.length, ctypes.get_errno()

        peer = median_s(from_peer)
        assert (target == 1).all()
        inside = median_s(lambda t=target, s=source: np.copyto(t, s))
        ours.send(None)
        lender.join()
        rows.append({"bytes": size, "peer_us": 1e6 * peer, "copy_us": 1e6 * inside})
    return rows


def answer(core: int, pipe: tuple[int, int]) -> None:
    os.sched_setaffinity(0, {core})
    for _ in range(SWITCHES):
        os.read(pipe[0], 1)
        os.write(pipe[1], b"x")


def switches(cores: list[int]) -> list[dict[str, object]]:
    """How long until another process runs that this one wakes, and it this one again."""
    rows: list[dict[str, object]] = []
    for name, core in (("another core", cores[-1]), ("the same core", cores[0])):
        there, back = os.pipe(), os.pipe()
        other = Process(target=answer, args=(core, (there[0], back[1])))
        other.start()
        begin = time.perf_counter()
        for _ in range(SWITCHES):
            os.write(there[1], b"x")
            os.read(back[0], 1)
        seconds = time.perf_counter() - begin
        other.join()
        rows.append({"where": name, "one_way_us": 1e6 * seconds / SWITCHES / 2})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {cores[0]})
    of = environment() | {"cores": len(cores)}
    result = {
        "command": "python " + " ".join(sys.argv),
        "environment": of,
        "copies": copies(cores),
        "switches": switches(cores),
    }
    name = f"limits_{machine(of)}"
    lines = [
        "# What bounds calls between processes",
        "",
        f"`{result['command']}`, {of['date']}, {of['cpu']}, Python {of['python']}.",
        "",
        "| bytes | read from another process, us | GB/s | copied inside, us | GB/s |",
        "|--:|--:|--:|--:|--:|",
    ]
    for row in result["copies"]:
        rates = [row["bytes"] / row[key] / 1e3 for key in ("peer_us", "copy_us")]
        lines.append(
            f"| {row['bytes']} | {row['peer_us']:.1f} | {rates[0]:.1f} | {row['copy_us']:.1f} "
            f"| {rates[1]:.1f} |"
        )
    lines += ["", "| waking a process on | us, one way |", "|---|--:|"]
    lines += [f"| {row['where']} | {row['one_way_us']:.1f} |" for row in result["switches"]]
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (chosen.out / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

"""XLA's own collectives between processes, on our engine and on Gloo: steps, and each collective.

    python benchmarks/door.py [--processes 2,4] [--rounds 3] [--out FOLDER]

Which of the two JAX uses is fixed when it starts. So each round is two jobs, one after the other,
and ratios are of one round.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from environment import environment
from shared import command, head, rows_of, save

SIZES = {"256 B": 256, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "16 MiB": 1 << 24}
NAMES = ("gloo", "jaxcoll")


# ---- What each process measures ------------------------------------------------------------------


def seconds(run: Callable[..., Any], *arguments: Any) -> float:
    import jax

    begin = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - begin


def checksum(result: Any) -> float:
    """Returns a number of this process's part of a result."""
    import jax
    import numpy as np

    parts = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(result)]
    return float(sum(np.abs(np.asarray(part, np.float64)).sum() for part in parts))


def timed_steps() -> Iterator[tuple[str, float, float]]:
    """Training steps with jit and NamedSharding alone: time and result."""
    import jax
    from sharded_steps import steps

    for name, step in steps():
        for _ in range(3):
            result = jax.block_until_ready(step())
        yield name, 1e3 * statistics.median(seconds(step) for _ in range(30)), checksum(result)


def collectives() -> Iterator[tuple[str, float, float]]:
    """What a call of each of lax's collectives costs in a longer chain of them, and its result."""
    import jax

    from jaxcoll import accelerate_lax
    from jaxcoll._chains import AXIS, OPS, chain, operand, variants

    accelerate_lax(False)  # XLA's, not ours in their place
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    for op in OPS:
        for text, size in SIZES.items():
            call = variants(op, mesh.size, ())["lax"]
            calls, count = (17, 25) if size <= 1 << 16 else (4, 9 if size <= 4 << 20 else 5)
            long, short = chain(op, call, calls, mesh), chain(op, call, 1, mesh)
            x = operand(size, mesh)
            for function in (short, long):
                result = jax.block_until_ready(function(x))
            extra = statistics.median(
                seconds(long, x) - seconds(short, x)  # in turn, so that drift hits both
                for _ in range(count)
            )
            yield f"{op}, {text}", 1e3 * max(extra, 1e-9) / (calls - 1), checksum(result)


def child() -> None:
    import jax

    for name, ms, value in (*timed_steps(), *collectives()):
        if jax.process_index() == 0:
            print(json.dumps({"name": name, "ms": ms, "value": value}), flush=True)


# ---- Jobs and the report -------------------------------------------------------------------------


def job(processes: int, name: str) -> dict[str, dict[str, float]]:
    launcher = [sys.executable, "-m", "jaxcoll", "run", "-n", str(processes)]
    launcher += ["--accelerate"] * (name == "jaxcoll")
    done = subprocess.run(
        [*launcher, __file__, "--child"],
        env={**os.environ, "JAXCOLL_ACCELERATE_LAX": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return {row["name"]: row for row in rows_of(done.stdout)}


def measure(processes: int, rounds: int) -> list[dict[str, Any]]:
    runs = []
    for number in range(rounds):
        names = NAMES if number % 2 == 0 else NAMES[::-1]
        runs.append({name: job(processes, name) for name in names})
        print(f"{processes} processes: round {number + 1} of {rounds}", file=sys.stderr)
    return [
        {
            "processes": processes,
            "what": what,
            **{name: statistics.median(run[name][what]["ms"] for run in runs) for name in NAMES},
            "ratio": statistics.median(
                run["gloo"][what]["ms"] / run["jaxcoll"][what]["ms"] for run in runs
            ),
            "equal": all(
                math.isclose(*(run[name][what]["value"] for name in NAMES), rel_tol=1e-6)
                for run in runs
            ),
        }
        for what in runs[0]["gloo"]
    ]


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    numbers = sorted({row["processes"] for row in rows})
    figure, axes = plt.subplots(1, len(numbers), figsize=(5.5 * len(numbers), 8), squeeze=False)
    for number, axis in zip(numbers, axes[0], strict=True):
        chosen = [row for row in rows if row["processes"] == number][::-1]
        axis.barh(
            [row["what"] for row in chosen], [row["ratio"] for row in chosen], color="#2a6f97"
        )
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel("time on Gloo / time on jaxcoll (log scale)")
        axis.set_title(f"{number} processes")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child()
        return
    of = environment()
    rows = []
    for processes in map(int, chosen.processes.split(",")):
        rows += measure(processes, chosen.rounds)
    result = {"command": command(), "environment": of, "rows": rows}
    lines = [
        *head("XLA's own collectives between processes: on Gloo and on jaxcoll's engine", result),
        "One device a process. Times are medians in milliseconds; ratios (Gloo / jaxcoll, above "
        f"1 jaxcoll is faster) are medians over {chosen.rounds} rounds of two jobs each. Steps "
        "are of `sharded_steps.py`, with `jit` and `NamedSharding` alone: six 512x512 layers "
        "with a batch of 64, and a Transformer of 4 layers, width 256 and 16 sequences of 128 "
        "tokens. The others are one call of a chain of lax's collectives, with the bytes of a "
        "rank.",
        "",
        "| processes | what | Gloo ms | jaxcoll ms | ratio | results |",
        "|--:|---|--:|--:|--:|---|",
    ]
    lines += [
        f"| {row['processes']} | {row['what']} | {row['gloo']:.3f} | {row['jaxcoll']:.3f} "
        f"| {row['ratio']:.2f} | {'equal' if row['equal'] else 'DIFFERENT'} |"
        for row in rows
    ]
    draw(rows, save("door", result, "\n".join(lines) + "\n", chosen.out))


if __name__ == "__main__":
    main()

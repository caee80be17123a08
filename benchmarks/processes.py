"""Every collective across processes of one host: ours, jax.lax on Gloo, and mpi4jax on Open MPI.

    python benchmarks/processes.py [--processes 2,4] [--ops all_reduce,...] [--sizes 256,4096,...]

Without mpi4jax, which is an extra of the benchmarks (`pip install mpi4jax`, Open MPI), its columns
stay empty. All variants alternate in one job, one device a process. Results go to
benchmarks/results/.
"""

import argparse
import functools as ft
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpi4jax_chains
from environment import environment, machine

VARIANTS = ("native", "lax", "mpi4jax")
HERE = Path(__file__).resolve().parent
SIZES = (256, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
# Seconds that the variants of one measurement may take together, about.
BUDGET_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", default="2,4", help="numbers of processes")
    parser.add_argument("--ops", default="", help="comma-separated; all without")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a rank")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of a measurement")
    parser.add_argument("--no-lax", action="store_true", help="leave out Gloo, which takes longest")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for results")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure_here(arguments)
        return
    head = environment()
    parts = [job(int(n), arguments) for n in arguments.processes.split(",")]
    rows = [row for part in parts for row in part["processes"]]
    results = {
        "environment": head,
        "processes": rows,
        "train_step": [row for part in parts for row in part["train_step"]],
        "command": " ".join(["python benchmarks/processes.py", *sys.argv[1:]]),
    }
    write(results, arguments.out)
    if wrong := sum(row["wrong"] for row in rows):
        sys.exit(f"{wrong} wrong elements")


def has_mpi4jax() -> bool:
    return bool(importlib.util.find_spec("mpi4jax")) and shutil.which("mpirun") is not None


def job(num_processes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one job and returns what its first process has measured."""
    started = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f".processes-{num_processes}.json"
    script = [__file__, "--child", str(file), *sys.argv[1:]]
    if has_mpi4jax():
        binding = "core" if num_processes <= (os.cpu_count() or 1) else "none"
        command = ["mpirun", "-n", str(num_processes), "--allow-run-as-root", "--oversubscribe"]
        command += ["--bind-to", binding, sys.executable, *script]
    else:
        command = [sys.executable, "-m", "jaxcoll", "run", "-n", str(num_processes), *script]
    subprocess.run(command, check=True)
    print(f"{num_processes} processes: {time.monotonic() - started:.0f} s", file=sys.stderr)
    result = json.loads(file.read_text())
    file.unlink()
    return result


def measure_here(arguments: argparse.Namespace) -> None:
    import jax

    import jaxcoll

    jaxcoll.initialize()
    jaxcoll.accelerate_lax(False)
    import train_step

    from jaxcoll._chains import OPS

    ops = arguments.ops.split(",") if arguments.ops else list(OPS)
    rows = []
    for op in ops:
        for size in map(int, arguments.sizes.split(",")):
            found = measure_op(op, size, arguments)
            rows += found
            if jax.process_index() == 0:
                for row in found:
                    print(text(row), flush=True)
    steps = train_step.run(arguments.budget)
    if jax.process_index() == 0:
        arguments.child.write_text(json.dumps({"processes": rows, "train_step": steps}))


def measure_op(op: str, size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import jax
    import numpy as np

    from jaxcoll._chains import AXIS, chain, variants

    p = jax.process_count()
    mesh = jax.make_mesh((p,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    values = np.arange(p * (size // 4), dtype=np.float32) % 8
    sharding = jax.NamedSharding(mesh, jax.P(AXIS))
    x = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
    mine = np.split(values, p)[jax.process_index()]

    functions = variants(op, p, ("native",))
    if arguments.no_lax:
        functions.pop("lax")
    lengths = {
        "native": (1, 32, 256) if size <= 64 << 10 else (1, 2, 6),
        "mpi4jax": (1, 32, 256) if size <= 64 << 10 else (1, 2, 6),
        "lax": (1, 4, 12) if size <= 64 << 10 else (1, 2, 4),
    }
    programs: dict[str, list[Callable[[], Any]]] = {}
    for name, function in functions.items():
        programs[name] = [
            ft.partial(chain(op, function, length, mesh), x) for length in lengths[name]
        ]
    if has_mpi4jax():
        made = mpi4jax_chains.chains(op, lengths["mpi4jax"])
        if made:
            local = jax.device_put(mine, jax.local_devices()[0])
            programs["mpi4jax"] = [ft.partial(program, local) for program in made]

    wrong = 0
    results = {name: local_part(of[0]()) for name, of in programs.items()}
    for name, result in results.items():
        expected = EXPECTED[op](np.split(values, p), jax.process_index())
        wrong += int((result.reshape(expected.shape) != expected).sum()) if name != "lax" else 0
    meet = ft.partial(
        chain("all_reduce", variants("all_reduce", p, ("native",))["native"], 1, mesh), x
    )
    seconds = measure(programs, meet, arguments.budget)
    rows = []
    for how, times in (
        ("chained", {n: slopes(t[1], t[2], *lengths[n][1:]) for n, t in seconds.items()}),
        ("single", {n: t[0] for n, t in seconds.items()}),
    ):
        row = {"op": op, "processes": p, "bytes": size, "how": how, "wrong": wrong}
        for name, of in times.items():
            row[f"{name}_us"] = round(statistics.median(of) * 1e6, 2)
        for other in ("lax", "mpi4jax"):
            if other in times:
                pairs = zip(times[other], times["native"], strict=True)
                row[f"{other}_over_native"] = round(statistics.median(a / b for a, b in pairs), 3)
        row["rounds"] = len(times["native"])
        rows.append(row)
    return rows


def measure(
    programs: dict[str, list[Callable[[], Any]]], meet: Callable[[], Any], budget_s: float
) -> dict[str, list[list[float]]]:
    """Returns seconds by variant, length and round; all variants alternate in each round.

    From when all processes are ready until the last has its result: a root that sends may go on
    long before, and would charge the next variant with what the others have yet to do.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    for of in programs.values():
        for program in of:
            jax.block_until_ready(program())
    begin = time.perf_counter()
    for of in programs.values():
        for program in of:
            jax.block_until_ready(program())
    once = time.perf_counter() - begin
    wanted = np.int32(min(60, max(5, budget_s / once)))
    rounds = int(multihost_utils.broadcast_one_to_all(wanted))  # the same on all
    names = list(programs)
    seconds: dict[str, list[list[float]]] = {name: [[], [], []] for name in names}
    for done in range(rounds):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            for i, program in enumerate(programs[name]):
                jax.block_until_ready(meet())
                start = time.perf_counter()
                jax.block_until_ready(program())
                seconds[name][i].append(time.perf_counter() - start)
    of_all = multihost_utils.process_allgather(np.array([seconds[name] for name in names]))
    longest = of_all.max(axis=0)
    return {name: longest[i].tolist() for i, name in enumerate(names)}


def slopes(short: list[float], long: list[float], short_calls: int, long_calls: int) -> list[float]:
    """Returns seconds a call, round by round; a round in which noise outweighs it counts the mean.

    A disturbed round can give a slope of nothing, or below.
    """
    return [
        max(b - a, 0.2 * b * (long_calls - short_calls) / long_calls) / (long_calls - short_calls)
        for a, b in zip(short, long, strict=True)
    ]


def _reduce_scatter(blocks: list[Any], rank: int) -> Any:
    import numpy as np

    return np.split(sum(blocks), len(blocks))[rank]


def _all_to_all(blocks: list[Any], rank: int) -> Any:
    import numpy as np

    return np.concatenate([np.split(block, len(blocks))[rank] for block in blocks])


def _all_gather(blocks: list[Any], rank: int) -> Any:
    import numpy as np

    return np.concatenate(blocks)


EXPECTED: dict[str, Callable[[list[Any], int], Any]] = {
    "all_reduce": lambda blocks, rank: sum(blocks),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": lambda blocks, rank: blocks[(rank - 1) % len(blocks)],
    "broadcast": lambda blocks, rank: blocks[0],
}


def local_part(array: Any) -> Any:
    import numpy as np

    return np.asarray(array.addressable_shards[0].data)


def text(row: dict[str, Any]) -> str:
    parts = [f"{row['op']:15}{row['processes']:3}{row['bytes']:10} {row['how']:8}"]
    parts += [f"{n} {row[f'{n}_us']:10.2f}" for n in VARIANTS if f"{n}_us" in row]
    parts += [
        f"{n}/native {row[f'{n}_over_native']:8.2f}" for n in VARIANTS if f"{n}_over_native" in row
    ]
    return "  ".join(parts) + (f"  {row['wrong']} WRONG" if row["wrong"] else "")


def write(results: dict[str, Any], folder: Path) -> None:
    import process_report

    stem = folder / f"processes_{machine(results['environment'])}"
    table = process_report.markdown(results)
    print(table)
    Path(f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    Path(f"{stem}.md").write_text(table)
    process_report.plot(results, Path(f"{stem}.png"))
    print(f"written: {stem}.json, .md, .png")


if __name__ == "__main__":
    main()

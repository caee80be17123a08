"""Every collective across processes of one host: ours, jax.lax on Gloo, and mpi4jax on Open MPI.

    python benchmarks/processes.py [--processes 2,4] [--ops all_reduce,...] [--sizes 256,4096,...]

With `--ops` nothing else is measured; without, a training step, too.

Without mpi4jax, which is an extra of the benchmarks (`pip install mpi4jax`, Open MPI), its columns
stay empty; so do those of the least that a call can take (bare_chains.py) without a compiler. All
variants alternate in one job, one device a process: first with Gloo, then without it, in more
rounds. Results go to benchmarks/results/.
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

import bare_chains
import mpi4jax_chains
from environment import environment, machine
from paired_rounds import Programs, measure

VARIANTS = ("native", "lax", "mpi4jax")
# Ratios of a row, of the measurement with Gloo in it and of the one without.
LAX_PAIRS = [("lax", "native"), ("lax", "least")]
PAIRS = [("mpi4jax", "native"), ("mpi4jax", "least"), ("native", "least")]
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
    parser.add_argument("--jobs", type=int, default=1, help="jobs, of which rows are medians")
    parser.add_argument("--no-lax", action="store_true", help="leave out Gloo, which takes longest")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for results")
    parser.add_argument("--name", default="processes", help="of the results, before the machine's")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure_here(arguments)
        return
    from process_report import pooled

    head = environment()
    rows, steps = [], []
    for n in map(int, arguments.processes.split(",")):
        parts = [job(n, arguments) for _ in range(arguments.jobs)]
        rows += pooled([part["processes"] for part in parts])
        steps += pooled([part["train_step"] for part in parts])
    results = {
        "environment": head,
        "processes": rows,
        "train_step": steps,
        "command": " ".join(["python benchmarks/processes.py", *sys.argv[1:]]),
    }
    write(results, arguments.out / f"{arguments.name}_{machine(head)}")
    if wrong := sum(row["wrong"] for row in rows):
        sys.exit(f"{wrong} wrong elements")


def has_mpi4jax() -> bool:
    return bool(importlib.util.find_spec("mpi4jax")) and shutil.which("mpirun") is not None


def job(num_processes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one job and returns what its first process has measured."""
    started = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f".processes-{num_processes}.json"
    if has_mpi4jax():
        binding = "core" if num_processes <= (os.cpu_count() or 1) else "none"
        command = ["mpirun", "-n", str(num_processes), "--allow-run-as-root", "--oversubscribe"]
        command += ["--bind-to", binding, sys.executable]
    else:
        command = [sys.executable, "-m", "jaxcoll", "run", "-n", str(num_processes)]
    command += [__file__, "--child", str(file), *sys.argv[1:]]
    with bare_chains.built(num_processes) as bare:
        subprocess.run([*command, *(["--bare", bare] if bare else [])], check=True)
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
    round_trip = no_round_trip
    if arguments.bare:
        of_job = (jax.process_index(), jax.process_count())
        round_trip = bare_chains.join(arguments.bare, *of_job)
    rows = []
    for op in ops:
        for size in map(int, arguments.sizes.split(",")):
            found = measure_op(op, size, arguments, round_trip)
            rows += found
            if jax.process_index() == 0:
                for row in found:
                    print(text(row), flush=True)
    steps = [] if arguments.ops else train_step.run(arguments.budget)
    if jax.process_index() == 0:
        arguments.child.write_text(json.dumps({"processes": rows, "train_step": steps}))


def no_round_trip() -> float:
    """Returns that it is not known."""
    return 0.0


def measure_op(
    op: str, size: int, arguments: argparse.Namespace, round_trip: Callable[[], float]
) -> list[dict[str, Any]]:
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
    small = size <= 64 << 10
    # Of large ones chains whose programs need the same memory: beyond two calls XLA gives some
    # ops a buffer more, whose first use would count for the calls that the longer chain adds.
    lengths = {
        name: (1, 32, 256) if small else (1, 4, 8) for name in (*VARIANTS, *bare_chains.ROUTES)
    }
    lengths["lax"] = (1, 4, 12) if small else (1, 2, 4)
    programs: Programs = {
        name: [ft.partial(chain(op, function, length, mesh), x) for length in lengths[name]]
        for name, function in functions.items()
    }
    local = jax.device_put(mine, jax.local_devices()[0])
    made = {"mpi4jax": mpi4jax_chains.chains(op, lengths["mpi4jax"]) if has_mpi4jax() else []}
    for route in bare_chains.routes(size) if arguments.bare else []:
        made[route] = bare_chains.chains(op, route, lengths[route], p)
    for name, of in made.items():
        if of:
            programs[name] = [ft.partial(program, local) for program in of]
    beside_lax = {name: of for name, of in programs.items() if name != "mpi4jax"}
    del programs["lax"]  # Gloo's sums are wrong at times, and not ours to mend

    wrong = count_wrong(programs, EXPECTED[op](np.split(values, p), jax.process_index()))
    meet = ft.partial(
        chain("all_reduce", variants("all_reduce", p, ("native",))["native"], 1, mesh), x
    )
    line_ns = [round_trip()]
    seconds = {}
    if not arguments.no_lax:
        seconds = measure(beside_lax, meet, arguments.budget, 20 if small else 5)
    times = measure(programs, meet, arguments.budget, 20 if size < 64 << 20 else 8)
    line_ns.append(round_trip())
    of_row: dict[str, Any] = {"op": op, "processes": p, "bytes": size, "wrong": wrong}
    if all(line_ns):
        of_row["line_ns"] = [round(ns) for ns in line_ns]
    return [
        {**of_row, "how": how, **columns(calls(seconds, lengths), calls(times, lengths))}
        for how, calls in (("chained", chained), ("single", single))
    ]


def count_wrong(programs: Programs, expected: Any) -> int:
    """Counts, over all processes, what differs from NumPy, and in longer chains from ours."""
    import numpy as np
    from jax.experimental import multihost_utils

    wrong = 0
    wanted = [expected, *(local_part(program()) for program in programs["native"][1:])]
    for name, of in programs.items():
        if name == "nothing":
            continue
        for program, result in zip(of, wanted, strict=True):
            got = local_part(program())
            wrong += int((got.reshape(result.shape) != result).sum())
    return int(multihost_utils.process_allgather(np.int32(wrong)).sum())


# A variant's seconds by round.
Times = dict[str, list[float]]


def single(seconds: dict[str, list[list[float]]], lengths: dict[str, tuple[int, ...]]) -> Times:
    """Returns seconds of whole programs of one call."""
    del lengths
    return {name: of[0] for name, of in seconds.items()}


def chained(seconds: dict[str, list[list[float]]], lengths: dict[str, tuple[int, ...]]) -> Times:
    """Returns seconds a call, by the two longer chains of each round."""
    return {name: slopes(of[1], of[2], *lengths[name][1:]) for name, of in seconds.items()}


def columns(beside_lax: Times, times: Times) -> dict[str, Any]:
    """Returns a row's medians in us, and medians of paired ratios, lax's of their own rounds.

    `least` is the faster one of the ways of bare_chains.py.
    """
    found: dict[str, Any] = {}
    ways = [name for name in times if name in bare_chains.ROUTES and name != "nothing"]
    if ways:
        way = min(ways, key=lambda name: statistics.median(times[name]))
        times = {**times, "least": times[way]}
        if beside_lax:
            beside_lax = {**beside_lax, "least": beside_lax[way]}
        found["least_way"] = way
    if beside_lax:
        found["lax_us"] = _us(beside_lax["lax"])
        found["lax_rounds"] = len(beside_lax["lax"])
    found |= {f"{name}_us": _us(of) for name, of in times.items()}
    for pairs, of in ((LAX_PAIRS, beside_lax), (PAIRS, times)):
        for one, other in pairs:
            if one in of and other in of:
                ratios = (a / b for a, b in zip(of[one], of[other], strict=True))
                found[f"{one}_over_{other}"] = round(statistics.median(ratios), 3)
    return {**found, "rounds": len(times["native"])}


def _us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 2)


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
    parts += [f"{n} {row[f'{n}_us']:10.2f}" for n in (*VARIANTS, "least") if f"{n}_us" in row]
    parts += [
        f"{n}/native {row[f'{n}_over_native']:8.2f}" for n in VARIANTS if f"{n}_over_native" in row
    ]
    return "  ".join(parts) + (f"  {row['wrong']} WRONG" if row["wrong"] else "")


def write(results: dict[str, Any], stem: Path) -> None:
    import process_report

    table = process_report.markdown(results)
    print(table)
    Path(f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    Path(f"{stem}.md").write_text(table)
    process_report.plot(results, Path(f"{stem}.png"))
    print(f"written: {stem}.json, .md, .png")


if __name__ == "__main__":
    main()

"""Collective matmuls: ours, and what a program without them does, on `jax.lax`.

    python benchmarks/matmul.py [--devices 2,4,8] [--processes 2] [--rounds 20]

For each shape, in turn and in one run: our call, native and as `auto` has it, the collective and
the matmul on lax, the ring of `lax.ppermute` and matmuls, the matmul alone, of all blocks, and our
collective alone; between processes also what getting at the blocks takes (block_moves.py). Results
are compared with the first. Shapes that seem to miss an aim run in further jobs. Where there are
more cores than ranks, all of it also runs on as many cores: then a rank has one thread.
"""

import argparse
import functools as ft
import itertools as it
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import block_moves
import matmul_report
import numpy as np
import paired_rounds
from environment import environment
from shared import command, job, save

from jaxcoll import _blas

# m, k and n of a block product, in all combinations that don't take too long.
ROWS, SIDES = (32, 128, 512, 1024, 4096), (128, 1024, 4096)
# Of other sides, from the design's table.
MORE = ((128, 512, 512), (1024, 1024, 256), (512, 1024, 256), (1024, 256, 1024))
BUDGET_S = 1.0  # of a shape
LEAST_ROUNDS = 5
# So many more where an aim seems to be missed, and of all large shapes between processes, whose aim
# is near the noise: all rounds count, whatever they show.
MORE_JOBS = 2
MOST_PRODUCTS = 2**35  # of all ranks: about a second on two cores
KINDS = ("all_gather_matmul", "matmul_reduce_scatter")

Shape = tuple[int, int, int]


def ways(kind: str, axis: str) -> dict[str, Callable[..., Any]]:
    """Returns a function of (x, w) for each way, but of other operands for the last two."""
    import jax.numpy as jnp
    from jax import lax

    import jaxcoll

    def ring_gather(x: Any, w: Any) -> Any:
        p, rank = lax.axis_size(axis), lax.axis_index(axis)
        m = x.shape[0]
        y = jnp.zeros((p * m, w.shape[1]), x.dtype)
        for step in range(p):
            y = lax.dynamic_update_slice(y, x @ w, ((rank - step) % p * m, 0))
            if step + 1 < p:
                x = lax.ppermute(x, axis, [(i, (i + 1) % p) for i in range(p)])
        return y

    def ring_scatter(x: Any, w: Any) -> Any:
        p, rank = lax.axis_size(axis), lax.axis_index(axis)
        m = x.shape[0] // p
        total = None
        for step in range(p):
            block = lax.dynamic_slice_in_dim(x, (rank - step - 1) % p * m, m, axis=0) @ w
            if total is None:
                total = block
            else:
                total = lax.ppermute(total, axis, [(i, (i + 1) % p) for i in range(p)]) + block
        return total

    if kind == "all_gather_matmul":
        return {
            "native": lambda x, w: jaxcoll.all_gather_matmul(x, w, axis, backend="native"),
            "auto": lambda x, w: jaxcoll.all_gather_matmul(x, w, axis),
            "two steps": lambda x, w: lax.all_gather(x, axis, tiled=True) @ w,
            "ring": ring_gather,
            "alone": lambda gathered, w: gathered @ w,
            "collective": lambda x: jaxcoll.all_gather(x, axis, tiled=True),
        }
    return {
        "native": lambda x, w: jaxcoll.matmul_reduce_scatter(x, w, axis, backend="native"),
        "auto": lambda x, w: jaxcoll.matmul_reduce_scatter(x, w, axis),
        "two steps": lambda x, w: lax.psum_scatter(x @ w, axis, tiled=True),
        "ring": ring_scatter,
        "alone": lambda x, w: x @ w,
        "collective": lambda y: jaxcoll.reduce_scatter(y, axis, tiled=True),
    }


def shapes(p: int) -> list[Shape]:
    """Returns the shapes for so many ranks."""
    grid = {*it.product(ROWS, SIDES, SIDES), *MORE}
    return sorted(shape for shape in grid if p * p * math.prod(shape) <= MOST_PRODUCTS)


def measure(kind: str, shape: Shape, most_rounds: int) -> dict[str, Any]:
    """Measures a shape on all devices of this job; returns seconds by way and round."""
    import jax
    from jax.experimental import multihost_utils
    from jax.sharding import PartitionSpec as P

    import jaxcoll

    p, (m, k, n) = jax.device_count(), shape
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    rng = np.random.default_rng(0)

    def placed(values: np.ndarray) -> Any:
        return jax.make_array_from_callback(values.shape, sharding, lambda i: values[i])

    def drawn(*shape: int) -> Any:
        return placed(rng.integers(-3, 4, shape).astype(np.float32))

    def on_all(f: Callable[..., Any]) -> Any:
        mapped = jax.shard_map(
            lambda *of_rank: f(*(a[0] for a in of_rank))[None],
            mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False,
        )  # fmt: skip
        return jax.jit(mapped)

    gathers = kind == "all_gather_matmul"
    x, w = drawn(p, m if gathers else p * m, k), drawn(p, k, n)
    of_all_rows = drawn(p, p * m, k) if gathers else x
    operands = {
        "alone": (of_all_rows, w),
        "collective": (x if gathers else placed(np.zeros((p, p * m, n), np.float32)),),
    }
    mapped = {way: on_all(f) for way, f in ways(kind, "x").items()}
    (path,) = (d.path for d in jaxcoll.explain(mapped["auto"], x, w).rows if d.op == kind)
    programs = {way: ft.partial(f, *operands.get(way, (x, w))) for way, f in mapped.items()}
    meet = ft.partial(on_all(lambda w: jaxcoll.all_reduce(w[0, :1], "x")), w)
    compared = ["native", "auto", *matmul_report.THEIRS]
    if several() and not gathers:
        compared.remove("two steps")  # Gloo's psum_scatter is wrong at times (jax#40830)
    results = {way: programs[way]() for way in compared}
    shards = {way: [np.asarray(s.data) for s in y.addressable_shards] for way, y in results.items()}
    equal = all(
        np.array_equal(one, other)
        for of_way in shards.values()
        for one, other in zip(of_way, shards["native"], strict=True)
    )
    if several():
        equal = bool(multihost_utils.process_allgather(np.array([equal])).all())
        programs |= block_moves.ways(4 * m * (k if gathers else n))
    made = {way: [program] for way, program in programs.items()}
    found = paired_rounds.measure(made, meet, BUDGET_S, LEAST_ROUNDS, most_rounds)
    times = {way: of[0] for way, of in found.items()}
    of = {"kind": kind, "m": m, "k": k, "n": n, "path": path}
    return {**of, "equal": equal, "times": times}


def several() -> bool:
    import jax

    return jax.process_count() > 1


def measured(
    processes: int, devices: int, rounds: int, cores: int | None = None
) -> list[dict[str, Any]]:
    """Returns a layout's rows, of all jobs together, on so many cores, or on all."""
    layout = {"processes": processes, "devices": devices} | ({"cores": cores} if cores else {})

    def rows_of(wanted: list[tuple[str, Shape]]) -> Any:
        arguments = ("--child", json.dumps(wanted), "--rounds", rounds)
        for row in job(__file__, processes, devices, *arguments, cores=cores):
            yield (row["kind"], (row["m"], row["k"], row["n"])), layout | row

    joined = dict(rows_of([(kind, s) for kind in KINDS for s in shapes(processes * devices)]))
    again = [
        key
        for key, row in joined.items()
        if matmul_report.is_large(row) or matmul_report.figures(row)["misses"]
    ]
    for _ in range(MORE_JOBS if again else 0):
        for key, row in rows_of(again):
            before = joined[key]
            before["equal"] &= row["equal"]
            for way, of in row["times"].items():
                before["times"][way] += of
    for row in joined.values():
        row |= matmul_report.figures(row)
        del row["times"]  # too many to keep
    return [*joined.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="2,4,8", help="of one process")
    parser.add_argument("--processes", default="2", help="of one device")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        import jax

        for kind, shape in chosen.child:
            row = measure(kind, tuple(shape), chosen.rounds)
            if jax.process_index() == 0:
                print(json.dumps(row), flush=True)
        return
    of = environment()
    layouts = [(1, int(d)) for d in chosen.devices.split(",") if d]
    layouts += [(int(p), 1) for p in chosen.processes.split(",") if p]
    rows = [
        row
        for processes, devices in layouts
        for cores in [None] + [processes * devices] * (of["cores"] > processes * devices)
        for row in measured(processes, devices, chosen.rounds, cores)
    ]
    result = {
        "command": command(),
        "environment": of,
        "blas": _blas.kernels(),
        "rounds": chosen.rounds,
        "rows": rows,
    }
    picture = save("matmul", result, matmul_report.markdown(result), chosen.out)
    matmul_report.draw(result, picture)
    if not all(row["equal"] for row in rows):
        sys.exit("results differ")


if __name__ == "__main__":
    main()

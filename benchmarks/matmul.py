"""Collective matmuls: ours, and what a program without them does, on `jax.lax`.

    python benchmarks/matmul.py [--devices 2,4,8] [--processes 2] [--rounds 20]

For each shape, in turn and in one run: our call, native and as `auto` has it, the collective and
the matmul on lax, the ring of `lax.ppermute` and matmuls, the matmul alone, of all blocks, which is
the limit, and our collective alone. Results are compared with the first.
"""

import argparse
import itertools as it
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matmul_report
import numpy as np
from environment import environment
from shared import command, job, save

from jaxcoll import _blas

# m, k and n of a block product, in all combinations that don't take too long.
ROWS, SIDES = (32, 128, 512, 1024, 4096), (128, 1024, 4096)
# Of other sides, from the design's table.
MORE = ((128, 512, 512), (1024, 1024, 256), (512, 1024, 256), (1024, 256, 1024))
BUDGET_S = 1.0  # of a shape
# So many times as long, at most, where an aim seems to be missed: all rounds count.
MOST_PASSES = 4
NOT_SLOWER = 0.95  # lax's better form over auto
# Auto over the matmul alone, between processes, from that many multiplications of a rank's block.
NEAR_ALONE, LARGE = 1.05, 1024 * 1024 * 256
MOST_PRODUCTS = 2**35  # of all ranks: about a second on two cores
OURS, THEIRS = ("native", "auto"), ("two steps", "ring")
WAYS = (*OURS, *THEIRS, "alone", "collective")
KINDS = ("all_gather_matmul", "matmul_reduce_scatter")


def ways(kind: str, axis: str) -> dict[str, Callable[..., Any]]:
    """Returns a function of (x, w) for each way."""
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
            "alone": lambda x, w: jnp.concatenate([x] * lax.axis_size(axis)) @ w,
            "collective": lambda x, w: jaxcoll.all_gather(x, axis, tiled=True),
        }
    return {
        "native": lambda x, w: jaxcoll.matmul_reduce_scatter(x, w, axis, backend="native"),
        "auto": lambda x, w: jaxcoll.matmul_reduce_scatter(x, w, axis),
        "two steps": lambda x, w: lax.psum_scatter(x @ w, axis, tiled=True),
        "ring": ring_scatter,
        "alone": lambda x, w: (x @ w)[: x.shape[0] // lax.axis_size(axis)],
        "collective": lambda x, w: jaxcoll.reduce_scatter(
            jnp.zeros((x.shape[0], w.shape[1]), x.dtype) + w[0, 0], axis, tiled=True
        ),
    }


def seconds(f: Callable[..., Any], *arguments: Any) -> float:
    import jax

    begin = time.perf_counter()
    jax.block_until_ready(f(*arguments))
    return time.perf_counter() - begin


def shapes(p: int) -> list[tuple[int, int, int]]:
    """Returns the shapes for so many ranks."""
    grid = {*it.product(ROWS, SIDES, SIDES), *MORE}
    return sorted(shape for shape in grid if p * p * math.prod(shape) <= MOST_PRODUCTS)


def num_rounds(seconds_of_one: float, most: int) -> int:
    """Returns how many rounds fit in a few seconds: at least 3."""
    return as_first_process(int(min(most, max(3, BUDGET_S / seconds_of_one))))


def as_first_process(number: int) -> int:
    """Returns what the first process of the job has."""
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(number))) if several() else number


def figures(times: dict[str, list[float]]) -> dict[str, float]:
    """Returns medians over the rounds, of ratios in each."""
    better = min(THEIRS, key=lambda way: statistics.median(times[way]))
    rounds = [dict(zip(WAYS, row, strict=True)) for row in zip(*times.values(), strict=True)]
    return {
        "ratio": statistics.median(t[better] / t["native"] for t in rounds),
        "auto ratio": statistics.median(t[better] / t["auto"] for t in rounds),
        "beside alone": statistics.median(t["auto"] / t["alone"] for t in rounds),
        # 1: all communication, or all computation, was hidden.
        "hidden": statistics.median(
            (t["collective"] + t["alone"] - t["auto"]) / min(t["collective"], t["alone"])
            for t in rounds
        ),
    }


def misses(row: dict[str, Any], several_processes: bool) -> str:
    """Says which aim of the design a row misses, or ""."""
    if row["auto ratio"] < NOT_SLOWER:
        return "slower than lax"
    is_large = several_processes and row["m"] * row["k"] * row["n"] >= LARGE
    return "beyond alone" if is_large and row["beside alone"] > NEAR_ALONE else ""


def several() -> bool:
    import jax

    return jax.process_count() > 1


def measure(rounds: int) -> list[dict[str, Any]]:
    """Measures all shapes on all devices of this job."""
    import jax
    from jax.sharding import PartitionSpec as P

    p = jax.device_count()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    rows = []
    for kind in KINDS:
        for m, k, n in shapes(p):
            rng = np.random.default_rng(0)
            of_rank = m if kind == "all_gather_matmul" else p * m
            shape_x, shape_w = (p, of_rank, k), (p, k, n)
            xs, ws = (rng.integers(-3, 4, shape).astype(np.float32) for shape in (shape_x, shape_w))
            x, w = (
                jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i])
                for a in (xs, ws)
            )
            functions = {
                way: jax.jit(
                    jax.shard_map(
                        lambda x, w, f=f: f(x[0], w[0])[None],
                        mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False,
                    )
                )
                for way, f in ways(kind, "x").items()
            }  # fmt: skip
            results = {way: jax.block_until_ready(f(x, w)) for way, f in functions.items()}
            local = {way: np.asarray(y.addressable_data(0)) for way, y in results.items()}
            equal = all((local[way] == local["native"]).all() for way in ("auto", *THEIRS))
            one = sum(seconds(functions[way], x, w) for way in WAYS)
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            row: dict[str, Any] = {"kind": kind, "m": m, "k": k, "n": n, "equal": equal}
            for _ in range(MOST_PASSES):
                for number in range(num_rounds(one, rounds)):
                    for way in WAYS[:: 1 if number % 2 == 0 else -1]:
                        times[way].append(seconds(functions[way], x, w))
                row |= figures(times)
                if not as_first_process(bool(misses(row, several()))):
                    break
            rows.append(
                row
                | {"rounds": len(times["auto"]), "misses": misses(row, several())}
                | {way: 1e3 * statistics.median(times[way]) for way in WAYS}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="2,4,8", help="of one process")
    parser.add_argument("--processes", default="2", help="of one device")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        import jax

        for row in measure(chosen.rounds):
            if jax.process_index() == 0:
                print(json.dumps(row), flush=True)
        return
    of = environment()
    layouts = [(1, int(d)) for d in chosen.devices.split(",") if d]
    layouts += [(int(p), 1) for p in chosen.processes.split(",") if p]
    rows = [
        {"processes": processes, "devices": devices, **row}
        for processes, devices in layouts
        for row in job(__file__, processes, devices, "--child", "--rounds", chosen.rounds)
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

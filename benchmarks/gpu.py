"""Collectives and collective matmuls on the GPUs of this process, against `jax.lax`.

    python benchmarks/gpu.py [--rounds 20] [--largest 1073741824]

Each program makes its call several times in a row and is timed in turns with its twin; rows have
the medians of one call, the ratio lax / ours, and for all_reduce the bus bandwidth.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from environment import environment
from shared import command, head, save

IN_A_ROW = 8
LEAVES = ((4096, 1024), (1024, 4096), (1024, 1024), (4096,), (1024,)) * 12
# m, k and n of a rank's block.
PRODUCTS = ((512, 1024, 1024), (1024, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192))


def chained(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Calls f so often that the start of the program does not count; each on what came before."""
    import jax

    def program(x: Any) -> Any:
        for _ in range(IN_A_ROW):
            y = f(x)
            x = jax.lax.optimization_barrier((x, y))[0]
        return y

    return program


def medians(ways: dict[str, Any], x: Any, rounds: int) -> dict[str, float]:
    """Returns the seconds of one call of each way, measured in turns."""
    import jax

    for f in ways.values():
        jax.block_until_ready(f(x))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, f in ways.items():
            begun = time.perf_counter()
            jax.block_until_ready(f(x))
            seconds[name].append((time.perf_counter() - begun) / IN_A_ROW)
    return {name: statistics.median(found) for name, found in seconds.items()}


def measure(rounds: int, largest: int) -> list[dict[str, Any]]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    import jaxcoll

    devices = jax.devices("cuda")
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    p = len(devices)
    rows = []

    def row(name: str, size: int, ways: dict[str, Callable[..., Any]], x: Any) -> dict[str, Any]:
        mapped = {
            way: jax.jit(
                jax.shard_map(
                    chained(f), mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
                )
            )
            for way, f in ways.items()
        }
        found = medians(mapped, x, rounds)
        new = {"call": name, "bytes": size, **{w: 1e6 * s for w, s in found.items()}}
        new["lax / ours"] = found["lax"] / found["ours"]
        rows.append(new)
        print(new, flush=True)
        return new

    size = 1024
    while size <= largest:
        x = jnp.ones(size // 4, np.float32)
        sums = {
            "ours": lambda x: jaxcoll.all_reduce(x, "x", backend="native"),
            "lax": lambda x: lax.psum(x, "x"),
        }
        new = row("all_reduce", size, sums, x)
        new["bus GB/s"] = 2 * (p - 1) / p * size / new["ours"] / 1e3
        size *= 8
    tree = [jnp.ones(shape, jnp.bfloat16) for shape in LEAVES]
    means = {
        "ours": lambda xs: jaxcoll.all_reduce(xs, "x", "mean", backend="native"),
        "lax": lambda xs: lax.pmean(xs, "x"),
    }
    row("gradient tree", sum(leaf.nbytes for leaf in tree), means, tree)
    for m, k, n in PRODUCTS:
        x, w = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16)
        gathers = {
            "ours": lambda xw: jaxcoll.all_gather_matmul(*xw, "x", backend="native"),
            "lax": lambda xw: lax.all_gather(xw[0], "x", tiled=True) @ xw[1],
        }
        row(f"all_gather_matmul {m} {k} {n}", x.nbytes, gathers, (x, w))
        x = jnp.ones((p * m, k), jnp.bfloat16)
        scatters = {
            "ours": lambda xw: jaxcoll.matmul_reduce_scatter(*xw, "x", backend="native"),
            "lax": lambda xw: lax.psum_scatter(xw[0] @ xw[1], "x", tiled=True),
        }
        row(f"matmul_reduce_scatter {m} {k} {n}", x.nbytes, scatters, (x, w))
    return rows


def page(result: dict[str, Any]) -> str:
    lines = [*head("GPUs: collectives and matmuls, us a call", result), ""]
    lines += ["| call | bytes | ours | lax | lax / ours | bus GB/s |", "|---|--:|--:|--:|--:|--:|"]
    lines += [
        f"| {row['call']} | {row['bytes']:,} | {row['ours']:.1f} | {row['lax']:.1f} "
        f"| {row['lax / ours']:.2f} | {row.get('bus GB/s', 0):.1f} |"
        for row in result["rows"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--largest", type=int, default=1 << 30)
    chosen = parser.parse_args()
    import jax

    try:
        devices = jax.devices("cuda")
    except RuntimeError as error:
        sys.exit(f"there are no GPUs: {error}")
    if len(devices) < 2:
        print("nothing is measured: one GPU alone has nobody to communicate with; see docs/gpu.md")
        return
    result = {
        "environment": {**environment(), "gpus": [device.device_kind for device in devices]},
        "command": command(),
        "rows": measure(chosen.rounds, chosen.largest),
    }
    save("gpu", result, page(result), Path(__file__).parent / "results")


if __name__ == "__main__":
    main()

"""Collective matmuls: ours, and what a program without them does, on `jax.lax`.

    python benchmarks/matmul.py [--devices 2,4] [--processes 2] [--rounds 20]

For each shape, in turn and in one run: our call, native and as `auto` has it, the collective and
the matmul on lax, the ring of `lax.ppermute` and matmuls, and the matmul alone, of all blocks,
which is the limit. Results are compared with the first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environment import environment, machine

# (m, k, n) of a block product.
SHAPES = [
    (32, 128, 128), (128, 128, 128), (128, 512, 512), (256, 4096, 128), (512, 1024, 256),
    (512, 1024, 1024), (1024, 1024, 256), (32, 1024, 1024), (32, 4096, 1024), (1024, 256, 1024),
]  # fmt: skip
WAYS = ("native", "auto", "two steps", "ring", "alone")
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
        }
    return {
        "native": lambda x, w: jaxcoll.matmul_reduce_scatter(x, w, axis, backend="native"),
        "auto": lambda x, w: jaxcoll.matmul_reduce_scatter(x, w, axis),
        "two steps": lambda x, w: lax.psum_scatter(x @ w, axis, tiled=True),
        "ring": ring_scatter,
        "alone": lambda x, w: (x @ w)[: x.shape[0] // lax.axis_size(axis)],
    }


def seconds(f: Callable[..., Any], *arguments: Any) -> float:
    import jax

    begin = time.perf_counter()
    jax.block_until_ready(f(*arguments))
    return time.perf_counter() - begin


def measure(rounds: int) -> list[dict[str, Any]]:
    """Measures all shapes on all devices of this job."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    p = jax.device_count()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    rows = []
    for kind in KINDS:
        for m, k, n in SHAPES:
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
            equal = all(
                (local[way] == local["native"]).all() for way in ("auto", "two steps", "ring")
            )
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(rounds):
                order = WAYS if number % 2 == 0 else WAYS[::-1]
                for way in order:
                    times[way].append(seconds(functions[way], x, w))
            best = [min(pair) for pair in zip(times["two steps"], times["ring"], strict=True)]
            ratio, auto = (
                statistics.median(b / t for b, t in zip(best, times[way], strict=True))
                for way in ("native", "auto")
            )
            rows.append(
                {
                    "kind": kind, "m": m, "k": k, "n": n, "equal": equal,
                    "ratio": ratio, "auto ratio": auto,
                    **{way: 1e3 * statistics.median(times[way]) for way in WAYS},
                }
            )  # fmt: skip
    return rows


def job(processes: int, devices: int, rounds: int) -> list[dict[str, Any]]:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "jaxcoll", "run", "-n", str(processes)]
    done = subprocess.run(
        [*command, __file__, "--child", "--rounds", str(rounds)],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "PJRT_NPROC": "16"},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="2,4", help="of one process")
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
        for row in job(processes, devices, chosen.rounds)
    ]
    command = "python " + " ".join(sys.argv)
    lines = [
        "# Collective matmuls",
        "",
        f"`{command}`, {of['date']}, {of['cores']} cores of {of['cpu']}, jax {of['jax']}, Python "
        f"{of['python']}. f32; blocks of (m, k) and (k, n).",
        "",
        "Medians in milliseconds. *Native* is one call, *auto* that or an own collective and XLA's "
        "matmul, *two steps* and *ring* are on `jax.lax`, *alone* is XLA's matmul of all blocks, "
        "without communication. Ratios are of lax's better one to ours in each of "
        f"{chosen.rounds} rounds, median; above 1 ours is faster.",
        "",
        "| ranks | call | m, k, n | native | auto | two steps | ring | alone | native's ratio "
        "| auto's ratio | results |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        ranks = (
            f"{row['devices']} devices"
            if row["processes"] == 1
            else f"{row['processes']} processes"
        )
        times = " | ".join(f"{row[way]:.3f}" for way in WAYS)
        ratios = f"{row['ratio']:.2f} | {row['auto ratio']:.2f}"
        lines.append(
            f"| {ranks} | {row['kind']} | {row['m']}, {row['k']}, {row['n']} | {times} "
            f"| {ratios} | {'equal' if row['equal'] else 'DIFFERENT'} |"
        )
    chosen.out.mkdir(parents=True, exist_ok=True)
    name = f"matmul_{machine(of)}"
    result = {"command": command, "environment": of, "rows": rows}
    (chosen.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (chosen.out / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

"""Ours between XLA's own collectives and real compute: must not be slower than all of it on lax."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll._timing import measure

AXIS = "ranks"
# (features, rows per rank): from hardly any compute between two collectives to mostly compute.
SHAPES = ((16, 8), (64, 16), (128, 64), (256, 128))
LAYERS = 16
# The programs are short and their times spread widely: medians of 200 rounds differed by 15%.
ROUNDS_FACTOR, BUDGET_S = 5, 8.0


def _program(first: Callable[..., Any], second: Callable[..., Any], mesh: Any) -> Any:
    def layers(x: Any, w: Any) -> Any:
        for _ in range(LAYERS):
            x = second(jnp.tanh(first(jnp.tanh(x @ w)) @ w))
        return x

    mapped = jax.shard_map(
        layers, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS), check_vma=False
    )
    return jax.jit(mapped)


def run(num_devices: int, rounds: int) -> list[dict[str, Any]]:
    """Measures ours alternating with lax's, ours alone and lax's alone."""
    mesh = jax.make_mesh((num_devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))

    def ours(x: Any) -> Any:
        return jaxcoll.all_reduce(x, AXIS, op="mean", backend="native")

    def theirs(x: Any) -> Any:
        return lax.pmean(x, AXIS)

    rows = []
    for features, per_rank in SHAPES:
        x = jnp.ones((num_devices * per_rank, features), jnp.float32)
        w = jnp.eye(features, dtype=jnp.float32)
        programs = {
            "mixed": _program(ours, theirs, mesh),
            "native": _program(ours, ours, mesh),
            "lax": _program(theirs, theirs, mesh),
        }
        wrong = sum(int((programs[v](x, w) != programs["lax"](x, w)).sum()) for v in programs)
        calls = {v: ft.partial(program, x, w) for v, program in programs.items()}
        t = measure(calls, ROUNDS_FACTOR * rounds, BUDGET_S)
        rows.append(
            {
                "program": f"{2 * LAYERS} collectives between {per_rank} x {features} matmuls",
                "devices": num_devices,
                "wrong": wrong,
                **{f"{v}_us": round(t.median_us(v), 1) for v in programs},
                "lax_over_mixed": round(t.ratio("lax", "mixed"), 3),
                "lax_over_native": round(t.ratio("lax", "native"), 3),
                "rounds": len(t.seconds["lax"]),
            }
        )
    return rows

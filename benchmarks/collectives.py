"""Every collective by size: chained in one program, and as a program of its own."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import count_wrong, measure, slopes
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll

AXIS = "ranks"
SIZES = (256, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
# Operands and results of all ranks, all variants: what 16 GiB hold with room to spare.
MAX_BYTES = 5 << 30


def _ring(p: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % p) for i in range(p)]


def _lax_broadcast(x: Any) -> Any:
    at_root = lax.axis_index(AXIS) == 0
    return lax.psum(jnp.where(at_root, x, jnp.zeros_like(x)), AXIS)


# name -> (ours, lax's, back to the operand's shape for chaining, ranks of the result by ranks p)
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "all_reduce": (
        lambda x, p, b: jaxcoll.all_reduce(x, AXIS, backend=b),
        lambda x, p: lax.psum(x, AXIS),
        lambda y, p: y,
    ),
    "all_gather": (
        lambda x, p, b: jaxcoll.all_gather(x, AXIS, tiled=True, backend=b),
        lambda x, p: lax.all_gather(x, AXIS, tiled=True),
        lambda y, p: y[: y.shape[0] // p],
    ),
    "reduce_scatter": (
        lambda x, p, b: jaxcoll.reduce_scatter(x, AXIS, tiled=True, backend=b),
        lambda x, p: lax.psum_scatter(x, AXIS, tiled=True),
        lambda y, p: jnp.tile(y, p),
    ),
    "all_to_all": (
        lambda x, p, b: jaxcoll.all_to_all(x, AXIS, 0, 0, tiled=True, backend=b),
        lambda x, p: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        lambda y, p: y,
    ),
    "ppermute": (
        lambda x, p, b: jaxcoll.ppermute(x, AXIS, _ring(p), backend=b),
        lambda x, p: lax.ppermute(x, AXIS, _ring(p)),
        lambda y, p: y,
    ),
    "broadcast": (
        lambda x, p, b: jaxcoll.broadcast(x, AXIS, backend=b),
        lambda x, p: _lax_broadcast(x),
        lambda y, p: y,
    ),
}


def _program(op: Callable[[Any], Any], back: Callable[[Any], Any], calls: int, mesh: Any) -> Any:
    def chain(x: Any) -> Any:
        for _ in range(calls - 1):
            x = back(op(x)) * 0.5  # keeps values small and calls apart
        return op(x)

    mapped = jax.shard_map(chain, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    return jax.jit(mapped)


def run(num_devices: int, rounds: int, sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    """Measures all ops and sizes on `num_devices`; one row for each and for chained and single."""
    mesh = jax.make_mesh((num_devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    rows = []
    for name in OPS:
        for size in sizes:
            widened = size * num_devices * (num_devices if name == "all_gather" else 1)
            if 3 * (widened + size * num_devices) > MAX_BYTES:
                rows.append(
                    {"op": name, "devices": num_devices, "bytes": size, "left_out": "memory"}
                )
                continue
            rows += _rows(name, size, num_devices, rounds, mesh)
    return rows


def _rows(name: str, size: int, p: int, rounds: int, mesh: Any) -> list[dict[str, Any]]:
    ours, theirs, back = OPS[name]
    small = size <= 64 << 10
    lengths = (1, 32, 256) if small else (1, 2, 6)
    per_rank = size // 4
    values = np.arange(p * per_rank, dtype=np.float32) % 8
    x = jax.device_put(values, NamedSharding(mesh, P(AXIS)))
    variants = {
        "native": lambda y: ours(y, p, "native"),
        "auto": lambda y: ours(y, p, "auto"),
        "lax": lambda y: theirs(y, p),
    }

    timings, wrong = {}, 0
    for length in lengths:
        programs = {
            variant: _program(op, lambda y: back(y, p), length, mesh)
            for variant, op in variants.items()
        }
        if length == 1:
            expected = programs["lax"](x)
            wrong = sum(count_wrong(programs[v](x), expected) for v in ("native", "auto"))
        calls = {variant: ft.partial(program, x) for variant, program in programs.items()}
        timings[length] = measure(calls, rounds)
    chained = slopes(timings[lengths[1]], timings[lengths[2]], *lengths[1:])
    return [
        {
            "op": name,
            "devices": p,
            "bytes": size,
            "how": how,
            "wrong": wrong,
            **{f"{v}_us": round(t.median_us(v), 2) for v in variants},
            **{f"{v}_p90_us": round(t.p90_us(v), 2) for v in variants},
            "lax_over_native": round(t.ratio("lax", "native"), 3),
            "lax_over_auto": round(t.ratio("lax", "auto"), 3),
            "rounds": len(t.seconds["lax"]),
        }
        for how, t in (("chained", chained), ("single", timings[1]))
        if t.seconds["lax"]
    ]

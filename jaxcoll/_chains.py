"""Chains of one collective, ours beside lax's, as programs to measure."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll.collectives.all_gather import all_gather
from jaxcoll.collectives.all_reduce import all_reduce
from jaxcoll.collectives.all_to_all import all_to_all
from jaxcoll.collectives.broadcast import broadcast
from jaxcoll.collectives.ppermute import ppermute
from jaxcoll.collectives.reduce_scatter import reduce_scatter

AXIS = "ranks"


def _ring(p: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % p) for i in range(p)]


def _lax_broadcast(x: Any) -> Any:
    at_root = lax.axis_index(AXIS) == 0
    return lax.psum(jnp.where(at_root, x, jnp.zeros_like(x)), AXIS)


# name -> (ours, lax's, back to the operand's shape for chaining); p is the number of ranks
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "all_reduce": (
        lambda x, p, b: all_reduce(x, AXIS, backend=b),
        lambda x, p: lax.psum(x, AXIS),
        lambda y, p: y,
    ),
    "all_gather": (
        lambda x, p, b: all_gather(x, AXIS, tiled=True, backend=b),
        lambda x, p: lax.all_gather(x, AXIS, tiled=True),
        lambda y, p: y[: y.shape[0] // p],
    ),
    "reduce_scatter": (
        lambda x, p, b: reduce_scatter(x, AXIS, tiled=True, backend=b),
        lambda x, p: lax.psum_scatter(x, AXIS, tiled=True),
        lambda y, p: jnp.tile(y, p),
    ),
    "all_to_all": (
        lambda x, p, b: all_to_all(x, AXIS, 0, 0, tiled=True, backend=b),
        lambda x, p: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        lambda y, p: y,
    ),
    "ppermute": (
        lambda x, p, b: ppermute(x, AXIS, _ring(p), backend=b),
        lambda x, p: lax.ppermute(x, AXIS, _ring(p)),
        lambda y, p: y,
    ),
    "broadcast": (
        lambda x, p, b: broadcast(x, AXIS, backend=b),
        lambda x, p: _lax_broadcast(x),
        lambda y, p: y,
    ),
}


def variants(op: str, p: int, backends: tuple[str, ...]) -> dict[str, Callable[[Any], Any]]:
    """Returns the op on `p` ranks with each of our backends, and lax's own under "lax"."""
    ours, theirs, _ = OPS[op]
    made = {b: (lambda x, b=b: ours(x, p, b)) for b in backends}
    return {**made, "lax": lambda x: theirs(x, p)}


def chain(op: str, call: Callable[[Any], Any], calls: int, mesh: Any) -> Any:
    """Returns a compiled function of the sharded operand that makes `calls` calls in a row."""
    back = OPS[op][2]

    def run(x: Any) -> Any:
        for _ in range(calls - 1):
            x = back(call(x), mesh.size) * 0.5  # keeps values small and calls apart
        return call(x)

    spec = jax.P(AXIS)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def operand(size: int, mesh: Any) -> Any:
    """Returns f32 blocks of `size` bytes a rank, of integers that any order sums exactly."""
    values = np.arange(mesh.size * (size // 4), dtype=np.float32) % 8
    return jax.device_put(values, jax.NamedSharding(mesh, jax.P(AXIS)))

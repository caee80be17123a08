"""Programs drawn by chance: all ops, both kinds, loops, conditions, clones, delays."""

import functools as ft
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from stress.world import World, check_against_lax, delayed, ring, scenario

import jaxcoll


@scenario
def random_programs(world: World) -> None:
    """Programs drawn by chance: all ops, both kinds, loops, conditions, clones, delays."""
    for _ in range(world.rounds):
        body = _random_body(world, steps=world.rng.randint(6, 14), depth=2)
        length = world.size * world.rng.choice([1, 5, 64, 4099])

        def whole(x: jax.Array, body: Any = body) -> jax.Array:
            return body(x[0])[None]

        check_against_lax(world, whole, world.integers(world.size, length), times=6)


def _random_body(world: World, steps: int, depth: int) -> Callable[[jax.Array], jax.Array]:
    """Draws a function of one rank's array that keeps its shape."""
    rng, size = world.rng, world.size
    delays_rng = random.Random(rng.random())
    kinds = ["all_reduce", "tree", "gather", "scatter", "all_to_all", "ppermute", "broadcast"]
    kinds += ["lax_psum", "lax_ppermute", "compute", "delay"]
    if depth > 0:
        kinds += ["scan", "while", "cond", "clone"] * 2
    plan = []
    for _ in range(steps):
        kind = rng.choice(kinds)
        inner = [_random_body(world, rng.randint(1, 4), depth - 1) for _ in range(2 * (depth > 0))]
        plan.append((kind, rng.randrange(1000), rng.randrange(1, 4), inner))

    def body(x: jax.Array) -> jax.Array:
        values = [x]
        for kind, number, few, inner in plan:
            # Of the latest values any one, so that calls are independent as often as not.
            y = values[-1 - number % min(len(values), 3)]
            values.append(_step(kind, y, values, number, few, inner) % 10007)
        return ft.reduce(jnp.add, values[-4:])

    def _step(
        kind: str, y: jax.Array, values: list[jax.Array], number: int, few: int, inner: Any
    ) -> jax.Array:
        match kind:
            case "all_reduce":
                return jaxcoll.all_reduce(y + number, "x", op=("sum", "max", "min")[few - 1])
            case "tree":
                cut = number % (y.size + 1)
                parts = [y[:cut], values[0], y[cut:], y.sum(dtype=np.int32)]
                left, other, right, total = jaxcoll.all_reduce(parts, "x")
                return jnp.concatenate([left, right]) + other + total
            case "gather":
                weights = jnp.arange(1, size + 1, dtype=np.int32)
                return jnp.tensordot(weights, jaxcoll.all_gather(y, "x"), 1)
            case "scatter":
                return jnp.tile(jaxcoll.reduce_scatter(y, "x", tiled=True), size)
            case "all_to_all":
                return jaxcoll.all_to_all(y, "x", 0, 0, tiled=True)
            case "ppermute":
                holes = ring(size, few)[number % 2 :]
                return y + jaxcoll.ppermute(y, "x", holes)
            case "broadcast":
                return y + jaxcoll.broadcast(y, "x", root=number % size)
            case "lax_psum":
                return lax.psum(y, "x")
            case "lax_ppermute":
                return lax.ppermute(y, "x", ring(size, few))
            case "compute":
                return jnp.sort(y * number + lax.axis_index("x"))
            case "delay":
                return delayed(y, 2, delays_rng)
            case "scan":
                return lax.fori_loop(0, few, lambda i, v: inner[0](v + i) % 10007, y)
            case "while":
                bound = jaxcoll.all_reduce(y[0] % 5, "x", op="max") % 3 + 1
                return lax.while_loop(
                    lambda s: s[0] < bound, lambda s: (s[0] + 1, inner[0](s[1]) % 10007), (0, y)
                )[1]
            case "cond":
                even = jaxcoll.all_reduce(y[0], "x") % 2 == 0
                return lax.cond(even, inner[0], inner[1], y)
            case "clone":
                cloned = jax.jit(inner[0])
                return cloned(y) + cloned(y + 1) + cloned(y % 3)
        raise AssertionError(kind)

    return body

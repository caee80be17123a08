"""Programs drawn by chance over groups across processes and inside them, against NumPy.

    random_programs.py FIRST_SEED PROGRAMS

A program is a function of an object that does collectives: with JAX on one rank's array, or with
NumPy on all ranks' arrays at once.
"""

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from world import assert_blocks, mapped, mesh, put, say

import jaxcoll

PRIME = 10007  # values stay below, so that sums of int32 are exact
Body = Callable[[Any, Any], Any]


class OnRanks:
    """The collectives of jaxcoll on one rank's array."""

    def reduce(self, y: Any, axes: tuple[str, ...], op: str) -> Any:
        return jaxcoll.all_reduce(y, axes, op=op)

    def tree(self, y: Any, axes: tuple[str, ...], cut: int) -> Any:
        return jnp.concatenate(jaxcoll.all_reduce([y[:cut], y[cut:]], axes))

    def gather(self, y: Any, axes: tuple[str, ...]) -> Any:
        parts = jaxcoll.all_gather(y, axes)
        return jnp.tensordot(jnp.arange(1, len(parts) + 1, dtype=np.int32), parts, 1)

    def scatter(self, y: Any, axes: tuple[str, ...]) -> Any:
        return jnp.tile(jaxcoll.reduce_scatter(y, axes, tiled=True), lax.axis_size(axes))

    def all_to_all(self, y: Any, axes: tuple[str, ...]) -> Any:
        return jaxcoll.all_to_all(y, axes, 0, 0, tiled=True)

    def shift(self, y: Any, axes: tuple[str, ...], step: int) -> Any:
        size = lax.axis_size(axes)
        return jaxcoll.ppermute(y, axes, [(i, (i + step) % size) for i in range(size)])

    def broadcast(self, y: Any, axes: tuple[str, ...], root: int) -> Any:
        return jaxcoll.broadcast(y, axes, root=root % lax.axis_size(axes))

    def rank(self) -> Any:
        return lax.axis_index(mesh().axis_names).astype(np.int32)

    def repeat(self, times: int, inner: Body, y: Any) -> Any:
        return lax.fori_loop(0, times, lambda i, v: inner(self, v + i) % PRIME, y)

    def cloned(self, inner: Body, y: Any) -> Any:
        clone = jax.jit(lambda v: inner(self, v))
        return clone(y) + clone(y + 1)

    def shared(self, inner: Body, y: Any, times: int) -> Any:
        """One function in a loop and beside it, which nothing orders."""
        clone = jax.jit(jax.checkpoint(lambda v: inner(self, v)))
        looped = lax.fori_loop(0, times, lambda i, v: clone(v + i) % PRIME, y)
        return looped + clone(y + 7)

    def delayed(self, y: Any, ms: int) -> Any:
        def wait(v: Any) -> Any:
            time.sleep(ms * (1 + jax.process_index()) / 1000)
            return v

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(y.shape, y.dtype), y)


class OnAll:
    """The same on (ranks, length) arrays of NumPy."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape

    def _by_group(self, y: np.ndarray, axes: tuple[str, ...], f: Any) -> np.ndarray:
        """Applies `f`, from (ranks, length) to (ranks, length), to each group."""
        rows = y.reshape(*self._shape, -1)
        if len(axes) == 2:
            return f(y)
        if axes == ("d",):
            return np.stack([f(row) for row in rows]).reshape(y.shape)
        columns = [f(rows[:, i]) for i in range(self._shape[1])]
        return np.stack(columns, axis=1).reshape(y.shape)

    def reduce(self, y: Any, axes: tuple[str, ...], op: str) -> Any:
        function = {"sum": np.sum, "max": np.max, "min": np.min}[op]
        return self._by_group(
            y, axes, lambda g: np.stack([function(g, axis=0).astype(np.int32)] * len(g))
        )

    def tree(self, y: Any, axes: tuple[str, ...], cut: int) -> Any:
        return self.reduce(y, axes, "sum")

    def gather(self, y: Any, axes: tuple[str, ...]) -> Any:
        def f(g: np.ndarray) -> np.ndarray:
            weights = np.arange(1, len(g) + 1, dtype=np.int32)
            return np.stack([np.tensordot(weights, g, 1)] * len(g))

        return self._by_group(y, axes, f)

    def scatter(self, y: Any, axes: tuple[str, ...]) -> Any:
        def f(g: np.ndarray) -> np.ndarray:
            parts = np.split(g.sum(axis=0, dtype=np.int32), len(g))
            return np.stack([np.tile(part, len(g)) for part in parts])

        return self._by_group(y, axes, f)

    def all_to_all(self, y: Any, axes: tuple[str, ...]) -> Any:
        def f(g: np.ndarray) -> np.ndarray:
            parts = g.reshape(len(g), len(g), -1)
            return parts.swapaxes(0, 1).reshape(g.shape)

        return self._by_group(y, axes, f)

    def shift(self, y: Any, axes: tuple[str, ...], step: int) -> Any:
        return self._by_group(y, axes, lambda g: np.roll(g, step, axis=0))

    def broadcast(self, y: Any, axes: tuple[str, ...], root: int) -> Any:
        return self._by_group(y, axes, lambda g: np.stack([g[root % len(g)]] * len(g)))

    def rank(self) -> Any:
        return np.arange(np.prod(self._shape), dtype=np.int32)[:, None]

    def repeat(self, times: int, inner: Body, y: Any) -> Any:
        for i in range(times):
            y = inner(self, y + np.int32(i)) % PRIME
        return y

    def cloned(self, inner: Body, y: Any) -> Any:
        return inner(self, y) + inner(self, y + np.int32(1))

    def shared(self, inner: Body, y: Any, times: int) -> Any:
        return self.repeat(times, inner, y) + inner(self, y + np.int32(7))

    def delayed(self, y: Any, ms: int) -> Any:
        return y


def draw(rng: random.Random, steps: int, depth: int) -> Body:
    """Draws a program that keeps its operand's shape."""
    kinds = ["reduce", "tree", "gather", "scatter", "all_to_all", "shift", "broadcast", "compute"]
    kinds += ["delay"] if rng.random() < 0.2 else []
    kinds += ["repeat", "clone", "shared"] if depth else []
    plan = [
        (
            rng.choice(kinds),
            rng.choice([("p", "d"), ("p",), ("d",)]),
            rng.randrange(1, 100),
            draw(rng, rng.randint(1, 3), depth - 1) if depth else None,
        )
        for _ in range(steps)
    ]

    def body(on: Any, x: Any) -> Any:
        values = [x]
        for kind, axes, number, inner in plan:
            # Of the latest values any one, so that calls are independent as often as not.
            y = values[-1 - number % min(len(values), 3)]
            values.append(step(on, kind, axes, number, inner, y) % PRIME)
        total = values[0]
        for value in values[-3:]:
            total = total + value
        return total % PRIME

    def step(on: Any, kind: str, axes: Any, number: int, inner: Body | None, y: Any) -> Any:
        match kind:
            case "reduce":
                return on.reduce(y, axes, ("sum", "max", "min")[number % 3])
            case "tree":
                return on.tree(y, axes, number % (y.shape[-1] + 1))
            case "gather" | "scatter" | "all_to_all":
                return getattr(on, kind)(y, axes)
            case "shift" | "broadcast":
                return getattr(on, kind)(y, axes, number)
            case "compute":
                return y * number + on.rank()
            case "delay":
                return on.delayed(y, number % 4)
            case "repeat":
                return on.repeat(1 + number % 3, inner, y)
            case "clone":
                return on.cloned(inner, y)
            case "shared":
                return on.shared(inner, y, 1 + number % 3)
        raise AssertionError(kind)

    return body


def main(first_seed: int, programs: int) -> None:
    over = mesh()
    shape = (over.devices.shape[0], over.devices.shape[1])
    for seed in range(first_seed, first_seed + programs):
        rng = random.Random(seed)
        body = draw(rng, steps=rng.randint(4, 10), depth=1)
        length = over.size * rng.choice([1, 3, 64, 4099, 70001])
        x = np.random.default_rng(seed).integers(0, PRIME, (over.size, length), dtype=np.int32)
        expected = body(OnAll(shape), x)
        with jaxcoll.using(backend="auto"):
            program = mapped(lambda v, body=body: body(OnRanks(), v), over)
            for _ in range(3):
                assert_blocks(program(put(x, over)), expected, f"seed {seed}")
    say(f"{programs} programs are right")


main(*map(int, sys.argv[1:]))

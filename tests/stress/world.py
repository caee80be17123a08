"""What all scenarios share: the devices, the list of scenarios, checks and parts of programs."""

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import _native
from jaxcoll.diagnosis import black_box

Tree = Any


@dataclasses.dataclass
class World:
    """What a scenario may use: the devices, a seed of its own, and how long to go on."""

    mesh: Mesh
    seed: int
    rounds: int

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.data = np.random.default_rng(self.seed)
        self.size: int = self.mesh.size
        self.devices = list(self.mesh.devices.flat)

    def integers(self, *shape: int) -> np.ndarray:
        """Returns int32 whose sums over all ranks are exact (as those of any int32 are)."""
        return self.data.integers(-1000, 1000, shape, dtype=np.int32)

    def per_rank(self, body: Callable[..., Tree], mesh: Mesh | None = None, **jit: Any) -> Any:
        """Compiles a function of the ranks' parts of arrays whose leading axis is the ranks'."""
        mesh = self.mesh if mesh is None else mesh
        spec = P(mesh.axis_names)
        return jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), **jit
        )


SCENARIOS: dict[str, Callable[[World], None]] = {}


def scenario(run: Callable[[World], None]) -> Callable[[World], None]:
    SCENARIOS[run.__name__] = run
    return run


def check_equal(what: str, got: Tree, expected: Tree) -> None:
    got_leaves, expected_leaves = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got_leaves) == len(expected_leaves), what
    for i, (g, e) in enumerate(zip(got_leaves, expected_leaves, strict=True)):
        g, e = np.asarray(g), np.asarray(e)
        wrong = np.argwhere(g != e)
        assert g.shape == e.shape, f"{what}: leaf {i}: expected shape {e.shape}, got {g.shape}"
        assert len(wrong) == 0, (
            f"{what}: leaf {i}: {len(wrong)} of {g.size} elements are wrong, the first at "
            f"{tuple(wrong[0])}: expected {e[tuple(wrong[0])]}, got {g[tuple(wrong[0])]}"
        )


def check_against_lax(world: World, body: Callable[..., Tree], *args: Any, times: int) -> None:
    """Runs `body` natively `times` times, each compared with one run of it on `jax.lax`."""
    with jaxcoll.using(backend="lax"):
        expected = jax.device_get(world.per_rank(lambda *a: body(*a))(*args))
    native = world.per_rank(lambda *a: body(*a))
    before = _native.num_calls()
    for i in range(times):
        check_equal(f"run {i}", native(*args), expected)
    assert _native.num_calls() > before, "no native call was made"


def calls() -> np.ndarray:
    """Returns the latest native calls of each device, by device and sequence."""
    box = black_box.own()
    assert box is not None
    return box.calls()


@contextlib.contextmanager
def timeout(seconds: float) -> Iterator[None]:
    before = jaxcoll.config.timeout_s
    jaxcoll.config.timeout_s = seconds
    try:
        yield
    finally:
        jaxcoll.config.timeout_s = before


def delayed(x: jax.Array, longest_ms: float, rng: random.Random) -> jax.Array:
    """Returns x after a random time, different on each device and in each run."""

    def sleep(_: Any) -> np.ndarray:
        time.sleep(rng.random() * longest_ms / 1000)
        return np.zeros((), np.int32)

    zero = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), np.int32), x.ravel()[0])
    return x + zero


def in_python(x: jax.Array, act: Callable[[int], None]) -> jax.Array:
    """Returns x after `act(rank)` has run in Python, on each device."""

    def run(rank: Any) -> np.ndarray:
        act(int(rank))
        return np.zeros((), np.int32)

    zero = jax.pure_callback(run, jax.ShapeDtypeStruct((), np.int32), lax.axis_index("x"))
    return x + zero


def ring(size: int, by: int = 1) -> list[tuple[int, int]]:
    return [(i, (i + by) % size) for i in range(size)]


def every_op(x: jax.Array, size: int) -> list[jax.Array]:
    """Calls each op once, on operands that don't depend on each other."""
    return [
        jaxcoll.all_reduce(x + 1, "x"),
        jaxcoll.all_gather(x + 2, "x", tiled=True),
        jaxcoll.reduce_scatter(x + 3, "x", tiled=True),
        jaxcoll.all_to_all(x + 4, "x", 0, 0, tiled=True),
        jaxcoll.ppermute(x + 5, "x", ring(size)),
        jaxcoll.broadcast(x + 6, "x", root=size - 1),
    ]

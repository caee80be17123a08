"""Scenarios of order and identity: no call may meet another one."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.sharding import Mesh
from stress.world import (
    Tree,
    World,
    calls,
    check_against_lax,
    check_equal,
    every_op,
    ring,
    scenario,
)

import jaxcoll
from jaxcoll import _native, _order


@scenario
def token_order(world: World) -> None:
    """Every device begins a block's native calls in the order of the program.

    That rests on how XLA treats token buffers, which may change with any version of JAX. Pairing
    does not rest on it: see `independent`.
    """
    check_order(world)


@scenario
def order_of_results_that_stand_alone(world: World) -> None:
    """As above, of calls that give no token: what the next one takes is made of a result."""
    gives_token = _order.gives_token
    _order.gives_token = lambda num_results, _: num_results != 1
    try:
        check_order(world)
    finally:
        _order.gives_token = gives_token


def check_order(world: World) -> None:
    """Runs calls that don't depend on each other."""
    sites: list[int] = []
    describe = _native.describe_site

    def listen(site: int, text: str, details: Any) -> None:
        sites.append(site)
        describe(site, text, details)

    def body(x: jax.Array) -> list[jax.Array]:
        x = x[0]
        return [y[None] for i in range(3) for y in every_op(x * i, world.size)]

    _native.describe_site = listen
    try:
        step = world.per_rank(body).lower(world.integers(world.size, 24 * world.size)).compile()
    finally:
        _native.describe_site = describe
    assert len(sites) == 18
    first = {call["device"]: call["sequence"] for call in calls()}  # the last one of each device
    for _ in range(20 * world.rounds):
        jax.block_until_ready(step(world.integers(world.size, 24 * world.size)))
    by_device: dict[int, list[int]] = {}
    for call in calls():
        if call["sequence"] > first.get(call["device"], 0):
            by_device.setdefault(int(call["device"]), []).append(int(call["site"]))
    assert len(by_device) == world.size
    for device, order in by_device.items():
        for at in range(0, len(order), len(sites)):
            assert order[at : at + len(sites)] == sites, f"device {device} took another order"


@scenario
def independent(world: World) -> None:
    """Equal calls that don't depend on each other, beside a loop that makes more of them."""

    def body(x: jax.Array) -> Tree:
        x = x[0]
        outs = [jaxcoll.all_reduce(x * i, "x") for i in range(5)]

        def turn(carry: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jaxcoll.all_reduce(carry + i, "x") % 1009
            return y, jaxcoll.ppermute(y + lax.axis_index("x"), "x", ring(world.size))

        carry, ys = lax.scan(turn, x, jnp.arange(7, dtype=np.int32))
        outs += [jaxcoll.all_reduce(x - i, "x", op="max") for i in range(5)]
        return jax.tree.map(lambda y: y[None], (outs, carry, ys))

    for length in (3, 5000):
        check_against_lax(world, body, world.integers(world.size, length), times=10 * world.rounds)


@scenario
def clones(world: World) -> None:
    """One call site that the compiler copies: an inner jit that is called many times."""

    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        y = jaxcoll.all_reduce(x, "x") % 10007
        return y + jaxcoll.ppermute(x, "x", ring(world.size))

    def body(x: jax.Array) -> Tree:
        x = x[0]
        chain = x
        for _ in range(5):
            chain = inner(chain)
        beside = [inner(x * i) for i in range(5)]
        looped = lax.fori_loop(0, 5, lambda _, c: inner(c), x)
        return jax.tree.map(lambda y: y[None], (chain, beside, looped))

    check_against_lax(world, body, world.integers(world.size, 600), times=15 * world.rounds)


@contextlib.contextmanager
def without_order() -> Iterator[None]:
    """Lowers native calls with a number for a token, and without one among the results.

    XLA then starts them in any order, another one on each device: the order that tokens give must
    only ever be a convenience.
    """
    gives_token, token = _order.gives_token, _order.Order.token
    _order.gives_token = lambda num_results, _: num_results != 1
    _order.Order.token = lambda _: mlir.ir_constant(np.uint32(0))
    try:
        yield
    finally:
        _order.gives_token, _order.Order.token = gives_token, token


@scenario
def unordered(world: World) -> None:
    """Equal calls, clones and loops that start in any order: that must not matter."""

    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return jaxcoll.all_reduce(jaxcoll.all_reduce(x, "x") - 7, "x")

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jaxcoll.all_reduce(x, "x")
        return x

    def body(x: jax.Array) -> Tree:
        x = x[0]
        chains = [chain(x + i) for i in range(6)]
        copies = [inner(x - i) for i in range(6)]
        loops = [lax.fori_loop(0, 3, lambda _, c: inner(c) % 997, x * i) for i in range(3)]
        theirs = [jaxcoll.all_gather(lax.psum(x * i, "x"), "x") for i in range(2)]
        return jax.tree.map(lambda y: y[None], (chains, copies, loops, theirs))

    before = {call["device"]: call["sequence"] for call in calls()}
    with without_order():
        check_against_lax(world, body, world.integers(world.size, 600), times=20 * world.rounds)
    orders: dict[int, dict[int, list[int]]] = {}
    for call in calls():
        if call["sequence"] > before.get(call["device"], 0):
            of_run = orders.setdefault(int(call["run"]), {})
            of_run.setdefault(int(call["device"]), []).append(int(call["site"]))
    mixed_up = sum(len({tuple(order) for order in run.values()}) > 1 for run in orders.values())
    assert mixed_up > 0, "no run had another order on another device: this tests nothing"


@scenario
def loops(world: World) -> None:
    """Loops whose length is data, in a loop, with calls in the condition, beside others."""

    def body(x: jax.Array) -> Tree:
        x = x[0]

        def go_on(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            i, y = state
            return jaxcoll.all_reduce(jnp.max(y) % 7 + i, "x", op="max") < 11

        def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            i, y = state
            y = lax.fori_loop(0, i % 3, lambda _, v: jaxcoll.all_reduce(v, "x") % 997, y)
            return i + 1, y + jaxcoll.broadcast(y, "x", root=world.size - 1)

        def outer(carry: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            n, y = lax.while_loop(go_on, turn, (i % 4, carry))
            y = lax.cond(
                jaxcoll.all_reduce(n, "x") % 2 == 0,
                lambda v: jaxcoll.all_reduce(v, "x", op="min"),
                lambda v: v + jaxcoll.all_reduce(v, "x", op="max"),
                y,
            )
            return y % 1009, n

        beside = jaxcoll.all_reduce(x, "x")
        y, counts = lax.scan(outer, x, jnp.arange(4, dtype=np.int32))
        return jax.tree.map(lambda v: v[None], (y, counts, beside + jaxcoll.all_reduce(y, "x")))

    check_against_lax(world, body, world.integers(world.size, 100), times=8 * world.rounds)


@scenario
def groups(world: World) -> None:
    """Several groups at once: the axes of meshes with permuted devices, and groups of indices."""
    size = world.size
    shapes = {4: [(2, 2)], 8: [(4, 2), (2, 4)]}.get(size, [(size, 1)])
    x = world.integers(size, 40)
    for shape in shapes:
        devices = list(world.devices)
        world.rng.shuffle(devices)
        mesh = Mesh(np.array(devices).reshape(shape), ("a", "b"))

        def on_axes(x: jax.Array, shape: tuple[int, int] = shape) -> Tree:
            x = x[0]
            down = jaxcoll.all_reduce(x, "a")
            across = jaxcoll.all_reduce(x + 1, "b")
            gathered = jaxcoll.all_gather(down - across, "a", tiled=True)
            moved = jaxcoll.ppermute(gathered, "b", ring(shape[1]))
            both = jaxcoll.reduce_scatter(moved, ("a", "b"), tiled=True) if shape[0] == 4 else moved
            return jax.tree.map(lambda y: y[None], (down, across, moved, both))

        with jaxcoll.using(backend="lax"):
            expected = jax.device_get(world.per_rank(lambda x: on_axes(x), mesh)(x))
        native = world.per_rank(lambda x: on_axes(x), mesh)
        for i in range(8 * world.rounds):
            check_equal(f"run {i}", native(x), expected)
    if size % 2 == 0:
        halves = [list(range(0, size, 2)), list(range(1, size, 2))]

        def in_groups(x: jax.Array) -> Tree:
            x = x[0]
            y = jaxcoll.all_reduce(x, "x", axis_index_groups=halves)
            z = jaxcoll.all_gather(x + y, "x", axis_index_groups=halves)
            return jax.tree.map(lambda v: v[None], (y, z, jaxcoll.all_reduce(y, "x")))

        check_against_lax(world, in_groups, x, times=8 * world.rounds)


@scenario
def large(world: World) -> None:
    """Sizes at which runners help, in place and not, and trees with leaves of any length."""

    def body(x: jax.Array) -> Tree:
        x = x[0]
        cuts = np.cumsum([1, 7, 0, 16384, 3, 40000])
        tree = jaxcoll.all_reduce(jnp.split(x, cuts), "x")
        again = jaxcoll.all_reduce([leaf % 1009 for leaf in tree], "x", op="max")
        whole = x[: x.size // world.size * world.size]
        rest = every_op(whole, world.size)
        return jax.tree.map(lambda y: y[None], (tree, again, rest))

    check_against_lax(world, body, world.integers(world.size, 120_001), times=3 * world.rounds)

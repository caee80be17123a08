"""Scenarios of waiting: beside XLA's own collectives, with delays, many steps, several threads."""

import random
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from stress.world import (
    Tree,
    World,
    check_against_lax,
    check_equal,
    delayed,
    every_op,
    ring,
    scenario,
)

import jaxcoll


@scenario
def mixed(world: World) -> None:
    """Native calls before, between, after and beside XLA's own collectives, which block threads."""

    def body(x: jax.Array) -> Tree:
        x = x[0]
        outs = []
        for i in range(3):
            x = jaxcoll.all_reduce(lax.psum(x, "x") % 1009 + lax.axis_index("x"), "x") % 2003
            outs.append(lax.psum(x * i, "x"))
            outs.append(jaxcoll.all_reduce(x + i, "x"))
            outs.append(lax.ppermute(x - i, "x", ring(world.size)))
            outs += every_op(x * i, world.size)
            outs.append(lax.all_gather(x - i, "x", tiled=True))
        return jax.tree.map(lambda y: y[None], outs)

    check_against_lax(
        world, body, world.integers(world.size, 12 * world.size), times=10 * world.rounds
    )


@scenario
def delays(world: World) -> None:
    """Devices that come in any order and far apart, held up in Python."""
    rng = random.Random(world.seed)

    def body(x: jax.Array) -> Tree:
        x = x[0]
        for i in range(3):
            early = jaxcoll.all_reduce(x * i, "x")
            x = jaxcoll.all_reduce(delayed(x, 4, rng), "x") % 997 + early % 10
            x = lax.psum(delayed(x, 2, rng), "x") % 1009
            x = x + jaxcoll.ppermute(x, "x", ring(world.size))
        return x[None]

    check_against_lax(world, body, world.integers(world.size, 40), times=3 * world.rounds)


@scenario
def unawaited(world: World) -> None:
    """Hundreds of steps that nobody waits for, on donated state."""

    def body(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        tree = jaxcoll.all_reduce([state[0] + x[0], x[0] * 3], "x")
        gathered = jaxcoll.all_gather(tree[0] % 1009, "x").sum(0, dtype=np.int32)
        return ((tree[0] + gathered + tree[1]) % 10007)[None], gathered[None]

    size = world.size
    step = world.per_rank(body, donate_argnums=0)
    xs = world.integers(300, size, 33)
    for _ in range(world.rounds):
        state = start = jnp.asarray(world.integers(size, 33))
        expected = np.asarray(start).astype(np.int64)
        state = jax.device_put(start, jax.sharding.NamedSharding(world.mesh, P("x")))
        sums = []
        for x in xs:
            state, gathered = step(state, x)
            sums.append(gathered)
        for i, x in enumerate(xs):
            total = (expected + x).sum(0)
            gathered_sum = size * (total % 1009)
            expected = np.broadcast_to((total + gathered_sum + 3 * x.sum(0)) % 10007, (size, 33))
            check_equal(f"step {i}", sums[i], np.broadcast_to(gathered_sum, (size, 33)))
        check_equal("the last state", state, expected)


@scenario
def two_threads(world: World) -> None:
    """Two Python threads that launch different programs, and the same one, on the same devices."""

    def first(x: jax.Array) -> jax.Array:
        y = jaxcoll.all_reduce(x[0], "x") % 1009
        return (lax.psum(y + lax.axis_index("x"), "x") + jaxcoll.all_reduce(y, "x", op="max"))[None]

    def second(x: jax.Array) -> jax.Array:
        def turn(_: Any, y: jax.Array) -> jax.Array:
            return jaxcoll.all_reduce(y, "x") % 997 + jaxcoll.ppermute(y, "x", ring(world.size))

        return lax.fori_loop(0, 4, turn, x[0])[None]

    x = world.integers(world.size, 50)
    programs = []
    for body in (first, second):
        with jaxcoll.using(backend="lax"):
            expected = jax.device_get(world.per_rank(lambda x, body=body: body(x))(x))
        program = world.per_rank(body)
        check_equal("alone", program(x), expected)
        programs.append((program, expected))

    problems: list[BaseException] = []

    def launch(order: Sequence[int], unawaited: int) -> None:
        try:
            for _ in range(4 * world.rounds):
                results = [(i, programs[i][0](x)) for i in order for _ in range(unawaited)]
                for i, got in results:
                    check_equal(f"program {i}", got, programs[i][1])
        except BaseException as problem:
            problems.append(problem)

    for orders in (((0,), (1,)), ((0, 1), (1, 0)), ((0,), (0,))):
        threads = [
            threading.Thread(target=launch, args=(order, unawaited))
            for order, unawaited in zip(orders, (5, 8), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]


@scenario
def pmap(world: World) -> None:
    """The same engine under pmap, several maps in turn."""
    size = world.size

    def body(x: jax.Array) -> list[jax.Array]:
        y = jaxcoll.all_reduce(x, "x") % 1009
        return [y, *every_op(y, size)]

    x = world.integers(size, 12 * size)
    with jaxcoll.using(backend="lax"):
        expected = jax.device_get(jax.pmap(lambda x: body(x), axis_name="x")(x))
    program = jax.pmap(body, axis_name="x", devices=world.devices)
    for i in range(20 * world.rounds):
        check_equal(f"run {i}", program(x), expected)


@scenario
def disjoint(world: World) -> None:
    """Programs on both halves of the devices, launched in turn, beside programs on all of them."""
    half = world.size // 2
    if half < 2:
        return

    def body(x: jax.Array) -> jax.Array:
        y = jaxcoll.all_reduce(x[0], "x")
        return (y + jaxcoll.ppermute(y + lax.axis_index("x"), "x", [(0, 1), (1, 0)]))[None]

    def expected(x: np.ndarray) -> np.ndarray:
        total = x.sum(0, dtype=np.int32)
        rows = [total + total + 1, total + total] + [total] * (len(x) - 2)
        return np.stack(rows)

    meshes = [Mesh(np.array(world.devices[at : at + half]), ("x",)) for at in (0, half)]
    programs = [(world.per_rank(body, mesh), half) for mesh in meshes]
    programs.append((world.per_rank(body), world.size))
    x = world.integers(world.size, 30)
    results = []
    for _ in range(20 * world.rounds):
        world.rng.shuffle(programs)
        results += [(program(x[:size]), size) for program, size in programs]
    for i, (got, size) in enumerate(results):
        check_equal(f"launch {i}", got, expected(x[:size]))


@scenario
def freed(world: World) -> None:
    """Programs that are forgotten, with their executables, as soon as they are launched."""
    results = []
    x = world.integers(world.size, 700)
    total = x.sum(0, dtype=np.int32)
    for i in range(4 * world.rounds):

        def body(x: jax.Array, i: int = i) -> jax.Array:
            return jaxcoll.all_reduce(jaxcoll.all_reduce(x[0], "x") * i, "x")[None]

        step = world.per_rank(body)
        results += [(i, step(x)) for _ in range(3)]
        del step
        jax.clear_caches()
    for i, got in results:
        check_equal(f"program {i}", got, np.broadcast_to(total * i * world.size, x.shape))

"""Programs that try to make native calls meet the wrong call, hang, or fail for no reason.

    python scenarios.py --devices 4 --seed 1 --rounds 3 mixed clones

runs these scenarios (all without names) in this process and says how each went. Data are integers
and are compared with `==`: with what `jax.lax` gives for the same program, or with the truth where
that is plain. A scenario that takes longer than `--limit` seconds prints the calls that wait and
every thread's stack, and ends the process. `run.py` starts many of these.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import functools as ft
import os
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import _lowering, _native

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


# ---- Order and identity --------------------------------------------------------------------------


@scenario
def token_order(world: World) -> None:
    """Every device begins a block's native calls in the order of the program.

    That rests on how XLA treats token buffers, which may change with any version of JAX. Pairing
    does not rest on it: see `independent`.
    """
    sites: list[int] = []
    describe = _native.describe_site

    def listen(site: int, text: str) -> None:
        sites.append(site)
        describe(site, text)

    def body(x: jax.Array) -> list[jax.Array]:
        x = x[0]
        return [y[None] for i in range(3) for y in every_op(x * i, world.size)]

    _native.describe_site = listen
    try:
        step = world.per_rank(body).lower(world.integers(world.size, 24 * world.size)).compile()
    finally:
        _native.describe_site = describe
    assert len(sites) == 18
    first = {record[0]: record[1] for record in _native.records()}  # the last one of each device
    for _ in range(20 * world.rounds):
        jax.block_until_ready(step(world.integers(world.size, 24 * world.size)))
    by_device: dict[int, list[int]] = {}
    for device, sequence, site, *_ in _native.records():
        if sequence > first.get(device, 0):
            by_device.setdefault(device, []).append(site)
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
    """Lowers native calls without tokens, and without results that share memory.

    XLA then starts them in any order, another one on each device: the order that tokens give must
    only ever be a convenience.
    """
    ir, compat = _lowering.ir, _lowering._compat
    stablehlo, module_memory, custom_call = (
        _lowering.stablehlo,
        compat.module_memory,
        compat.custom_call,
    )

    class Forgetful(dict[Any, Any]):
        def get(self, *_: Any) -> None:
            return None

    def memory(ctx: Any) -> Any:
        found = module_memory(ctx)
        found["tokens"] = Forgetful()
        return found

    def number() -> Any:
        return stablehlo.constant(ir.DenseElementsAttr.get(np.zeros((), np.uint32)))

    def call(target: str, **arguments: Any) -> Any:
        """Lets the first result, which the engine does not touch, be the first operand's memory."""
        arguments["result_types"][0] = arguments["operands"][2].type
        arguments["result_layouts"][0] = arguments["operand_layouts"][2]
        arguments["operand_output_aliases"] = {2: 0}
        return custom_call(target, **arguments)

    compat.module_memory, compat.custom_call = memory, call
    _lowering.stablehlo = types.SimpleNamespace(
        create_token=number, partition_id=stablehlo.partition_id
    )
    try:
        yield
    finally:
        compat.module_memory, compat.custom_call = module_memory, custom_call
        _lowering.stablehlo = stablehlo


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

    before = {record[0]: record[1] for record in _native.records()}
    with without_order():
        check_against_lax(world, body, world.integers(world.size, 600), times=20 * world.rounds)
    orders: dict[int, dict[int, list[int]]] = {}
    for device, sequence, site, run, *_ in _native.records():
        if sequence > before.get(device, 0):
            orders.setdefault(run, {}).setdefault(device, []).append(site)
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


# ---- Waiting -------------------------------------------------------------------------------------


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


# ---- Failing -------------------------------------------------------------------------------------


def _check_error(text: str, parts: Sequence[str]) -> None:
    for part in parts:
        assert part in text, f"expected {part!r} in the error: {text}"


@scenario
def deadline(world: World) -> None:
    """A rank that is late: an error on all ranks that says who and where, and then life goes on."""
    size = world.size
    late = size - 1
    nap_s = 0.0

    def sleep(rank: int) -> None:
        if rank == late:
            time.sleep(nap_s)

    def body(x: jax.Array) -> jax.Array:
        before = jaxcoll.all_reduce(x[0], "x")
        return jaxcoll.all_reduce(in_python(before, sleep) + x[0], "x", op="sum")[None]

    x = world.integers(size, 20)
    total = x.sum(0, dtype=np.int32)
    expected = np.broadcast_to(size * total + total, x.shape)
    step = world.per_rank(body)
    check_equal("in time", step(x), expected)
    for _ in range(world.rounds):
        with timeout(0.3):
            nap_s = 0.9
            start = time.monotonic()
            try:
                jax.block_until_ready(step(x))
            except jax.errors.JaxRuntimeError as error:
                text = str(error)
            else:
                raise AssertionError("a rank was late and no error came")
            assert time.monotonic() - start < 5, "the error came late"
            came = ", ".join(f"{r} (device {r})" for r in range(size - 1))
            _check_error(
                text,
                (
                    "jaxcoll.CollectiveError: ",
                    'all_reduce over "x" of i32[20]',
                    f"for rank {late} (device {late}) of {size}",
                    f"arrived: rank {came};",
                    "scenarios.py:",
                ),
            )
            nap_s = 0.0
        check_equal("the next step", step(x), expected)


@scenario
def one_of_many_fails(world: World) -> None:
    """A failure among un-awaited steps that don't depend on each other stays in its own step."""
    size = world.size
    bad_step, num_steps = 7, 20
    calls = [0] * size

    def sleep(rank: int) -> None:
        calls[rank] += 1
        if rank == 0 and calls[rank] == bad_step + 1:
            time.sleep(0.8)

    def body(x: jax.Array) -> jax.Array:
        y = jaxcoll.all_reduce(in_python(x[0], sleep), "x")
        return (lax.psum(y, "x") + jaxcoll.all_reduce(y, "x", op="max"))[None]

    x = world.integers(size, 20)
    expected = np.broadcast_to((size + 1) * x.sum(0, dtype=np.int32), x.shape)
    step = world.per_rank(body)
    for _ in range(world.rounds):
        calls[:] = [-1] * size
        check_equal("alone", step(x), expected)
        with timeout(0.25):
            results = [step(x) for _ in range(num_steps)]
            for i, result in enumerate(results):
                try:
                    got = np.asarray(result)
                except jax.errors.JaxRuntimeError as error:
                    assert i == bad_step, f"step {i} failed: {error}"  # noqa: PT017
                    _check_error(str(error), ("jaxcoll.CollectiveError: ", "for rank 0 (device 0)"))
                else:
                    assert i != bad_step, "the late rank's step succeeded"
                    check_equal(f"step {i}", got, expected)


@scenario
def a_device_raises(world: World) -> None:
    """An error on one device before a collective: an error, no hang, and the next step runs."""
    size = world.size
    bad = -1

    def act(rank: int) -> None:
        if rank == bad:
            raise ArithmeticError("this device can't go on")

    def body(x: jax.Array) -> jax.Array:
        before = jaxcoll.all_reduce(x[0], "x")
        beside = jaxcoll.all_reduce(x[0] + 1, "x")
        return (jaxcoll.all_reduce(in_python(before, act), "x") + beside)[None]

    x = world.integers(size, 20)
    total = x.sum(0, dtype=np.int32)
    expected = np.broadcast_to(size * total + total + size, x.shape)
    step = world.per_rank(body)
    check_equal("at first", step(x), expected)
    for _ in range(world.rounds):
        with timeout(0.3):
            bad = world.rng.randrange(size)
            try:
                jax.block_until_ready(step(x))
            except jax.errors.JaxRuntimeError as error:
                text = str(error)
            else:
                raise AssertionError("a device raised and no error came")
            assert "can't go on" in text or "jaxcoll.CollectiveError: " in text, text
            bad = -1
        check_equal("the next step", step(x), expected)


def leave_unawaited(world: World) -> None:
    """Launches steps and returns: a process may end in the midst of them.

    Without callbacks into Python, on which JAX itself aborts at exit.
    """

    def body(x: jax.Array) -> jax.Array:
        y = x[0]
        for _ in range(10):
            y = jaxcoll.all_reduce(y, "x") % 1009
            y = y + lax.psum(y, "x") % 10
        return y[None]

    step = world.per_rank(body)
    for _ in range(25):
        step(world.integers(world.size, 50_000))


# ---- The command ---------------------------------------------------------------------------------


def _say_what_waits(name: str) -> None:
    """Prints the latest native calls of each device; only works where Python still runs."""
    latest: dict[int, list[Any]] = {}
    for record in _native.records():
        latest.setdefault(record[0], []).append(record)
    print(f"{name} HANGS. The latest native calls, (device, sequence, site, run, iteration, ...):")
    for records in latest.values():
        for record in records[-4:]:
            print(" ", record)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="scenario", help=", ".join(SCENARIOS))
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one scenario")
    parser.add_argument("--list", action="store_true", help="print the scenarios' names")
    args = parser.parse_args()
    if args.list:
        print(*SCENARIOS, sep="\n")
        return
    # Where a call can't be native, that is an error here, not a reason to run on lax.
    os.environ.pop("JAXCOLL_BACKEND", None)
    jaxcoll.config.backend = "native"
    jaxcoll.simulate_cpu_devices(args.devices)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    failed = 0
    for name in args.names or SCENARIOS:
        faulthandler.dump_traceback_later(args.limit, exit=True)
        timer = threading.Timer(args.limit - 2, _say_what_waits, [name])
        timer.daemon = True
        timer.start()
        start = time.monotonic()
        what = f"{name} --devices {args.devices} --seed {args.seed} --rounds {args.rounds}"
        print(f"start {what}", flush=True)
        try:
            SCENARIOS[name](World(mesh, args.seed, args.rounds))
        except Exception as problem:
            failed += 1
            print(f"FAIL  {what}: {type(problem).__name__}: {problem}", flush=True)
        else:
            print(f"ok    {what}: {time.monotonic() - start:.1f} s", flush=True)
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()
    leave_unawaited(World(mesh, args.seed, args.rounds))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

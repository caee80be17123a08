"""Programs whose collectives come to the engine through XLA's interface to MPI.

through_door.py KIND
"""

import itertools as it
import logging
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from world import say

import jaxcoll
from jaxcoll import _native
from jaxcoll.diagnosis import black_box

KIND = sys.argv[1]
RANK = jax.process_index()


def on(mesh: Mesh, value: np.ndarray, *spec: Any) -> jax.Array:
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def assert_parts(actual: jax.Array, expected: np.ndarray, what: str) -> None:
    assert actual.shape == expected.shape, what
    for shard in actual.addressable_shards:
        assert (np.asarray(shard.data) == expected[shard.index]).all(), what


def submeshes() -> None:
    """Meshes of any devices in any order, whose groups begin with the same device or end so."""
    random = np.random.default_rng(0)  # the same on all processes
    devices = jax.devices()
    for number in range(24):
        size = int(random.choice([size for size in (2, 3, 4, 6, 8) if size <= len(devices)]))
        chosen = [devices[i] for i in random.permutation(len(devices))[:size]]
        shapes = [(a, size // a) for a in range(1, size + 1) if size % a == 0]
        shape = shapes[int(random.integers(len(shapes)))]
        x = random.integers(0, 9, (2 * size, 4 * size)).astype(np.float32)
        if not any(device.process_index == RANK for device in chosen):
            continue
        mesh = Mesh(np.array(chosen).reshape(shape), ("a", "b"))
        y = on(mesh, x, "a", "b")
        what = f"mesh {number}, {shape} of {[device.id for device in chosen]}"
        whole, gathered, rows, columns, swapped = jax.jit(
            lambda y, mesh=mesh: (
                y.sum(),
                lax.with_sharding_constraint(y, NamedSharding(mesh, P())),
                y.sum(0),
                y.max(1),
                lax.with_sharding_constraint(y, NamedSharding(mesh, P("b", "a"))),
            )
        )(y)
        assert float(whole) == x.sum(), what
        assert_parts(gathered, x, what)
        assert_parts(rows, x.sum(0), what)
        assert_parts(columns, x.max(1), what)
        assert_parts(swapped, x, what)
    say("all meshes are right")


def both_doors() -> None:
    """Jaxcoll's functions, lax's, and what the compiler inserts, for 1,000 steps."""
    count = jax.device_count()
    mesh = Mesh(np.array(jax.devices()).reshape(count // 2, 2), ("a", "b"))

    @jax.jit
    def step(x: Any) -> Any:
        def ours_and_laxs(block: Any) -> Any:
            ours = jaxcoll.all_reduce(block, "a")
            with jaxcoll.using(backend="lax"):
                through = jaxcoll.ppermute(block, "b", [(0, 1), (1, 0)])
            return (ours + lax.psum(block, "b") + through) % 17

        x = jax.shard_map(ours_and_laxs, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))(x)
        return (x + x.sum(axis=0, keepdims=True)) % 17

    def expected(x: np.ndarray) -> np.ndarray:
        blocks = x.reshape(count // 2, 2, 2, 3).transpose(0, 2, 1, 3)  # (a, b, rows, columns)
        sums = blocks.sum(axis=0, keepdims=True) + blocks.sum(axis=1, keepdims=True)
        x = ((sums + blocks[:, ::-1]) % 17).transpose(0, 2, 1, 3).reshape(x.shape)
        return (x + x.sum(axis=0, keepdims=True)) % 17

    x = np.random.default_rng(0).integers(0, 17, (count // 2 * 2, 6)).astype(np.int32)
    y = on(mesh, x, "a", "b")
    calls = _native.num_calls(), _native.num_mpi_calls()
    for _ in range(1000):
        y = step(y)
        x = expected(x)
    assert_parts(y, x, "after 1,000 steps")
    assert _native.num_calls() - calls[0] >= 1000
    assert _native.num_mpi_calls() - calls[1] >= 1000
    say("all steps are right")


def libraries() -> None:
    """What JAX's own documentation does with several processes."""
    count, here = jax.device_count(), jax.local_device_count()
    ones = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(jnp.ones(here))
    assert (np.asarray(ones) == count).all()
    mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.arange(8.0 * count).astype(np.float32).reshape(count, 8)
    placed = jax.device_put(x, NamedSharding(mesh, P("x")))
    assert float(jax.jit(lambda x: (x * x).sum())(placed)) == (x * x).sum()
    gathered = multihost_utils.process_allgather(placed, tiled=True)
    assert (gathered == x).all()
    sent = multihost_utils.broadcast_one_to_all(np.arange(5) + RANK)
    assert (sent == np.arange(5)).all()
    multihost_utils.assert_equal(np.arange(3), "not the same")
    multihost_utils.sync_global_devices("here")
    stacked = multihost_utils.host_local_array_to_global_array(x[:here] + RANK, mesh, P("x"))
    total = sum(float((x[:here] + p).sum()) for p in range(jax.process_count()))
    assert float(jax.jit(jnp.sum)(stacked)) == total
    box = black_box.own()
    assert box is not None
    assert set(box.calls()["device"].tolist()) == set(range(here))  # ordinals
    half = jax.device_put(x.astype(jnp.bfloat16), NamedSharding(mesh, P("x")))
    sums, whole = jax.jit(
        lambda x: (x.sum(0), lax.with_sharding_constraint(2 * x, NamedSharding(mesh, P())))
    )(half)
    exact = x.astype(jnp.bfloat16).astype(np.float32)
    assert np.allclose(np.asarray(sums, np.float32), exact.sum(0), rtol=1e-2)
    assert (np.asarray(whole, np.float32) == 2 * exact).all()
    say("all libraries work")


def flax_and_optax() -> None:
    """Training as Flax and Optax have it, with parameters sharded by hand."""
    import flax.linen as nn
    import optax

    count = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    model = nn.Sequential([nn.Dense(8 * count), nn.relu, nn.LayerNorm(), nn.Dense(3)])
    optimizer = optax.adam(1e-2)
    x = np.random.default_rng(0).standard_normal((4 * count, 5)).astype(np.float32)
    labels = np.arange(4 * count) % 3

    def loss(params: Any, x: Any, labels: Any) -> Any:
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params: Any, state: Any, x: Any, labels: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def train(params: Any, x: Any, labels: Any) -> list[float]:
        state = jax.jit(optimizer.init)(params)
        losses = []
        for _ in range(5):
            params, state, value = step(params, state, x, labels)
            losses.append(float(value))
        return losses

    first = jax.device_get(model.init(jax.random.key(0), x[:1]))
    expected = train(first, x, labels)
    wide = lambda leaf: (None,) * (leaf.ndim - 1) + ("data",) if leaf.shape[-1] > 3 else ()  # noqa: E731
    params = jax.tree.map(lambda leaf: on(mesh, leaf, *wide(leaf)), first)
    losses = train(params, on(mesh, x, "data"), on(mesh, labels, "data"))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    say("Flax and Optax train")


def alone() -> None:
    """Groups of one rank, and programs on one device."""
    devices = jax.devices()
    for shape in ((len(devices), 1), (1, len(devices))):
        mesh = Mesh(np.array(devices).reshape(shape), ("a", "b"))
        x = np.arange(4.0 * len(devices)).reshape(len(devices), 4)
        for axis in ("a", "b"):
            total = jax.jit(
                jax.shard_map(
                    lambda x, axis=axis: lax.psum(x, axis),
                    mesh=mesh,
                    in_specs=P(("a", "b")),
                    out_specs=P(("a", "b")),
                    check_vma=False,
                )
            )
            with jaxcoll.accelerate_lax(False):
                y = total(on(mesh, x, ("a", "b")))
            size = mesh.shape[axis]
            expected = x if size == 1 else np.broadcast_to(x.sum(axis=0), x.shape)
            assert_parts(y, expected, f"psum over {size} of {shape}")
    assert float(jax.jit(lambda x: x + 1)(1.0)) == 2
    say("alone it works")


def refused() -> None:
    """What XLA has no MPI type for, and what says so."""
    mesh = Mesh(np.array(jax.devices()), ("a",))
    x = on(mesh, np.ones((jax.device_count(), 4), np.float16), "a")
    try:
        jax.jit(lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P())))(x)
        say("not refused")
    except NotImplementedError as error:
        say(f"refused: {error}")
    assert float(jax.jit(lambda x: x.astype(np.float32).sum())(x)) == x.size


def interrupted() -> None:
    """Ctrl-C while XLA is asked for communicators, behind a step in flight."""
    mesh = Mesh(np.array(jax.devices()), ("a",))
    x = on(mesh, np.arange(2.0 * jax.device_count()), "a")

    def sleep(block: Any) -> Any:
        time.sleep(1)
        return block

    def slow(block: Any) -> Any:
        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(block.shape, block.dtype), block)

    step = jax.jit(jax.shard_map(slow, mesh=mesh, in_specs=P("a"), out_specs=P("a")))
    total = jax.jit(jnp.sum)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    running = step(x)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        total(x)
        say("not interrupted")
    except KeyboardInterrupt:
        say("interrupted")
    del running
    assert float(total(x)) == np.arange(2.0 * jax.device_count()).sum()
    say("goes on")


def two_kinds() -> None:
    """Programs for one and for several devices of a process, over the same group."""
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s: %(message)s")
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    for chosen in (devices, devices[:, :1]):
        mesh = Mesh(chosen, ("a", "b"))
        x = on(mesh, np.ones((4, 4), np.float32), "a", "b")
        assert (np.asarray(jax.jit(lambda x: x.sum(0))(x).addressable_shards[0].data) == 4).all()


def devices_first() -> None:
    """A process of its own devices alone."""
    for size in it.accumulate([1] * jax.local_device_count()):
        mesh = Mesh(np.array(jax.local_devices()[:size]), ("a",))
        x = np.arange(3.0 * size).reshape(size, 3)
        y = jax.jit(lambda x, mesh=mesh: x.sum(0))(jax.device_put(x, NamedSharding(mesh, P("a"))))
        assert (np.asarray(y) == x.sum(0)).all()
    say("all local meshes are right")


KINDS = (
    *(submeshes, both_doors, libraries, flax_and_optax, alone, refused, devices_first),
    *(interrupted, two_kinds),
)
{kind.__name__: kind for kind in KINDS}[KIND]()

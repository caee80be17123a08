"""What the jobs share: meshes over all processes, global operands, and this process's results."""

import atexit
import functools as ft
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import _native


@ft.cache
def mesh(order: str = "processes first") -> Mesh:
    """Returns all devices as processes ("p") by devices of a process ("d").

    `order` "devices first" has ranks of one process far apart; "parts" has groups over one axis
    of two processes each, neighbours ("d") or not ("p").
    """
    shape = (jax.process_count(), jax.local_device_count())
    devices = np.array(jax.devices()).reshape(shape)
    if order == "devices first":
        return Mesh(devices.T, ("d", "p"))
    if order == "parts":
        return Mesh(devices.reshape(shape[0] // 2, -1), ("p", "d"))
    return Mesh(devices, ("p", "d"))


def put(stacked: np.ndarray, over: Mesh) -> jax.Array:
    """Returns a global array with one block of `stacked` on each device of the mesh."""
    sharding = NamedSharding(over, P(over.axis_names))
    return jax.make_array_from_callback(stacked.shape, sharding, lambda index: stacked[index])


def mapped(f: Callable[..., Any], over: Mesh) -> Callable[..., Any]:
    """Maps `f` over all axes of the mesh; outside, operands and results are stacked by device."""
    spec = P(over.axis_names)

    def body(*blocks: Any) -> Any:
        results = f(*jax.tree.map(lambda stacked: stacked[0], blocks))
        return jax.tree.map(lambda result: jnp.asarray(result)[None], results)

    return jax.jit(jax.shard_map(body, mesh=over, in_specs=spec, out_specs=spec, check_vma=False))


def assert_blocks(actual: jax.Array, expected: np.ndarray, what: str) -> None:
    """Asserts that this process's blocks of a stacked result are those of `expected`."""
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    for shard in actual.addressable_shards:
        got, want = np.asarray(shard.data), expected[shard.index]
        wrong = int((got != want).sum())
        assert wrong == 0, f"{what}, block {shard.index[0].start}: {wrong} wrong elements"


@contextmanager
def native_calls(expected: int) -> Iterator[None]:
    """Asserts that so many native calls are made by this process inside."""
    before = _native.num_calls()
    yield
    made = _native.num_calls() - before
    assert made == expected, f"{made} native calls, not {expected}"


def on_two_hosts() -> None:
    """Has the processes pretend to be on two hosts, unless they are."""
    if "JAXCOLL_HOST_ID" not in os.environ:
        second = jax.process_index() >= jax.process_count() // 2
        os.environ["JAXCOLL_HOST_ID"] = "second" if second else "first"
        jaxcoll.reset()


def say(text: str) -> None:
    """Prints a line that the test looks for."""
    print(text, flush=True)


def _say_what_came() -> None:
    print(f"XLA's collectives came to the engine: {_native.num_mpi_calls() > 0}", flush=True)


if "JAXCOLL_TEST_DOOR" in os.environ:
    atexit.register(_say_what_came)
jaxcoll.initialize()

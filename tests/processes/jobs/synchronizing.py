"""Averages gradients in 8 bits between hosts: synchronizing.py [hosts]."""

import logging
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from world import assert_blocks, mapped, mesh, put, say

import jaxcoll
from jaxcoll.optax import synchronize
from jaxcoll.parallel.quantization import BLOCK

HOSTS = "hosts" in sys.argv
if HOSTS:  # pretends that each process is on a host of its own
    os.environ["JAXCOLL_HOST_ID"] = f"host{jax.process_index()}"
    jaxcoll.reset()
AXES = mesh().axis_names
PROCESSES, DEVICES = jax.process_count(), jax.local_device_count()
logged: list[str] = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("jaxcoll").addHandler(handler)
optimizer = synchronize(AXES, "int8", mesh=mesh())


def average(grads: Any) -> Any:
    """Returns the mean over all ranks, and what each rank's part has lost."""
    mean, state = optimizer.update(grads, optimizer.init(grads))
    return mean, jnp.abs(state.error).sum()


def main() -> None:
    rng = np.random.default_rng(0)
    step, gather = mapped(average, mesh()), mapped(lambda x: jaxcoll.all_gather(x, AXES), mesh())
    # Alike on the ranks of a host, with 127 in each block: what 8 bits and a scale can hold.
    hosts = rng.integers(-127, 128, (PROCESSES, 3 * BLOCK)).astype(np.float32)
    hosts[:, ::BLOCK] = 127
    exact = np.repeat(hosts, DEVICES, 0)
    mean, _ = step(put(exact, mesh()))
    assert_blocks(mean, np.broadcast_to(exact.mean(0), exact.shape), "integers")

    grads = rng.normal(size=exact.shape).astype(np.float32)
    mean, lost = step(put(grads, mesh()))
    sums = grads.reshape(PROCESSES, DEVICES, -1).sum(1)
    scales = np.abs(sums).reshape(PROCESSES, -1, BLOCK).max(2) / 127
    bound = np.repeat(scales.sum(0), BLOCK) / 2 / len(grads) * (1 + 1e-4)
    for shard in mean.addressable_shards:
        error = np.abs(np.asarray(shard.data)[0] - grads.mean(0))
        assert (error <= (bound if HOSTS else 1e-6)).all(), error.max()
    for shard in lost.addressable_shards:
        assert (np.asarray(shard.data) > 0).all() == HOSTS
    for shard in gather(mean).addressable_shards:
        rows = np.asarray(shard.data)[0]
        assert (rows == rows[0]).all(), "the same bits on all ranks"
    assert ("xi8>" in jax.jit(step).lower(put(grads, mesh())).as_text()) == HOSTS
    say(f"averaged; {len(logged)} lines: {logged}")


main()

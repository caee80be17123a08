"""Trains and saves each step, and is killed in its second save: all but the last time it starts.

killed_saving.py FOLDER
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from training import batch, start
from world import say

import jaxcoll
from jaxcoll import Checkpoints, DataParallel, data_parallel_train_step, fully_shard
from jaxcoll.models import SimpleClassifier

STEPS = 8
# The ranks that are killed, each time the job is started, and how far into the save.
KILLED = [((1,), 0.0), ((0,), 0.01), ((0, 1), 0.02), ((), 0.0)]


def halves(folder: Path) -> list[str]:
    """Returns the steps of which the folder has a part of a checkpoint, and not all of it."""
    return [path.name.partition(".")[0] for path in folder.glob("*.orbax-checkpoint-tmp*")]


def kill_in_a_save(folder: Path, step: int, after_s: float) -> None:
    while str(step) not in halves(folder):
        time.sleep(0.0005)
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def assert_same_parts(actual: Any, expected: Any) -> None:
    """Compares what this process holds of a state, bit by bit."""
    for got, want in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        for part, whole in zip(got.addressable_shards, want.addressable_shards, strict=True):
            assert part.index == whole.index
            np.testing.assert_array_equal(part.data, whole.data)


def main(folder: Path) -> None:
    mesh = jaxcoll.make_mesh({"data": -1})
    # A dimension of 10 that the ranks don't divide.
    model = fully_shard(SimpleClassifier(num_classes=4, hidden=10), min_weight_size=8)
    state = start(model, batch(), mesh, optax.adamw(0.1))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    data = DataParallel().shard_batch(batch(), sharding, batch_is_global=True)
    specs = (state.specs, jax.P("data")), (state.specs, jax.P())
    step = jax.jit(
        jax.shard_map(
            data_parallel_train_step(model), mesh=mesh, in_specs=specs[0], out_specs=specs[1]
        )
    )
    undisturbed = [state]
    for _ in range(STEPS):
        undisturbed.append(step(undisturbed[-1], data)[0])
    ranks, after_s = KILLED[int(os.environ["JAXCOLL_RESTART"])]
    left = halves(folder)
    with Checkpoints(folder) as checkpoints:
        first = checkpoints.latest_step() or 0
        say(f"begins after step {first}" + "".join(f", beside a half of {one}" for one in left))
        if first:
            state = checkpoints.restore(state)
            assert_same_parts(state, undisturbed[first])
        for number in range(first + 1, STEPS + 1):
            state, _ = step(state, data)
            if number == first + 2 and jax.process_index() in ranks:
                threading.Thread(target=kill_in_a_save, args=(folder, number, after_s)).start()
            checkpoints.save(state)
            say(f"saved step {number}")
        assert_same_parts(state, undisturbed[STEPS])
        say("the bits of a run that was not killed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

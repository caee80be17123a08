"""Trains in legs, each on other axes across the processes, from the checkpoint of the one before.

checkpoints.py FOLDER
"""

import sys
from typing import Any

import jax
import numpy as np
import optax
from training import batch, start, train
from world import say

from jaxcoll import Checkpoints, DataParallel, data_parallel_train_step, fully_shard
from jaxcoll.models import SimpleClassifier, TPClassifier

# 10 and 4 are the sizes of a dimension that is stored with zeros, and of one that is not.
PLAIN = SimpleClassifier(num_classes=4, hidden=10)
ADAM = optax.adamw(0.1)


def mesh_of(axes: dict[str, int], *, across: bool = False) -> Any:
    """Returns a mesh of all devices; the last axis goes inside a process, or across them."""
    grid = np.array(jax.devices()).reshape(jax.process_count(), -1)
    return jax.sharding.Mesh((grid.T if across else grid).reshape(*axes.values()), (*axes,))


def main(folder: str) -> None:
    jax.config.update("jax_enable_x64", True)
    one, two = mesh_of({"data": 4}), mesh_of({"data": 2, "tensor": 2}, across=True)
    legs = (
        (fully_shard(PLAIN, min_weight_size=8), one),
        (TPClassifier(num_classes=4, hidden=10, mesh=two), two),
        (PLAIN, one),
    )
    for number, (model, mesh) in enumerate(legs):
        state = start(model, batch(), mesh, ADAM)
        with Checkpoints(folder, max_to_keep=None) as checkpoints:
            if number:
                state = checkpoints.restore(state)
                assert checkpoints.extras() == {"leg": number - 1}
            else:
                checkpoints.save(state)  # what the test starts from
            sharding = jax.NamedSharding(mesh, jax.P("data"))
            data = DataParallel().shard_batch(batch(), sharding, batch_is_global=True)
            step = data_parallel_train_step(model)
            state, _ = train(step, state, data, mesh, state.specs)
            checkpoints.save(state, leg=number)
            say(f"saved after {checkpoints.latest_step()} steps")


if __name__ == "__main__":
    main(sys.argv[1])

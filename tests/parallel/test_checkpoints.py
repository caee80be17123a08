"""Checkpoints of sharded states with Orbax: training goes on as if it had not stopped."""

import pathlib
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from training import batch, mesh_of, start, train

from jaxcoll import clip_by_global_norm, data_parallel_train_step, fully_shard
from jaxcoll.models import SimpleClassifier, TPClassifier
from jaxcoll.optax import synchronize

PLAIN = SimpleClassifier(num_classes=4, hidden=12)


def sharded(mesh: Any, stage: Any) -> tuple[Any, Any]:
    """A dimension of 12 that 8 ranks don't divide, and an optimizer with counters and moments."""
    del mesh
    optimizer = optax.chain(clip_by_global_norm(1.0), optax.adamw(0.1))
    return fully_shard(PLAIN, stage=stage, min_weight_size=16), optimizer


def synchronized(mesh: Any, stage: Any) -> tuple[Any, Any]:
    """What int8 has lost is a part of the state."""
    del stage
    return PLAIN, optax.chain(synchronize("data", "int8", mesh=mesh, hosts=2), optax.adamw(0.1))


def split_twice(mesh: Any, stage: Any) -> tuple[Any, Any]:
    model = TPClassifier(num_classes=4, hidden=24, mesh=mesh)
    return fully_shard(model, stage=stage, min_weight_size=16), optax.adamw(0.1)


@pytest.mark.parametrize(
    ("make", "stage", "axes"),
    [
        (sharded, 1, {"data": 8}),
        (sharded, 3, {"data": 8}),
        (synchronized, None, {"data": 4}),
        (split_twice, 3, {"data": 2, "tensor": 2}),
    ],
)
def test_resumed_to_the_last_bit(
    make: Any, stage: Any, axes: dict[str, int], tmp_path: pathlib.Path
):
    data, mesh = batch(), mesh_of(**axes)
    model, optimizer = make(mesh, stage)
    step = data_parallel_train_step(model)
    state = start(model, data, mesh, optimizer)
    state, _ = train(step, state, data, mesh, state.specs)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", contents(state))
        checkpointer.wait_until_finished()
        fresh = start(model, data, mesh, optimizer)
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, contents(fresh))
        restored = checkpointer.restore(tmp_path / "state", like)
    again = jax.tree.unflatten(jax.tree.structure(fresh), jax.tree.leaves(restored))
    after, seen = train(step, again, data, mesh, again.specs)
    expected, wanted = train(step, state, data, mesh, state.specs)
    assert seen == wanted
    jax.tree.map(np.testing.assert_array_equal, values(after), values(expected))


def contents(state: Any) -> dict[str, Any]:
    """Returns the leaves by their paths: what a checkpoint holds."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {f"{i:03d}{jax.tree_util.keystr(path)}": leaf for i, (path, leaf) in enumerate(leaves)}


def values(state: Any) -> list[Any]:
    leaves = jax.tree.leaves(state)
    is_key = [jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if key else leaf)
        for leaf, key in zip(leaves, is_key, strict=True)
    ]

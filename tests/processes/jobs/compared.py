"""This process's parts of what a job trains, compared with training on one of its devices."""

import functools as ft
from typing import Any

import jax
import numpy as np
import optax
import plans
from training import STEPS, trained_alone

import jaxcoll
from jaxcoll.parallel.pure_model import as_pure


def assert_parts(actual: Any, expected: Any, what: str) -> None:
    """Compares this process's parts of a tree, leaf by leaf."""
    actual_leaves = jax.tree_util.tree_leaves_with_path(actual)
    for (path, got), want in zip(actual_leaves, jax.tree.leaves(expected), strict=True):
        assert got.shape == want.shape
        for shard in got.addressable_shards:
            np.testing.assert_allclose(
                shard.data,
                np.asarray(want)[shard.index],
                rtol=0,
                atol=1e-10 * np.abs(want).max(initial=0),
                err_msg=f"{what} {path}",
            )


def check_plan(library: str, axes: dict[str, int], **options: Any) -> None:
    """Trains a model of `plans` under a plan over all processes, and on one device."""
    what, data, optimizer = f"{library}, {axes}", plans.batch(), optax.sgd(0.3)
    fsdp = {"min_weight_size": 16, "bucket_bytes": 1000} if "fsdp" in axes else None
    plan = jaxcoll.ParallelPlan(axes, fsdp=fsdp, **options)
    axis = "tensor" if "tensor" in axes else None
    make = plans.LIBRARIES[library]
    model = make(axis, plan.mesh if axis else None)
    state = plan.init(model, optimizer, jax.random.key(0), data)
    first, expected, losses = trained_alone(as_pure("test", make(None, None)), data, optimizer)
    assert_parts(state.unpadded().params, first, f"{what}, at the start,")
    step = plan.build_train_step(ft.partial(plans.loss_fn, axis))
    given = plan.shard_batch(data, batch_is_global=True)
    seen = []
    for _ in range(STEPS):
        state, metrics = step(state, given)
        seen.append(float(metrics["loss"]))
    assert_parts(state.unpadded().params, expected, what)
    np.testing.assert_allclose(seen, losses, rtol=1e-10)

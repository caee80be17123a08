"""This process's parts of what a job trains, compared with training on one of its devices."""

import functools as ft
from typing import Any

import jax
import numpy as np
import optax
import plans
from training import SGD, STEPS, batch, reference, start, trained_alone

import jaxcoll
from jaxcoll.models import PPClassifier, SimpleClassifier
from jaxcoll.parallel.pure_model import as_pure

PLAIN = SimpleClassifier(num_classes=4, hidden=24)


def local(tree: Any) -> Any:
    """Returns a tree on one device of this process."""
    return jax.device_put(tree, jax.local_devices()[0])


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


def _train(step: Any, state: Any, data: Any, mesh: Any, specs: Any, axes: Any) -> Any:
    """Makes some steps on a global batch; returns the last state and the losses."""
    in_specs = (specs, jax.P(axes))
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(specs, jax.P())))
    sharding = jax.NamedSharding(mesh, jax.P(axes))
    data = jaxcoll.DataParallel().shard_batch(data, sharding, batch_is_global=True)
    losses = []
    for _ in range(STEPS):
        state, metrics = mapped(state, data)
        losses.append(float(metrics["loss"]))
    return state, losses


def check(
    model: Any, mesh: Any, what: str, *, axes: Any = "data", step: Any = None, optimizer: Any = None
) -> Any:
    """Trains a classifier over a mesh, and on one device; returns the last state."""
    data = batch()
    plain = PLAIN if not isinstance(model, PPClassifier) else model
    optimizer = optimizer or SGD
    alone = local(start(plain, data).params)
    expected, losses = reference(plain, alone, data, optimizer)
    state = start(model, data, mesh, optimizer)
    assert_parts(state.params, alone, f"{what}, at the start,")
    step = step or jaxcoll.data_parallel_train_step(model, axis_name=axes)
    state, seen = _train(step, state, data, mesh, state.specs, axes)
    assert_parts(state.params, expected, what)
    np.testing.assert_allclose(seen, losses, rtol=1e-10)
    return state


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

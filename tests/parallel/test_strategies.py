"""Every data-parallel strategy, alone and beside the others: the training of one device.

In float64, leaf by leaf, to 1e-10: with plain gradient descent, which shows every wrong factor of a
gradient, and with AdamW.
"""

import functools as ft
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from training import assert_copies_are_equal, assert_trained_as, batch, mesh_of, start, train

import jaxcoll
from jaxcoll import data_parallel_train_step, fully_shard
from jaxcoll.parallel.pure_model import as_pure

OPTIMIZERS = {"sgd": optax.sgd(0.5), "adamw": optax.adamw(0.05)}
EXAMPLES = 2 * 3 * 5 * 7 * 8  # which all layouts divide, also in two micro-batches
# The last of the data axes has the parts of a state.
LAYOUTS = {
    **{f"data {size}": {"data": size} for size in (1, 2, 3, 4, 5, 7, 8)},
    "hybrid 2 x 3": {"replica": 2, "data": 3},
    "data 2, tensor 4": {"data": 2, "tensor": 4},
    "hybrid 2 x 2, tensor 2": {"replica": 2, "data": 2, "tensor": 2},
}
STRATEGIES: dict[str, Any] = {
    "data-parallel": None,
    "data-parallel in buckets": None,
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {"stage": 3},
    "ZeRO-3 piece by piece": {"stage": 3, "bucket_bytes": 1},
    "ZeRO-3 kept": {"stage": 3, "bucket_bytes": 1, "reshard_after_forward": False},
}


class OfLinen(nn.Module):
    """Split over an axis, or not: the same parameters."""

    axis: str | None
    mesh: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        options: dict[str, Any] = {"param_dtype": jnp.float64}
        split = {"axis_name": self.axis, "mesh": self.mesh, **options}
        x = nn.relu(jaxcoll.ColumnParallelDense(24, **split)(x))
        x = jaxcoll.RowParallelDense(12, **split)(x)
        return nn.Dense(4, **options)(nn.LayerNorm(**options)(x))


class OfNnx(nnx.Module):
    def __init__(self, axis: str | None, mesh: Any) -> None:
        rngs = nnx.Rngs(0)
        options: dict[str, Any] = {"param_dtype": jnp.float64, "rngs": rngs}
        split = {"axis_name": axis, "mesh": mesh, **options}
        self.up = jaxcoll.nnx.ColumnParallelDense(16, 24, **split)
        self.down = jaxcoll.nnx.RowParallelDense(24, 12, **split)
        self.norm = nnx.LayerNorm(12, **options)
        self.out = nnx.Linear(12, 4, **options)

    def __call__(self, x: Any) -> Any:
        return self.out(self.norm(self.down(nnx.relu(self.up(x)))))


LIBRARIES = {"linen": OfLinen, "nnx": OfNnx}


@ft.cache
def step_alone(library: str, optimizer: str) -> Any:
    """Returns a step on one device, written out."""
    model = as_pure("test", LIBRARIES[library](None, None))
    others = {k: v for k, v in model.init(jax.random.key(0), batch()[0]).items() if k != "params"}

    def loss(params: Any, data: Any) -> Any:
        logits, _ = model.apply({"params": params, **others}, data[0], jax.random.key(0))
        return optax.softmax_cross_entropy_with_integer_labels(logits, data[1]).mean()

    @jax.jit
    def step(params: Any, opt_state: Any, data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, data)
        updates, opt_state = OPTIMIZERS[optimizer].update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


@pytest.mark.slow
@pytest.mark.product(
    strategy=tuple(STRATEGIES),
    layout=tuple(LAYOUTS),
    library=tuple(LIBRARIES),
    optimizer=tuple(OPTIMIZERS),
    accumulate=(1, 2),
)
def test_trains_as_on_one_device(
    strategy: str, layout: str, library: str, optimizer: str, accumulate: int
):
    with jax.enable_x64(True):
        axes = LAYOUTS[layout]
        data, mesh = batch(EXAMPLES), mesh_of(**axes)
        over = tuple(axis for axis in axes if axis != "tensor")
        model: Any = LIBRARIES[library](*(("tensor", mesh) if "tensor" in axes else (None, None)))
        how = STRATEGIES[strategy]
        if how is not None:
            model = fully_shard(model, "data", min_weight_size=16, **how)
        state = start(model, data, mesh, OPTIMIZERS[optimizer])
        params = jax.device_get(state.unpadded().params)
        opt_state = OPTIMIZERS[optimizer].init(params)
        losses = []
        for _ in range(4):
            params, opt_state, loss = step_alone(library, optimizer)(params, opt_state, data)
            losses.append(loss)
        bucket_bytes = 1000 if strategy == "data-parallel in buckets" else None
        step = data_parallel_train_step(
            model, axis_name=over, accumulate=accumulate, bucket_bytes=bucket_bytes
        )
        state, metrics = train(step, state, data, mesh, state.specs, over)
        np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-10)
        assert_trained_as(state.unpadded().params, params)
        assert_copies_are_equal((state.params, state.opt_state))


@pytest.mark.slow
@pytest.mark.product(
    strategy=("data-parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"),
    size=(2, 3, 5),
)
def test_on_each_number_of_devices(strategy: str, size: int):
    """Of which few cases of the product above have each strategy."""
    test_trains_as_on_one_device(strategy, f"data {size}", "linen", "sgd", 1)

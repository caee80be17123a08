"""Every block of Artifex's page on data-parallel training, in its order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

# The page's import is `artifex.generative_models.training.distributed`.
from jaxcoll import DataParallel, DeviceMeshManager


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def test_basic_data_parallel_training():
    # Create mesh and data parallel utilities
    manager = DeviceMeshManager()
    mesh = manager.create_data_parallel_mesh()
    dp = DataParallel()

    # Create sharding for batch data
    sharding = dp.create_data_parallel_sharding(mesh)

    # Shard batch data
    batch = {"inputs": jnp.ones((32, 784)), "targets": jnp.zeros((32,))}
    sharded_batch = dp.shard_batch(batch, sharding)

    for name, leaf in sharded_batch.items():
        assert leaf.sharding.spec == jax.P("data")
        assert [len(shard.data) for shard in leaf.addressable_shards] == [4] * 8
        np.testing.assert_array_equal(leaf, batch[name])


def test_sharding_model_state():
    mesh = DeviceMeshManager().create_data_parallel_mesh()
    dp = DataParallel()
    model_state = nnx.state(nnx.Linear(16, 6, rngs=nnx.Rngs(0)))

    # Replicate model parameters across all devices (default for data parallelism)
    sharded_state = dp.shard_model_state(model_state, mesh, param_sharding="replicate")

    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(sharded_state))
    jax.tree.map(np.testing.assert_array_equal, sharded_state, model_state)

    # Or shard parameters across devices (for model parallelism)
    sharded_state = dp.shard_model_state(model_state, mesh, param_sharding="shard")

    assert sharded_state["kernel"][...].addressable_shards[0].data.shape == (2, 6)
    assert sharded_state["bias"][...].sharding.is_fully_replicated  # 8 devices can't share 6
    jax.tree.map(np.testing.assert_array_equal, sharded_state, model_state)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_gradient_aggregation(size: int):
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(size, 6, 3)), rng.normal(size=(size, 6))

    def compute_loss(p: Any, batch: Any) -> Any:
        return jnp.mean((batch["inputs"] @ p - batch["targets"]) ** 2)

    # The page's `@jax.pmap` has no axis_name, so that its mean over "batch" could not be taken; and
    # parameters are the same on all devices, hence in_axes.
    import functools as ft

    @ft.partial(jax.pmap, axis_name="batch", in_axes=(None, 0), devices=jax.devices()[:size])
    def train_step(params: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            return compute_loss(p, batch)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        # Average gradients across devices
        grads = DataParallel.all_reduce_gradients_static(grads, reduce_type="mean")
        return grads, loss

    params = rng.normal(size=3)
    batch = {"inputs": inputs, "targets": targets}
    for _ in range(3):
        whole = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
        expected = jax.grad(compute_loss)(params, whole)
        grads, loss = train_step(params, batch)
        for rank in range(size):
            np.testing.assert_allclose(grads[rank], expected, rtol=0, atol=1e-10)
        np.testing.assert_allclose(loss.mean(), compute_loss(params, whole), rtol=0, atol=1e-10)
        params = params - 0.1 * expected


def test_using_static_methods():
    manager = DeviceMeshManager()
    batch = {"inputs": np.arange(24.0).reshape(8, 3)}

    # Static methods don't require instantiation
    mesh = manager.create_device_mesh({"data": 4})
    sharding = DataParallel.create_data_parallel_sharding_static(mesh)
    sharded_batch = DataParallel.shard_batch_static(batch, sharding)

    assert sharding.spec == jax.P("data")
    assert len(sharded_batch["inputs"].addressable_shards) == 4
    np.testing.assert_array_equal(sharded_batch["inputs"], batch["inputs"])


class MyModel(nnx.Module):
    """The page leaves its model open."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(12, 16, rngs=rngs, param_dtype=jnp.float64)
        self.output = nnx.Linear(16, 3, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x: Any) -> Any:
        return self.output(jnp.tanh(self.hidden(x)))


def mean_squares(model: MyModel, batch: Any) -> Any:
    return jnp.mean((model(batch["inputs"]) - batch["targets"]) ** 2)


def batches() -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        {"inputs": rng.normal(size=(16, 12)), "targets": rng.normal(size=(16, 3))} for _ in range(4)
    ]


@pytest.mark.slow
@pytest.mark.product(param_sharding=("replicate", "shard"), size=(1, 2, 4, 8))
def test_complete_training_example(size: int, param_sharding: Any):
    dataloader = batches()

    # Setup
    manager = DeviceMeshManager(jax.devices()[:size])
    mesh = manager.create_data_parallel_mesh()
    dp = DataParallel()

    # Create model and optimizer (wrt=nnx.Param required in NNX 0.11.0+)
    model = MyModel(rngs=nnx.Rngs(0))
    # SGD, whose steps tell the gradient's scale; the page has Adam, which would hide it.
    optimizer = nnx.Optimizer(model, optax.sgd(0.3, momentum=0.9), wrt=nnx.Param)

    # Create shardings
    data_sharding = dp.create_data_parallel_sharding(mesh)

    # Replicate model state
    model_state = nnx.state(model)
    sharded_model_state = dp.shard_model_state(model_state, mesh, param_sharding)
    # The page computes the sharded state and never puts it back into the model, nor does it shard
    # the optimizer's.
    nnx.update(model, sharded_model_state)
    nnx.update(optimizer, dp.shard_model_state(nnx.state(optimizer), mesh, param_sharding))

    @nnx.jit
    def train_step(model: Any, optimizer: Any, sharded_batch: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            return mean_squares(model, sharded_batch)

        # Compute gradients and update
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        # Update model (NNX 0.11.0+ API)
        optimizer.update(model, grads)
        return loss

    # Training loop
    losses = []
    for batch in dataloader:
        # Shard batch
        sharded_batch = dp.shard_batch(batch, data_sharding)
        losses.append(train_step(model, optimizer, sharded_batch))

    alone = MyModel(rngs=nnx.Rngs(0))
    its_optimizer = nnx.Optimizer(alone, optax.sgd(0.3, momentum=0.9), wrt=nnx.Param)
    for batch, loss in zip(dataloader, losses, strict=True):
        its_loss, grads = nnx.value_and_grad(mean_squares)(alone, batch)
        its_optimizer.update(alone, grads)
        np.testing.assert_allclose(loss, its_loss, rtol=0, atol=1e-10)
    trained = nnx.state(model, nnx.Param)
    for got, want in zip(
        jax.tree.leaves(trained), jax.tree.leaves(nnx.state(alone, nnx.Param)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)
    kernel = model.hidden.kernel[...].addressable_shards[0].data.shape
    assert kernel == ((12, 16 // size) if param_sharding == "shard" else (12, 16))


def test_an_unknown_reduction():
    unknown: Any = "max"
    with pytest.raises(ValueError, match=r"reduce_type: expected one of .mean., .sum."):
        DataParallel().all_reduce_gradients({}, reduce_type=unknown)

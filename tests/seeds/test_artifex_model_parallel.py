"""Artifex's page on model parallelism: its one block, and its list of planned features."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from training import assert_trained_as, batch, reference, start, train

import jaxcoll
from jaxcoll import data_parallel_train_step, fully_shard, reshard
from jaxcoll.models import SimpleClassifier


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def test_jax_native_sharding():
    # Create 2D device mesh: (data_parallel, model_parallel)
    devices = jax.devices()[:4]  # eight are simulated here, and the page's grid has four
    mesh = Mesh(
        np.array(devices).reshape(2, 2),  # a list has no reshape
        axis_names=("data", "model"),
    )

    # Define sharding for model parameters
    # Shard weights along model axis, replicate bias
    weight_sharding = NamedSharding(mesh, P(None, "model"))  # (in_features, out_features)
    bias_sharding = NamedSharding(mesh, P("model"))  # (out_features,)

    # Create model with sharded parameters
    class ShardedLinear(nnx.Module):
        """Linear layer with sharded weights."""

        def __init__(
            self,
            in_features: int,
            out_features: int,
            *,
            rngs: nnx.Rngs,
            mesh: Mesh,
        ):
            super().__init__()
            # Create weight with sharding
            self.weight = nnx.Param(
                nnx.initializers.lecun_normal()(rngs.params(), (in_features, out_features))
            )
            # Apply sharding. The page puts the Param itself; today only arrays are put.
            self.weight[...] = jax.device_put(
                self.weight[...], NamedSharding(mesh, P(None, "model"))
            )
            # Create bias with sharding
            self.bias = nnx.Param(jnp.zeros(out_features))
            self.bias[...] = jax.device_put(self.bias[...], NamedSharding(mesh, P("model")))

        def __call__(self, x: jax.Array) -> jax.Array:
            # Computation automatically distributed
            return x @ self.weight + self.bias

    theirs = ShardedLinear(6, 8, rngs=nnx.Rngs(0), mesh=mesh)
    ours = jaxcoll.ShardedLinear(6, 8, rngs=nnx.Rngs(0), mesh=mesh)
    x = np.random.default_rng(0).normal(size=(4, 6))
    for layer in (theirs, ours):
        assert layer.weight[...].sharding.is_equivalent_to(weight_sharding, 2)
        assert layer.bias[...].sharding.is_equivalent_to(bias_sharding, 1)
    # Artifex's weight has JAX's default dtype, here float64; ours has float32, as Flax's layers do.
    theirs.weight[...] = ours.weight[...].astype(jnp.float64)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sharded_linear_trains_as_an_unsharded_layer(size: int):
    mesh = jaxcoll.make_mesh({"data": 8 // size, "model": size})
    sharded = jaxcoll.ShardedLinear(6, 8, rngs=nnx.Rngs(0), mesh=mesh)
    plain: Any = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
    for layer in (sharded, plain):
        wide = jax.tree.map(lambda p: p.astype(jnp.float64), nnx.state(layer, nnx.Param))
        nnx.update(layer, wide)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 6)), rng.normal(size=(8, 8))

    def loss_fn(layer: Any, x: Any, y: Any) -> Any:
        return jnp.mean((layer(x) - y) ** 2)

    @nnx.jit
    def step(layer: Any, x: Any, y: Any) -> Any:
        grads = nnx.grad(loss_fn)(layer, x, y)
        return jax.tree.map(lambda p, g: p - 0.3 * g, nnx.state(layer, nnx.Param), grads)

    for _ in range(4):
        for layer in (sharded, plain):
            nnx.update(layer, step(layer, x, y))
    np.testing.assert_allclose(sharded.weight[...], plain.kernel[...], rtol=0, atol=1e-10)
    np.testing.assert_allclose(sharded.bias[...], plain.bias[...], rtol=0, atol=1e-10)
    assert sharded.weight[...].addressable_shards[0].data.shape == (6, 8 // size)


# ---- Planned features ----------------------------------------------------------------------------

PLAIN = SimpleClassifier(num_classes=4, hidden=16)


def trained(model: Any, size: int) -> tuple[Any, Any]:
    """Returns the state after some steps, and the parameters after as many on one device."""
    data, mesh = batch(), jaxcoll.make_mesh({"data": size}, allow_unused=True)
    state = start(model, data, mesh)
    expected, _ = reference(PLAIN, jax.device_get(state.params), data)
    state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
    return state, expected


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_fsdp_style_parameter_sharding(size: int):
    """Full parameter sharding across devices."""
    state, expected = trained(fully_shard(PLAIN, min_weight_size=1), size)
    assert_trained_as(state.params, expected)
    for leaf in jax.tree.leaves(state.params):
        parts = size if leaf.size % size == 0 else 1  # 8 devices can't share 4 values
        assert leaf.addressable_shards[0].data.size == leaf.size // parts


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_gradient_only_sharding(size: int):
    """ZeRO-2: only optimizer states and gradients are sharded."""
    model = fully_shard(PLAIN, stage=2, min_weight_size=1)
    data, mesh = batch(), jaxcoll.make_mesh({"data": size}, allow_unused=True)
    optimizer = optax.sgd(0.3, momentum=0.9)
    state = start(model, data, mesh, optimizer)
    expected, _ = reference(PLAIN, jax.device_get(state.params), data, optimizer)
    step = data_parallel_train_step(model)
    specs = state.specs
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
    operations = {row.op for row in jaxcoll.explain(mapped, state, data).rows if row.bytes > 100}
    assert operations == ({"reduce_scatter", "all_gather"} if size > 1 else operations)
    state, _ = train(step, state, data, mesh, specs)
    assert_trained_as(state.params, expected)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.params))
    momentum = state.opt_state[0].trace["hidden_layer"]["kernel"]
    assert momentum.addressable_shards[0].data.size == 16 * 16 // size


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_automatic_resharding(size: int):
    """Gathered for computing, scattered after it, and moved between layouts on request."""
    state, expected = trained(fully_shard(PLAIN, min_weight_size=1), size)
    whole = reshard(state.params, P())
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(whole))
    assert_trained_as(whole, expected)
    back = reshard(whole, state.specs.params)
    assert jax.tree.map(lambda a: a.sharding, back) == jax.tree.map(
        lambda a: a.sharding, state.params
    )
    assert_trained_as(back, expected)


def test_memory_efficient_training():
    """A model's state that needs 1/8 of the memory on each of 8 devices."""
    data, mesh = (np.zeros((8, 256)), np.zeros(8, int)), jaxcoll.make_mesh({"data": 8})
    model = SimpleClassifier(num_classes=8, hidden=2048)

    def bytes_of(model: Any) -> int:
        state = start(model, data, mesh, optax.adam(0.1))
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))

    assert bytes_of(fully_shard(model)) < bytes_of(model) / 7.5

"""Every block of DistJax's page, in its order."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import shard_map
from training import STEPS, assert_trained_as, batch, reference

import jaxcoll

# The page's are `DistJax.parallelism.data_parallel`, `DistJax.models.simple_classifier` and so on.
from jaxcoll import (
    TPAsyncDense,
    TPDense,
    create_train_state,
    data_parallel_train_step,
    pipeline_parallel_train_step,
)
from jaxcoll.models import PPClassifier, SimpleClassifier, TPClassifier

# The page takes both names from `jax.experimental.maps`, which JAX has no more.
from jax.sharding import Mesh, PartitionSpec as P  # isort: skip


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def test_device_mesh():
    num_devices = 8
    # Today's meshes are of devices; the page has their numbers, np.arange(num_devices).
    devices = np.array(jax.devices())

    # Create a 1D mesh for data parallelism
    dp_mesh = Mesh(devices.reshape(num_devices), ("data",))

    # Create a 2D mesh for data and tensor parallelism
    tp_mesh = Mesh(devices.reshape(4, 2), ("data", "tensor"))

    assert dict(dp_mesh.shape) == {"data": 8}
    assert dict(tp_mesh.shape) == {"data": 4, "tensor": 2}


def test_sharding():
    tp_mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    # Replicate the weights across the 'data' axis
    replicated = P()

    # Shard the weights along the 'tensor' axis
    sharded = P(
        "tensor",
    )

    w = np.arange(12.0).reshape(4, 3)
    for spec, shape in ((replicated, (4, 3)), (sharded, (2, 3))):
        placed = jax.device_put(w, jax.NamedSharding(tp_mesh, spec))
        assert {shard.data.shape for shard in placed.addressable_shards} == {shape}
        np.testing.assert_array_equal(placed, w)


def digits_of_ten() -> Any:
    inputs, labels = batch()
    return inputs, labels % 10


def run(mapped_step: Any, state: Any, data: Any) -> Any:
    step = jax.jit(mapped_step)
    metrics: Any = {}
    for _ in range(STEPS):
        state, metrics = step(state, data)
    assert set(metrics) == {"loss", "accuracy"}
    return state


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_data_parallelism(size: int):
    dp_mesh = Mesh(np.array(jax.devices()[:size]), ("data",))

    # Define your model
    model = SimpleClassifier(num_classes=10)

    # Create a data-parallel training step
    train_step = data_parallel_train_step(model)

    # Run the training step on sharded data. The page splits the state, too, which every device
    # needs whole: P().
    sharded_train_step = shard_map(
        train_step, mesh=dp_mesh, in_specs=(P(), P("data")), out_specs=P()
    )

    data = digits_of_ten()
    state = create_train_state(model, optax.sgd(0.5), jax.random.key(0), data)
    expected, _ = reference(model, state.params, data)
    assert_trained_as(run(sharded_train_step, state, data).params, expected)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_tensor_parallelism(size: int):
    tp_mesh = Mesh(np.array(jax.devices()).reshape(8 // size, size), ("data", "tensor"))

    # Synchronous tensor-parallel dense layer
    dense_layer = TPDense(
        features=1024,
        kernel_init=jax.nn.initializers.glorot_normal(),
        mesh=tp_mesh,
    )

    # Asynchronous tensor-parallel dense layer
    async_dense_layer = TPAsyncDense(
        features=1024,
        kernel_init=jax.nn.initializers.glorot_normal(),
        mesh=tp_mesh,
    )

    x = np.random.default_rng(0).normal(size=(8, 16))
    plain = nn.Dense(1024, kernel_init=jax.nn.initializers.glorot_normal())
    variables = plain.init(jax.random.key(0), x)
    for layer in (dense_layer, async_dense_layer):
        its_variables = nn.unbox(jax.jit(layer.init)(jax.random.key(0), x))
        jax.tree.map(np.testing.assert_array_equal, its_variables, variables)
        y = jax.jit(layer.apply)(its_variables, x)
        alone: Any = plain.apply(variables, x)
        np.testing.assert_allclose(y, alone, rtol=0, atol=1e-10)
        ops = {row.op for row in jaxcoll.explain(layer.apply, its_variables, x).rows}
        assert ops == {"all_gather_matmul" if layer is async_dense_layer else "all_gather"}


@pytest.mark.slow
@pytest.mark.product(overlap=(False, True), size=(1, 2, 4, 8))
def test_training_in_tensor_parallel(size: int, overlap: bool):
    """The page names a TPClassifier's strategy, and shows no training."""
    tp_mesh = Mesh(np.array(jax.devices()).reshape(8 // size, size), ("data", "tensor"))
    model = TPClassifier(num_classes=10, mesh=tp_mesh, overlap=overlap)
    data = digits_of_ten()
    state = create_train_state(model, optax.sgd(0.5), jax.random.key(0), data, tp_mesh)
    plain = SimpleClassifier(num_classes=10)
    expected, _ = reference(plain, jax.device_get(state.params), data)
    mapped = shard_map(
        data_parallel_train_step(model),
        mesh=tp_mesh,
        in_specs=(state.specs, P("data")),
        out_specs=(state.specs, P()),
    )
    assert_trained_as(run(mapped, state, data).params, expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_pipeline_parallelism(size: int):
    pp_mesh = Mesh(np.array(jax.devices()).reshape(8 // size, size), ("data", "pipe"))
    data = digits_of_ten()
    data = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf[:16]]), data)

    # Define your model
    model = PPClassifier(num_classes=10, num_layers=4)

    # Create a pipeline-parallel training step
    train_step = pipeline_parallel_train_step(model, num_micro_batches=4)

    # Run the training step. Layers are spread over "pipe", so that the state has specs of its own,
    # where the page splits all of it over "data".
    state = create_train_state(model, optax.sgd(0.5), jax.random.key(0), data, pp_mesh)
    sharded_train_step = shard_map(
        train_step,
        mesh=pp_mesh,
        in_specs=(state.specs, P("data")),
        out_specs=(state.specs, P()),
    )

    expected, _ = reference(model, jax.device_get(state.params), data)
    state = run(sharded_train_step, state, data)
    assert_trained_as(state.params, expected)
    assert state.params["kernel"].addressable_shards[0].data.shape == (4 // size, 64, 64)


def test_pipeline_parallelism_on_eight_stages():
    pp_mesh = Mesh(np.array(jax.devices()).reshape(1, 8), ("data", "pipe"))
    model = PPClassifier(num_classes=10, num_layers=8)
    data = digits_of_ten()
    state = create_train_state(model, optax.sgd(0.5), jax.random.key(0), data, pp_mesh)
    expected, _ = reference(model, jax.device_get(state.params), data)
    mapped = shard_map(
        pipeline_parallel_train_step(model, num_micro_batches=4),
        mesh=pp_mesh,
        in_specs=(state.specs, P("data")),
        out_specs=(state.specs, P()),
    )
    assert_trained_as(run(mapped, state, data).params, expected)


def test_weights_have_their_global_shape():
    """For every grid, and for both ways of communicating: one checkpoint serves them all."""
    data = digits_of_ten()
    shapes = set()
    for size in (1, 2, 4, 8):
        mesh = Mesh(np.array(jax.devices()).reshape(8 // size, size), ("data", "tensor"))
        for overlap in (False, True):
            model = TPClassifier(num_classes=10, mesh=mesh, overlap=overlap)
            state = create_train_state(model, optax.sgd(0.5), jax.random.key(0), data, mesh)
            first = state.params["hidden_layer"]["kernel"]
            shapes.add((jnp.shape(first), float(first[0, 0])))
    assert len(shapes) == 1

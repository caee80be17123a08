"""`DataParallel`: placement and gradients, by the instance and by its static twins."""

import inspect
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import mapped, mesh
from flax import nnx

import jaxcoll
from jaxcoll import DataParallel, DeviceMeshManager

METHODS = (
    "create_data_parallel_sharding",
    "shard_batch",
    "shard_model_state",
    "all_reduce_gradients",
    "replicate_params",
)


def of(where: str, name: str) -> Any:
    """Returns a method: of an instance, or its static twin."""
    return (
        getattr(DataParallel(), name)
        if where == "instance"
        else getattr(DataParallel, f"{name}_static")
    )


@pytest.mark.parametrize("name", METHODS)
def test_twins_have_one_signature(name: str):
    assert inspect.signature(of("instance", name)) == inspect.signature(of("static", name))


def test_it_is_an_nnx_module():
    assert isinstance(DataParallel(), nnx.Module)
    assert jax.tree.leaves(nnx.state(DataParallel())) == []


each = pytest.mark.parametrize("where", ["instance", "static"])


@each
def test_a_batch_is_split(where: str):
    over = DeviceMeshManager().create_data_parallel_mesh()
    sharding = of(where, "create_data_parallel_sharding")(over)
    assert sharding.spec == jax.P("data")
    batch = {"inputs": np.arange(32.0).reshape(16, 2), "targets": np.arange(16)}
    sharded = of(where, "shard_batch")(batch, sharding)
    for name, leaf in sharded.items():
        np.testing.assert_array_equal(leaf, batch[name])
        assert [len(shard.data) for shard in leaf.addressable_shards] == [2] * 8


@each
def test_bad_batches(where: str):
    sharding = of(where, "create_data_parallel_sharding")(mesh(3), "x")
    shard_batch = of(where, "shard_batch")
    with pytest.raises(ValueError, match=r"shard_batch: \['a'\]\[1\]: dimension 0 of shape \(4,\)"):
        shard_batch({"a": [np.ones(3), np.ones(4)]}, sharding)
    with pytest.raises(ValueError, match=r"Make it a multiple of 3: drop 1 or pad 2\.$"):
        shard_batch({"a": np.ones(4)}, sharding)
    with pytest.raises(ValueError, match=r"Make it a multiple of 3: pad 1\.$"):
        shard_batch({"a": np.ones(2)}, sharding)
    with pytest.raises(ValueError, match=r"\['a'\]: .*shape \(\). Shorten it, or replicate"):
        shard_batch({"a": 1.0}, sharding)
    with pytest.raises(
        ValueError, match=r"data_axis: 'dat' is not an axis.*\"data\".*Did you mean"
    ):
        of(where, "create_data_parallel_sharding")(jaxcoll.make_mesh({"data": 8}), "dat")


@each
def test_model_state(where: str, caplog: pytest.LogCaptureFixture):
    """Scalars and leaves that can't be split are replicated, and named."""
    over = jaxcoll.make_mesh({"data": 4, "model": 2})
    params = {"w": np.ones((6, 8)), "b": np.ones(3), "wide": np.ones((8, 8))}
    state = {"params": params, "adam": optax.adam(1.0).init(params)}
    replicated = of(where, "shard_model_state")(state, over)
    for leaf in jax.tree.leaves(replicated):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.devices()) == 8
    with caplog.at_level(logging.INFO, "jaxcoll"):
        sharded = of(where, "shard_model_state")(state, over, "shard")
    assert jax.tree.map(np.shape, sharded) == jax.tree.map(np.shape, state)
    assert sharded["params"]["w"].sharding.spec == jax.P(None, "data")
    assert sharded["params"]["wide"].sharding.spec == jax.P(None, "data")
    assert sharded["params"]["b"].sharding.spec == jax.P()
    assert sharded["adam"][0].count.sharding.spec == jax.P()
    assert sharded["adam"][0].mu["w"].sharding.spec == jax.P(None, "data")
    (text,) = caplog.messages
    assert "['params']['b']" in text
    assert ".count" in text
    assert "['w']" not in text
    with pytest.raises(ValueError, match='expected one of "replicate", "shard", got \'split\''):
        of(where, "shard_model_state")(state, over, "split")


@each
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_gradients(where: str, size: int):
    xs = 3 * np.arange(size * 2.0).reshape(size, 2)

    def both(x: Any) -> Any:
        tree = {"a": x, "b": [x[0]]}
        reduce = of(where, "all_reduce_gradients")
        return reduce(tree, axis_name="x"), reduce(tree, "sum", "x")

    mean, total = jax.jit(mapped(both, mesh(size)))(xs)
    np.testing.assert_array_equal(mean["a"], np.broadcast_to(xs.mean(0), xs.shape))
    np.testing.assert_array_equal(total["b"][0], [xs[:, 0].sum()] * size)


@each
def test_gradients_on_the_default_axis(where: str):
    f = jax.pmap(of(where, "all_reduce_gradients"), axis_name="batch")
    np.testing.assert_array_equal(f(jnp.arange(8.0)), [3.5] * 8)


@each
def test_bad_gradients(where: str):
    reduce = of(where, "all_reduce_gradients")
    with pytest.raises(ValueError, match='reduce_type: expected one of "mean", "sum", got \'max\''):
        reduce({}, "max")
    text = r'^all_reduce_gradients: .*"batch" is not .* here.*mapped here: "x".* as axis_name'
    with pytest.raises(NameError, match=text):
        jax.jit(mapped(reduce, mesh(2)))(np.ones((2, 3)))
    with pytest.raises(NameError, match='axis_name: "batch" is not a mapped axis'):
        reduce(jnp.ones(3))


@each
def test_replicas(where: str):
    params = of(where, "replicate_params")({"w": np.ones(3), "n": 1}, mesh(4))
    for leaf in jax.tree.leaves(params):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.devices()) == 4

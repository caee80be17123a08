"""NNX modules that are made where the state is, from a function: no device holds a whole parameter.

A module itself is made whole by its constructor, before anything can split it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from training import batch, mesh_of, start, train

import jaxcoll.nnx
from jaxcoll import ParallelPlan, create_train_state, data_parallel_train_step, fully_shard
from jaxcoll.models import SimpleClassifier

WIDE, DEPTH = 512, 3
WHOLE = WIDE * WIDE * 4


class InARow(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(WIDE, WIDE, use_bias=False, rngs=rngs) for _ in range(DEPTH)]
        self.layers = nnx.List(layers)

    def __call__(self, x: Any) -> Any:
        for each in self.layers:
            x = nnx.tanh(each(x))
        return x[:, :4]


class Scanned(nnx.Module):
    def __init__(self) -> None:
        @nnx.vmap
        def make(key: Any) -> nnx.Linear:
            return nnx.Linear(WIDE, WIDE, use_bias=False, rngs=nnx.Rngs(key))

        self.layers = make(jax.random.split(jax.random.key(0), DEPTH))

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: Any, one: Any) -> Any:
            return nnx.tanh(one(x))

        return run(x, self.layers)[:, :4]


def assert_same(actual: Any, expected: Any) -> None:
    """Compares two trees: compiled for other parts, a random number is rounded otherwise."""
    for got, want in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def by_plan(model: Any, data: Any) -> Any:
    return ParallelPlan({"fsdp": 8}).init(model, optax.adamw(0.1), jax.random.key(0), data)


def by_itself(model: Any, data: Any) -> Any:
    sharded = fully_shard(model)
    return create_train_state(sharded, optax.adamw(0.1), jax.random.key(0), data, mesh_of(data=8))


@pytest.mark.slow
@pytest.mark.product(made=(by_itself, by_plan), make=(InARow, Scanned))
def test_no_device_makes_a_whole_parameter(make: Any, made: Callable[..., Any]):
    data = (np.zeros((8, WIDE), np.float32), np.zeros(8, np.int32))

    def traced() -> Any:
        """Makes the module where nothing is computed yet, but a program is written."""
        module = make()
        leaves = jax.tree.leaves(nnx.state(module))
        assert all(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        return module

    state = made(traced, data)
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        assert leaf.size == 1 or leaf.addressable_shards[0].data.size == leaf.size // 8
    compiled = jax.jit(lambda: made(traced, data)).lower().compile()
    assert f"{WIDE},{WIDE}]" not in str(compiled.as_text())
    needs: Any = compiled.memory_analysis()
    assert needs.output_size_in_bytes < 1.1 * 3 * DEPTH * WHOLE / 8
    # One whole layer, or the whole stack, would be more than that.
    assert needs.temp_size_in_bytes < (WHOLE if make is InARow else DEPTH * WHOLE)
    expected = made(make(), data)
    assert_same(state.params, expected.params)
    assert state.specs.params == expected.specs.params


class Everything(nnx.Module):
    """Layers that keep statistics and keys, one of them twice."""

    def __init__(self, mesh: Any = None) -> None:
        rngs = nnx.Rngs(0)
        split = {"mesh": mesh, "axis_name": "tensor" if mesh else None, "rngs": rngs}
        self.mlp = jaxcoll.nnx.TPMLP(16, 48, **split)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.Linear(16, 16, rngs=rngs)
        self.again = self.dense
        # Other ones in each module that is made.
        self.activation = lambda x: nnx.tanh(x)
        self.scale = nnx.Param(jnp.ones(16), init=lambda: 1)

    def __call__(self, x: Any) -> Any:
        x = x + self.dropout(self.norm(self.mlp(x)))
        return self.again(self.activation(self.scale[...] * self.dense(x)))[:, :4]


@pytest.mark.slow
@pytest.mark.product(is_sharded=(False, True), sizes=({"data": 4}, {"data": 2, "tensor": 2}))
def test_trains_as_the_module(sizes: dict[str, int], is_sharded: bool):
    """What is split, statistics, dropout and all values are those of the module itself."""
    data, mesh = batch(), mesh_of(**sizes)
    axis = mesh if "tensor" in sizes else None
    results: list[Any] = []
    for model in (Everything(axis), lambda: Everything(axis)):
        used = fully_shard(model, min_weight_size=16) if is_sharded else model
        state = start(used, data, mesh)
        results.append(
            (state, train(data_parallel_train_step(used), state, data, mesh, state.specs))
        )
    (first, expected), (made, actual) = results
    assert jax.tree.leaves(made.specs) == jax.tree.leaves(first.specs)
    assert made.axes == first.axes == (("tensor",) if axis else ())
    assert made.kind == "NNX Everything"
    assert_same((made.params, made.variables), (first.params, first.variables))
    assert_same(
        (actual[0].params, actual[0].variables), (expected[0].params, expected[0].variables)
    )
    for seen, wanted in zip(actual[1], expected[1], strict=True):
        assert seen == pytest.approx(wanted, rel=1e-5)


def test_metadata_without_a_mesh_around():
    """The mesh that is given counts, also where Flax would want one around the call."""

    def make() -> nnx.Module:
        init = nnx.with_partitioning(nnx.initializers.ones, (None, "tensor"))
        return nnx.Linear(16, 6, kernel_init=init, rngs=nnx.Rngs(0))

    state = start(make, batch(), mesh_of(data=2, tensor=2))
    assert state.params["kernel"].sharding.spec == jax.P(None, "tensor")
    assert nnx.using_eager_sharding()


def test_on_one_device_and_back_in_a_module():
    data = (np.ones((4, WIDE), np.float32), np.zeros(4, np.int32))
    state = create_train_state(InARow, optax.sgd(0.1), jax.random.key(0), data)
    module = nnx.eval_shape(InARow)
    nnx.update(module, state.params)
    np.testing.assert_array_equal(module(data[0]), InARow()(data[0]))


def test_errors():
    data, module, rngs = batch(), InARow(), nnx.Rngs(0)

    class Needs(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(16, 4, rngs=rngs)

    with pytest.raises(
        TypeError, match=r"fully_shard: model: expected a function without arg.* as lambda: Model"
    ):
        fully_shard(Needs)
    with pytest.raises(TypeError, match=r"without arguments.* got Needs .*missing.* 'rngs'"):
        start(Needs, data)
    with pytest.raises(TypeError, match=r"create_train_state: .* <lambda> returned int\."):
        start(lambda: 3, data)
    with pytest.raises(TypeError, match=r"returned SimpleClassifier\. Pass a linen module.*itself"):
        start(lambda: SimpleClassifier(num_classes=4), data)
    with pytest.raises(
        ValueError,
        match=r"made no new module: its parameter \['layers'\].*float32\[512, 512\], was there",
    ):
        fully_shard(lambda: module)
    with pytest.raises(Exception, match="Cannot mutate RngCount"):  # what Flax says
        fully_shard(lambda: Needs(rngs))
    with pytest.raises(TypeError, match="a function that makes an NNX module, or a pair"):
        fully_shard(3)

    class Named(nnx.Module):
        def __init__(self) -> None:
            value = jnp.ones((16, 4))
            self.w = nnx.Param(value, out_sharding=(None, "embed"))

    with pytest.raises(ValueError, match=r"params\['w'\].*: names: 'embed' is not an axis"):
        start(Named, data, mesh_of(data=2))
    stacked = nnx.vmap(lambda _: Named(), axis_size=3)  # which tells the metadata nothing
    text = r"params\['w'\].* \(3, 16, 4\): its out_sharding, .*'embed'.*nnx.PARTITION_NAME: None}"
    with pytest.raises(ValueError, match=text):
        start(lambda: stacked(None), data, mesh_of(data=2))

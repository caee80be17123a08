"""Linen modules that hold NNX ones, and the other way round."""

from typing import Any

import flax.linen as nn
import jax
import optax
import pytest
from flax import nnx
from flax.nnx import bridge
from training import batch

from jaxcoll import create_train_state, data_parallel_train_step, fully_shard


class OfLinen(nn.Module):
    head: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.head(x)


class OfNNX(nnx.Module):
    def __init__(self, head: Any):
        self.layers = nnx.List([head]) if hasattr(nnx, "List") else [head]

    def __call__(self, x: Any) -> Any:
        return self.layers[0](x)


def of_nnx() -> nnx.Module:
    return nnx.Linear(16, 4, rngs=nnx.Rngs(0))


MIXED = {
    "linen": (lambda: OfLinen(of_nnx()), r"OfLinen\.head: .* NNX module Linear.*ToLinen"),
    "inner": (lambda: OfLinen(OfLinen(of_nnx())), r"OfLinen\.head\.head: .*NNX module Linear"),
    "NNX": (lambda: OfNNX(nn.Dense(4)), r"OfNNX\..*: .* linen module Dense.*ToNNX"),
    "made": (lambda: lambda: OfNNX(nn.Dense(4)), r"OfNNX\..*: .* linen module Dense"),
}


@pytest.mark.parametrize("kind", MIXED)
def test_it_is_refused(kind: str):
    make, text = MIXED[kind]
    for call in (
        lambda model: create_train_state(model, optax.sgd(0.1), jax.random.key(0), batch()),
        lambda model: data_parallel_train_step(model),
        lambda model: fully_shard(model),
    ):
        with pytest.raises(TypeError, match=text):
            call(make())


class SetUp(nn.Module):
    """Holds a module from its first call on."""

    def setup(self) -> None:
        self.heads = [of_nnx()]

    def __call__(self, x: Any) -> Any:
        return self.heads[0](x)


class Around(nn.Module):
    """Makes a module in its call."""

    make: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.make()(x)


LATE = {
    "set up": (SetUp(), r"SetUp\.heads: .* NNX module Linear.*ToLinen"),
    "set up in a call": (Around(SetUp), r"Around\.SetUp_0\.heads: .* NNX module Linear"),
    "held by what a call makes": (
        Around(lambda: OfLinen(of_nnx())),
        r"Around\.OfLinen_0\.head: .* NNX module Linear",
    ),
}


@pytest.mark.parametrize("kind", LATE)
def test_it_is_refused_where_the_model_runs(kind: str):
    model, text = LATE[kind]
    with pytest.raises(TypeError, match=f"^create_train_state: model: {text}"):
        create_train_state(model, optax.sgd(0.1), jax.random.key(0), batch())


def test_bridges_are_not():
    def count(model: Any) -> int:
        state = create_train_state(model, optax.sgd(0.1), jax.random.key(0), batch())
        return sum(leaf.size for leaf in jax.tree.leaves(state.params))

    inputs = batch()[0]
    features = inputs.shape[-1]
    linear = bridge.ToLinen(nnx.Linear, args=(features, 4))
    expected = features * 4 + 4
    assert count(OfLinen(linear)) == expected
    dense = bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0)).lazy_init(inputs)
    assert count(OfNNX(dense)) == expected

"""Training with tensor-parallel layers: the parameters of training on one device, leaf by leaf."""

import dataclasses
import functools as ft
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import SIZES
from training import assert_copies_are_equal, assert_trained_as, mesh_of, reference, train

import jaxcoll
from jaxcoll.models import TransformerLM, transformer

HEADS, WIDTH, VOCABULARY, LENGTH = 24, 48, 48, 24
OPTIONS = {
    "sync": {},
    "sequence": {"sequence_parallel": True},
    "async": {"sequence_parallel": True, "overlap": True},
}


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def language_model(**options: Any) -> TransformerLM:
    return TransformerLM(
        VOCABULARY, 1, WIDTH, HEADS, mlp_ratio=1, param_dtype=np.float64, **options
    )


PLAIN = language_model()


@ft.cache
def first_params() -> Any:
    with jax.enable_x64(True):
        tokens = np.zeros((1, LENGTH), int)
        return jax.device_get(jax.jit(PLAIN.init)(jax.random.key(3), tokens)["params"])


class NNXModel(nnx.Module):
    """`language_model` of NNX's layers, with the same names; its one block is not stacked."""

    def __init__(self, mesh: Any, **options: Any):
        options |= {"mesh": mesh, "param_dtype": np.float64, "rngs": nnx.Rngs(0)}
        norms = {name: options[name] for name in ("param_dtype", "rngs", "mesh")}
        norms["axis_name"] = "tensor" if options.get("sequence_parallel") else None
        self.embed = jaxcoll.nnx.VocabParallelEmbed(VOCABULARY, WIDTH, **options)
        self.blocks = nnx.Module()
        self.blocks.attention_norm = jaxcoll.nnx.TPRMSNorm(WIDTH, **norms)
        self.blocks.attention = jaxcoll.nnx.TPAttention(
            WIDTH, HEADS, is_causal=True, rotate=transformer._rotate, use_bias=False, **options
        )
        self.blocks.mlp_norm = jaxcoll.nnx.TPRMSNorm(WIDTH, **norms)
        self.blocks.mlp = jaxcoll.nnx.TPMLP(
            WIDTH, WIDTH, activation=transformer._squared_relu, use_bias=False, **options
        )
        self.final_norm = jaxcoll.nnx.TPRMSNorm(WIDTH, **norms)

    def __call__(self, tokens: Any) -> Any:
        x, block = self.embed(tokens), self.blocks
        x += block.attention(block.attention_norm(x))
        x += block.mlp(block.mlp_norm(x))
        return self.embed.attend(self.final_norm(x))


def tokens(batch: int = 4) -> Any:
    windows = np.random.default_rng(0).integers(0, VOCABULARY, (batch, LENGTH + 1))
    return windows[:, :-1], windows[:, 1:]


def loss(logits: Any, batch: Any) -> Any:
    return jaxcoll.vocab_parallel_cross_entropy(logits, batch[1]).mean()


def start(library: str, mesh: Any, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """Returns a model and its state, with `first_params`."""
    if library == "linen":
        model: Any = language_model(axis_name="tensor", mesh=mesh, **options)
    else:
        model = NNXModel(mesh, **options)
    key = jax.random.key(3)
    state = jaxcoll.create_train_state(model, optimizer, key, tokens(), mesh)
    leaves, treedef = jax.tree.flatten(state.params)
    values = jax.tree.leaves(first_params())
    placed = [
        jax.device_put(value.reshape(leaf.shape), leaf.sharding)
        for value, leaf in zip(values, leaves, strict=True)
    ]
    return model, dataclasses.replace(state, params=treedef.unflatten(placed))


@ft.cache
def expected(clips: bool) -> Any:
    with jax.enable_x64(True):
        return reference(PLAIN, first_params(), tokens(), optimizer(optax, clips))


def optimizer(library: Any, clips: bool) -> Any:
    """SGD, perhaps of gradients that are clipped to less than they are."""
    return optax.chain(library.clip_by_global_norm(0.05), optax.sgd(0.5)) if clips else SGD


SGD = optax.sgd(0.5)


@pytest.mark.slow("size")
@pytest.mark.product(
    library=("linen", "nnx"), options=list(OPTIONS), size=SIZES, clips=(False, True)
)
def test_trains_as_on_one_device(library: str, options: str, size: int, clips: bool):
    mesh = mesh_of(data=2 if size < 8 else 1, tensor=size)
    model, state = start(library, mesh, optimizer(jaxcoll, clips), **OPTIONS[options])
    step = jaxcoll.data_parallel_train_step(model, loss_fn=loss)
    state, metrics = train(step, state, tokens(), mesh, state.specs)
    params, losses = expected(clips)
    wanted = zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True)
    assert_trained_as(state.params, [want.reshape(leaf.shape) for want, leaf in wanted])
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-10)
    assert_copies_are_equal(state.params)

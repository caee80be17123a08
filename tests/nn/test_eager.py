"""Tensor-parallel layers on global arrays without `jax.jit`: compiled once, not at each call."""

import logging
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from training import mesh_of

import jaxcoll
from jaxcoll.nn import _place

X = np.ones((4, 8, 16), np.float32)


def linen() -> Any:
    """Returns a layer's result and its gradients; the layer is made anew, as in a linen model."""
    layer = jaxcoll.TPAttention(4, num_kv_heads=1, mesh=mesh_of(data=2, tensor=4))
    params = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), X))
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), params)
    return jax.value_and_grad(lambda params: layer.apply(params, X).sum())(ones)


def of_nnx() -> Any:
    layer = jaxcoll.nnx.RowParallelDense(
        16, 16, rngs=nnx.Rngs(0), mesh=mesh_of(data=2, tensor=4), sequence_parallel=True
    )
    return nnx.value_and_grad(lambda layer, x: layer(x).sum())(layer, X)


def vocabulary() -> Any:
    mesh, tokens = mesh_of(data=2, tensor=4), np.zeros((4, 8), int)
    embed = jaxcoll.VocabParallelEmbed(16, 16, mesh=mesh)
    table = {"params": {"embedding": np.ones((16, 16), np.float32)}}
    logits = embed.apply(table, embed.apply(table, tokens), method="attend")
    return jaxcoll.vocab_parallel_cross_entropy(logits, tokens, mesh=mesh)


@pytest.mark.parametrize("calls", [linen, of_nnx, vocabulary])
def test_the_second_call_compiles_nothing(calls: Any, caplog: pytest.LogCaptureFixture):
    want = jax.tree.leaves(calls())
    cached = _place._compiled_on_mesh._cache_size()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        got = jax.tree.leaves(calls())
    compiled = [record.message for record in caplog.records if "Compiling" in record.message]
    assert not compiled
    assert _place._compiled_on_mesh._cache_size() == cached
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)

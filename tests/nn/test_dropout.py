"""Randomness of tensor-parallel layers: equal where ranks have the same, different where not."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from training import mesh_of

import jaxcoll
from jaxcoll.models import TransformerLM

SIZE = 4
RATE = 0.5


def dropped(library: str, key: Any, x: Any, **options: Any) -> Any:
    """Returns what a dropout leaves of ones."""
    if library == "linen":
        layer = jaxcoll.TPDropout(RATE, **options)
        return layer.apply({}, x, deterministic=False, rngs={"dropout": key})
    layer = jaxcoll.nnx.TPDropout(RATE, rngs=nnx.Rngs(dropout=key), **options)
    return layer(x)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_ranks_drop_their_own_or_the_same(library: str):
    """Of four ranks' ones, which all have alike."""

    def on_rank(x: Any) -> Any:
        key = jax.random.key(0)
        own = dropped(library, key, x)
        again = dropped(library, key, x)
        same = dropped(library, key, x, axis_name=None)
        # Typed as the same on all ranks, which the map checks.
        return own[None], again[None], same

    mapped = jax.shard_map(
        on_rank,
        mesh=mesh_of(tensor=SIZE),
        in_specs=jax.P(),
        out_specs=(jax.P("tensor"), jax.P("tensor"), jax.P()),
    )
    own, again, same = jax.jit(mapped)(np.ones((8, 8), np.float32))
    np.testing.assert_array_equal(own, again)
    assert len({np.asarray(mask).tobytes() for mask in own}) == SIZE
    for mask in (*own, same):
        assert set(np.unique(mask)) == {0.0, 1 / (1 - RATE)}


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_without_a_map_it_is_flax_s(library: str):
    x = np.ones((8, 8), np.float32)
    assert 0 < float((dropped(library, jax.random.key(0), x) == 0).mean()) < 1
    if library == "linen":
        still = jaxcoll.TPDropout(RATE).apply({}, x)
    else:
        still = jaxcoll.nnx.TPDropout(RATE, rngs=nnx.Rngs(0))(x, deterministic=True)
    np.testing.assert_array_equal(still, x)


def branches(**options: Any) -> tuple[Any, Any]:
    """Returns an MLP with dropout of either library; linear, so that zeros are seen."""
    given: Any = {"dropout": RATE, "use_bias": False, "activation": lambda x: x, **options}
    linen = jaxcoll.TPMLP(8, kernel_init=nn.initializers.ones, **given)
    of_nnx = jaxcoll.nnx.TPMLP(1, 8, rngs=nnx.Rngs(0), kernel_init=nn.initializers.ones, **given)
    return linen, of_nnx


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_hidden_features_are_dropped_by_their_rank(library: str):
    """The sum over all hidden features is a number that a rank's mask, repeated, could not give."""
    mesh = mesh_of(tensor=SIZE)
    linen, of_nnx = branches(mesh=mesh)
    x = np.ones((64, 1), np.float32)

    def on_rank(x: Any) -> Any:
        if library == "linen":
            variables = nn.unbox(linen.init(jax.random.key(0), x))
            rngs = {"dropout": jax.random.key(1)}
            return linen.apply(variables, x, deterministic=False, rngs=rngs)
        mlp = jaxcoll.nnx.TPMLP(
            1, 8, rngs=nnx.Rngs(0), kernel_init=nn.initializers.ones, dropout=RATE,
            use_bias=False, activation=lambda x: x,
        )  # fmt: skip
        return mlp(x)

    y = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=jax.P(), out_specs=jax.P()))(x)
    kept = np.asarray(y)[:, 0] * (1 - RATE)
    # Two features a rank: with one mask on all ranks, only multiples of SIZE.
    assert set(kept.tolist()) - set(range(0, 9, SIZE))
    assert set(kept.tolist()) <= set(range(9))
    if library == "nnx":
        whole = np.asarray(of_nnx(x, deterministic=True))
        np.testing.assert_array_equal(whole, np.full((64, 1), 8.0))


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_attention_drops_weights(library: str):
    """Of one head a rank, all with the same inputs, each rank drops others."""
    mesh = mesh_of(tensor=SIZE)
    x = np.random.default_rng(0).normal(size=(1, 6, 8)).astype(np.float32)
    options: Any = {"dropout": RATE, "is_causal": True, "use_bias": False}

    def on_rank(x: Any) -> Any:
        if library == "linen":
            layer = jaxcoll.TPAttention(SIZE, **options)
            variables = nn.unbox(layer.init(jax.random.key(0), x))

            def apply(key: Any, **more: Any) -> Any:
                return layer.apply(variables, x, rngs={"dropout": key}, **more)
        else:

            def apply(key: Any, **more: Any) -> Any:
                rngs = nnx.Rngs(params=0, dropout=key)
                return jaxcoll.nnx.TPAttention(8, SIZE, rngs=rngs, **options)(x, **more)

        keys = jax.random.split(jax.random.key(1), 256)
        ys = jax.vmap(lambda key: apply(key, deterministic=False))(keys)
        return ys, apply(keys[0], deterministic=True)

    ys, whole = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=jax.P(), out_specs=jax.P()))(x)
    assert len({np.asarray(y).tobytes() for y in ys}) == len(ys)
    # What is left is scaled: on average nothing changes.
    np.testing.assert_allclose(np.mean(ys, axis=0), whole, atol=0.5)
    assert np.isfinite(ys).all()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_in_training(sequence_parallel: bool):
    """Replicated activations stay the same on all ranks, also where they are computed again."""
    mesh = mesh_of(tensor=2)
    model = TransformerLM(
        8, 1, 16, 2, dropout=RATE, axis_name="tensor", mesh=mesh,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 8, (2, 4))
    boxed = jax.jit(model.init)(jax.random.key(0), tokens)
    specs = nn.get_partition_spec(boxed)

    def on_rank(variables: Any, key: Any) -> Any:
        def loss(variables: Any) -> Any:
            rngs = {"dropout": key}
            logits = model.apply(variables, tokens, deterministic=False, rngs=rngs)
            return jaxcoll.vocab_parallel_cross_entropy(logits, tokens).mean()

        # Typed: a mask that differed would make the loss vary, and the map refuse it.
        return jax.value_and_grad(loss)(variables), jax.value_and_grad(jax.checkpoint(loss))(
            variables
        )

    mapped = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(specs, jax.P()),
        out_specs=((jax.P(), specs), (jax.P(), specs)),
    )
    once, again = jax.jit(mapped)(nn.unbox(boxed), jax.random.key(1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), once, again)
    other, _ = jax.jit(mapped)(nn.unbox(boxed), jax.random.key(2))
    assert float(other[0]) != float(once[0])
    assert jnp.isfinite(once[0])


def test_parts_of_a_sequence_and_layers_drop_their_own():
    """Of two ranks' positions, after each branch of two layers: no two masks are alike."""
    mesh = mesh_of(tensor=2)
    model = TransformerLM(
        8, 2, 16, 2, dropout=RATE, axis_name="tensor", mesh=mesh, sequence_parallel=True
    )
    tokens = np.zeros((1, 8), int)
    boxed = jax.jit(model.init)(jax.random.key(0), tokens)

    masks: list[bytes] = []

    def seen(call: Any, arguments: Any, keywords: Any, context: Any) -> Any:
        result = call(*arguments, **keywords)
        if isinstance(context.module, nn.Dropout):
            # The layers are in a loop, out of which nothing can be handed.
            jax.debug.callback(lambda mask: masks.append(mask.tobytes()), result == 0)
        return result

    def on_rank(variables: Any) -> Any:
        with nn.intercept_methods(seen):
            keys = {"dropout": jax.random.key(1)}
            return model.apply(variables, tokens, deterministic=False, rngs=keys)

    mapped = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(nn.get_partition_spec(boxed),),
        out_specs=jax.P(None, None, "tensor"),
    )
    jax.block_until_ready(jax.jit(mapped)(nn.unbox(boxed)))
    jax.effects_barrier()
    assert len(masks) == len(set(masks)) == 2 * 2 * 2

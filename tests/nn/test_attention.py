"""What is particular to attention: masks, half precision, and which rank drops what."""

import functools as ft
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from layers import Layer, attention, pair, pure
from training import assert_trained_as, mesh_of

import jaxcoll

LENGTH, WIDTH, HEADS = 6, 16, 4


def layer(**options: Any) -> Any:
    return jaxcoll.TPAttention(HEADS, use_bias=False, **options)


def masks() -> np.ndarray:
    """Returns masks of two sequences; of the second nothing is seen from its first position."""
    rng = np.random.default_rng(0)
    seen = rng.integers(0, 2, (2, 1, LENGTH, LENGTH)).astype(bool) | np.eye(LENGTH, dtype=bool)
    seen[1, 0, 0] = False
    return seen


@pytest.mark.product(dtype=(np.float32, np.float64), place=("map", "global"))
def test_masks(dtype: Any, place: str):
    """Of a batch, the same for all ranks; with what is unseen at least as unlikely as nothing."""
    with jax.enable_x64(dtype == np.float64):
        x = np.random.default_rng(1).normal(size=(2, LENGTH, WIDTH)).astype(dtype)
        seen, mesh = masks(), mesh_of(tensor=2)
        ours = layer(mesh=mesh, param_dtype=dtype)
        boxed = jax.jit(ours.init)(jax.random.key(0), x)
        params = nn.unbox(boxed)
        if place == "global":
            y = jax.jit(ours.apply)(params, x, seen)
        else:
            specs = nn.get_partition_spec(boxed)
            mapped = jax.shard_map(
                ours.apply, mesh=mesh, in_specs=(specs, jax.P(), jax.P()), out_specs=jax.P()
            )
            y = jax.jit(mapped)(params, x, seen)
        want = attention(params["params"], x, num_kv_heads=HEADS, width=WIDTH // HEADS, seen=seen)
        assert np.isfinite(y).all()
        visible = np.asarray(seen.any(-1))[:, 0]
        tolerance = {np.float32: 1e-5, np.float64: 1e-12}[dtype]
        np.testing.assert_allclose(y[visible], want[visible], rtol=0, atol=tolerance)


def test_dropout_with_a_row_that_sees_nothing_and_in_half_precision():
    x = np.full((2, LENGTH, WIDTH), 40, np.float16)
    model = layer(dropout=0.5, axis_name=None, dtype=np.float16, kernel_init=nn.initializers.ones)
    params = model.init(jax.random.key(0), x)

    def loss(params: Any) -> Any:
        rngs = {"dropout": jax.random.key(1)}
        y = model.apply(params, x, masks(), deterministic=False, rngs=rngs)
        return jnp.isfinite(y).all(), y

    finite, y = jax.jit(loss)(params)
    assert finite, y


def test_each_rank_drops_weights_of_its_own():
    """All heads have the same queries, keys and values: with one mask they would stay the same."""
    mesh = mesh_of(tensor=HEADS)
    model = layer(dropout=0.5, kernel_init=nn.initializers.ones, out_kernel_init=one_a_head)
    x = np.random.default_rng(0).normal(size=(1, LENGTH, WIDTH)).astype(np.float32)

    def on_rank(x: Any) -> Any:
        variables = nn.unbox(model.init(jax.random.key(0), x))
        rngs = {"dropout": jax.random.key(1)}
        return model.apply(variables, x, deterministic=False, rngs=rngs)

    y = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=jax.P(), out_specs=jax.P()))(x)
    of_heads = np.asarray(y)[0, :, :HEADS].T
    assert len({head.tobytes() for head in of_heads}) == HEADS


def one_a_head(key: Any, shape: Any, dtype: Any) -> Any:
    """Writes the first feature of head i to feature i."""
    del key
    rows = np.arange(HEADS) * (WIDTH // HEADS)
    return jnp.zeros(shape, dtype).at[rows, np.arange(HEADS)].set(1)


@pytest.mark.parametrize(
    ("library", "place", "sequence_parallel", "num_kv_heads"),
    [
        ("linen", "typed", False, 2),
        ("nnx", "typed", True, 1),
        ("linen", "untyped", True, 2),
        ("nnx", "global", False, 2),
    ],
)
def test_more_ranks_than_key_value_heads(
    library: str, place: str, sequence_parallel: bool, num_kv_heads: int
):
    """Trained with SGD: the gradients of a shared head's weights are of all who share it."""
    options = {"num_kv_heads": num_kv_heads, "head_width": 4, "is_causal": True}
    row = Layer(
        "attention",
        *pair("TPAttention", layers.WIDTH, 8, **options),
        ft.partial(attention, num_kv_heads=num_kv_heads, width=4),
    )
    weights = np.random.default_rng(2).normal(size=row.x().shape)

    def trained(apply: Any, params: Any, x: Any, weights: Any) -> Any:
        def loss(params: Any) -> Any:
            return (jnp.sin(apply(params, x)) * weights).sum()

        for _ in range(3):
            grads = jax.grad(loss)(params)
            params = jax.tree.map(lambda leaf, grad: leaf - 0.01 * grad, params, grads)
        return params

    with jax.enable_x64(True):
        made = pure(row, library, mesh_of(tensor=4), sequence_parallel=sequence_parallel)
        f = ft.partial(trained, made.apply)
        if place != "global":
            of_x = jax.P(None, "tensor") if sequence_parallel else jax.P()
            f = jax.shard_map(
                f,
                mesh=mesh_of(tensor=4),
                in_specs=(made.specs, of_x, of_x),
                out_specs=made.specs,
                check_vma=place == "typed",
            )
        got = jax.jit(f)(made.params, row.x(), weights)
        want = jax.jit(ft.partial(trained, row.plain))(made.params, row.x(), weights)
        assert_trained_as(got, want)


def test_errors():
    x, model = np.ones((2, LENGTH, WIDTH), np.float32), layer(axis_name=None)
    for mask in (np.ones((LENGTH, LENGTH), bool), np.ones((2, HEADS, LENGTH, LENGTH), bool)):
        with pytest.raises(ValueError, match=r"TPAttention: mask: expected bool of shape \(2 or 1"):
            model.init(jax.random.key(0), x, mask)
    with pytest.raises(ValueError, match="mask: expected bool"):
        model.init(jax.random.key(0), x, np.ones((1, 1, LENGTH, LENGTH)))
    with pytest.raises(ValueError, match=r"x: expected \(b, s, d\), got 2 dimensions"):
        model.init(jax.random.key(0), x[0])
    with pytest.raises(ValueError, match=r"dropout: expected a share in \[0, 1\), got 1"):
        layer(axis_name=None, dropout=1.0).init(jax.random.key(0), x)

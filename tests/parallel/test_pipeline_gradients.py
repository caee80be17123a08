"""`jaxcoll.pipeline`: values, gradients and second derivatives are those of `sequential`."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from training import mesh_of

import jaxcoll
from jaxcoll import sequential

# Layers of square roots. What a layer does not get from the one before it is below zero there: its
# derivative is NaN.
SHIFTS = (100.0, -5.0, -2.0, -0.3, 3.0)


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    with jax.enable_x64(True):
        yield


def derivatives(run: Any, scale: Any, stacked: Any, x: Any) -> Any:
    """Returns a value, its gradients, and those of the sum of their squares."""

    def loss(scale: Any, stacked: Any, x: Any) -> Any:
        return (run(scale, stacked, x) ** 3).sum()

    def squares(*arguments: Any) -> Any:
        value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2))(*arguments)
        return sum((grad**2).sum() for grad in grads), (value, grads)

    return jax.jit(jax.grad(squares, argnums=(0, 1, 2), has_aux=True))(scale, stacked, x)


@pytest.mark.parametrize(
    ("ranks", "layers", "how"),
    [
        (2, 2, "alone"),
        (4, 4, "alone"),
        (2, 3, "alone"),  # one rank lacks a layer
        (2, 2, "communicates"),
        (4, 5, "communicates"),
        (2, 3, "reads from outside"),
    ],
)
def test_derivatives_are_those_of_one_device(ranks: int, layers: int, how: str):
    def layer(scale: Any, shift: Any, x: Any) -> Any:
        y = jnp.sqrt(x + shift) if how != "reads from outside" else jnp.tanh(scale * x + shift)
        if how == "communicates" and jax.sharding.get_abstract_mesh().manual_axes:
            y = lax.psum(lax.pcast(y, "tensor", to="varying") / 2, "tensor")
        return y

    is_split = layers % ranks == 0
    mesh = mesh_of(pipe=ranks, **({"tensor": 2} if how == "communicates" else {}))
    run = jax.shard_map(
        lambda scale, stacked, x: jaxcoll.pipeline(
            ft.partial(layer, scale), stacked, x, num_micro_batches=2
        ),
        mesh=mesh,
        in_specs=(jax.P(), jax.P("pipe") if is_split else jax.P(), jax.P()),
        out_specs=jax.P(),
    )
    arguments = 0.7 * jnp.ones(3), jnp.array(SHIFTS[:layers]), jnp.linspace(0.9, 1.1, 12)
    arguments = (*arguments[:2], arguments[2].reshape(4, 3))
    found = derivatives(run, *arguments)
    expected = derivatives(
        lambda scale, stacked, x: sequential(ft.partial(layer, scale), stacked, x), *arguments
    )
    for got, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.isfinite(wanted).all()
        np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12)

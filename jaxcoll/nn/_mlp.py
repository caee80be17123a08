"""What the MLPs for linen and NNX share."""

from collections.abc import Callable

import jax


def activated(
    up: jax.Array, activation: Callable[[jax.Array], jax.Array], *, gated: bool
) -> jax.Array:
    """Returns the hidden features; with gates, which stand before their values, half as many."""
    if not gated:
        return activation(up)
    pairs = up.reshape(*up.shape[:-1], -1, 2)
    return activation(pairs[..., 0]) * pairs[..., 1]

"""Random keys of the ranks of an axis."""

import jax
from jax import lax


def key_of_rank(key: jax.Array, axis_name: str | None) -> jax.Array:
    """Returns a key of this rank's own, or the key itself where there is no axis."""
    return key if axis_name is None else jax.random.fold_in(key, lax.axis_index(axis_name))

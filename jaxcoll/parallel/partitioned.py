"""Arrays with the mesh axes over which their dimensions are split, for Flax linen."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Names = tuple[Any, ...]


class Partitioned(nn.Partitioned):
    """`flax.linen.Partitioned` that can be unboxed inside `jax.shard_map`.

    Flax's asks the compiler for its sharding when it is unboxed, which fails where the mesh's axes
    are manual: there, the array is a rank's part already.
    """

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Returns the array."""
        del apply_constraint
        return self.value


def is_partitioned(leaf: Any) -> bool:
    """Tells whether a leaf says how it is split; for `is_leaf`."""
    return isinstance(leaf, nn.Partitioned)


def unboxed(leaf: Any) -> tuple[jax.Array, Names]:
    """Returns the array and, for each dimension, the axis or axes over which it is split."""
    if isinstance(leaf, nn.Partitioned):
        return leaf.value, tuple(leaf.names)
    return leaf, (None,) * jnp.ndim(leaf)


def dimension_of(names: Names, axis_name: str) -> int | None:
    """Returns the dimension that is split over an axis, or None."""
    for dimension, name in enumerate(names):
        if name == axis_name or (isinstance(name, tuple) and axis_name in name):
            return dimension
    return None

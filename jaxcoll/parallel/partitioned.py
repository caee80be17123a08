"""Arrays with the mesh axes over which their dimensions are split, for Flax linen."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat

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


def with_partitioning(init: Callable[..., Any], names: Names) -> Callable[..., Any]:
    """Returns an initializer of a parameter that is split over mesh axes.

    As `flax.linen.with_partitioning`, but for modules that also run inside `jax.shard_map`: over an
    axis that is mapped there, a rank makes and holds its part. The shape is always the global one.

    Args:
        init: `(key, shape, ...) -> array`, of the whole parameter.
        names: for each dimension the axis over which it is split, or None.

    Returns:
        `(key, shape, ...) -> flax.linen.Partitioned`, for `self.param`.

    Example:
        >>> init = jaxcoll.with_partitioning(nn.initializers.lecun_normal(), ("pipe", None, None))
        >>> kernel = self.param("kernel", init, (num_layers, width, width))
    """

    def make(*arguments: Any, **keywords: Any) -> Partitioned:
        return Partitioned(local_part(init(*arguments, **keywords), names), names=names)

    return make


def split_init(init: Callable[..., Any], spec: P, ndim: int) -> Callable[..., Any]:
    """Returns `with_partitioning(init, ...)` by a spec; `init` itself where that splits nothing."""
    names = tuple(spec) + (None,) * (ndim - len(spec))
    return with_partitioning(init, names) if any(names) else init


def local_part(value: jax.Array, names: Names, call: str = "with_partitioning") -> jax.Array:
    """Returns this rank's part of a global value, which every rank has alike.

    Dimensions are split over those of the named axes that are mapped here.

    Raises:
        ValueError: the ranks can't share a dimension evenly.
    """
    bound = _compat.bound_axes()
    for dimension, axis in enumerate(names):
        if axis in bound:
            part, rest = divmod(value.shape[dimension], lax.axis_size(axis))
            if rest:
                raise ValueError(
                    f"{call}: dimension {dimension} of shape {value.shape} can't be split over the "
                    f'{bound[axis]} ranks of axis "{axis}". Use a multiple of {bound[axis]}, or '
                    "fewer ranks."
                )
            start = lax.axis_index(axis) * part
            value = lax.dynamic_slice_in_dim(value, start, part, dimension)
    return jnp.asarray(value)


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

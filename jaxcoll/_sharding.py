"""How arrays lie on a mesh: which dimension is split, and how a tree gets there."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll._errors import listed


def leaf_name(path: Sequence[Any]) -> str:
    """Returns a leaf's path as it is written in texts: `params['w']`, or `the leaf`."""
    return jax.tree_util.keystr(tuple(path)) or "the only leaf"


def divisible_dimension(
    shape: Sequence[int], size: int, *, taken: Collection[int] = ()
) -> int | None:
    """Returns the largest dimension that `size` ranks can split evenly, the last among equals.

    Args:
        shape: of the whole array.
        size: ranks of the axis.
        taken: dimensions that are split already.
    """
    for dimension in np.argsort(shape, kind="stable")[::-1]:
        if dimension not in taken and shape[dimension] and shape[dimension] % size == 0:
            return int(dimension)
    return None


def fitted(sharding: NamedSharding, shape: Sequence[int], dimension: int) -> NamedSharding:
    """Returns the sharding of an array of which a dimension has another size than before.

    Where the ranks that split it don't divide it any more, they split another one, or none.
    """
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    axes, spec[dimension] = spec[dimension], None
    if axes is not None:
        size = math.prod(sharding.mesh.shape[a] for a in jax.tree.leaves(axes))
        is_as_before = shape[dimension] % size == 0
        taken = [i for i, entry in enumerate(spec) if entry is not None]
        to = dimension if is_as_before else divisible_dimension(shape, size, taken=taken)
        if to is not None:
            spec[to] = axes
    return NamedSharding(sharding.mesh, P(*spec), memory_kind=sharding.memory_kind)


def auto(mesh: Any) -> Mesh:
    """Returns a mesh on which the compiler splits, also where the axes of this one are explicit.

    There, types forbid what changes a dimension to one that its ranks don't divide.
    """
    return Mesh(mesh.devices, mesh.axis_names)


def untyped(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns an array's shape and dtype, without the sharding in its type; see `auto`.

    Of 64 bits, that arrays may have where JAX makes none, the dtype that it makes then.
    """
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    dtype = leaf.dtype if is_key else jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def checked_sharding(
    call: str, name: str, shape: Sequence[int], mesh: Mesh, spec: P, remedy: str = ""
) -> NamedSharding:
    """Returns the sharding that a spec of a mesh's axes says, which splits such an array.

    Raises:
        ValueError: the spec has an axis twice; or see `check_divisible`.
    """
    axes = jax.tree.leaves(tuple(spec))
    if twice := [axis for axis in axes if axes.count(axis) > 1]:
        raise ValueError(
            f"{call}: {name} of shape {tuple(shape)}: {spec} splits it over {listed(twice[:1])} "
            "twice. An axis splits one dimension, once: leave it out of the others."
        )
    sharding = NamedSharding(mesh, spec)
    check_divisible(call, name, shape, sharding, remedy)
    return sharding


def check_divisible(
    call: str, name: str, shape: Sequence[int], sharding: NamedSharding, remedy: str = ""
) -> None:
    """Raises ValueError where a sharding splits a dimension that is not there or not divisible."""
    if len(sharding.spec) > len(shape):
        raise ValueError(
            f"{call}: {name}: the sharding {sharding.spec} has an entry for dimension "
            f"{len(shape)}, but the leaf has shape {tuple(shape)}. Shorten it, or replicate the "
            "leaf: jax.P()."
        )
    for dimension, axes in enumerate(sharding.spec):
        if axes is None:
            continue
        axes = axes if isinstance(axes, tuple) else (axes,)
        size = math.prod(sharding.mesh.shape[axis] for axis in axes)
        if rest := shape[dimension] % size:
            drop = f"drop {rest} or " * (rest < shape[dimension])
            remedy = remedy or f"{drop}pad {size - rest}"
            raise ValueError(
                f"{call}: {name}: dimension {dimension} of shape {tuple(shape)} can't be split "
                f"over {size} devices ({', '.join(axes)}). Make it a multiple of {size}: {remedy}."
            )

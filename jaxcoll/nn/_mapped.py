"""Layers on global arrays: they map themselves over their mesh."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def over_mesh(
    f: Callable[..., jax.Array],
    mesh: Mesh,
    axis_name: str,
    x: jax.Array,
    weights: tuple[Any, ...],
    specs: tuple[P, ...],
    *,
    split_input: bool,
) -> jax.Array:
    """Returns `f(x, *weights)` on global arrays; the result's last dimension is split.

    All axes of the mesh are manual, as native calls need: the first dimension of `x` is split over
    those that are not `axis_name`, where they divide it.

    Args:
        f: of local blocks.
        mesh: which.
        axis_name: the axis of the weights.
        x: `(..., features)`.
        weights: global; None is left out.
        specs: one for each weight.
        split_input: whether `f` takes this rank's features of `x`, or all.
    """
    others = tuple(axis for axis in mesh.axis_names if axis != axis_name)
    splits_batch = x.ndim > 1 and x.shape[0] % math.prod(mesh.shape[a] for a in others) == 0
    batch = (others if others and splits_batch else None, *[None] * (x.ndim - 2))[: x.ndim - 1]
    x_spec = P(*batch, axis_name if split_input else None)
    w_specs = tuple(spec if w is not None else None for w, spec in zip(weights, specs, strict=True))
    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=(x_spec, *w_specs), out_specs=P(*batch, axis_name)
    )
    return mapped(x, *weights)

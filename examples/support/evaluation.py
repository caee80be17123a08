"""Measure a model on windows of text, spread over the devices."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_WINDOWS_AT_ONCE = 8  # per rank of data: bounds the memory of the logits


def losses(
    window_losses: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    windows: np.ndarray,
    mesh: Mesh,
    axes: tuple[str, ...],
) -> np.ndarray:
    """Return each window's loss.

    Args:
        window_losses: Maps parameters and windows, `(b, t)`, to a loss per window, `(b,)`.
        params: The same on all devices of `mesh`.
        windows: Shape `(n, t)`, n a multiple of the ranks of the axes.
        mesh: Where.
        axes: Over which windows are split; ranks of others do the same.

    Returns:
        Shape `(n,)`.
    """
    mapped = jax.shard_map(window_losses, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P(axes))
    # On all devices, so that every process has all of them.
    step = jax.jit(mapped, out_shardings=NamedSharding(mesh, P()))
    at_once = _WINDOWS_AT_ONCE * math.prod(mesh.shape[axis] for axis in axes)
    sharding = NamedSharding(mesh, P(axes))
    parts = np.split(windows, range(at_once, len(windows), at_once))
    placed = [jax.make_array_from_callback(p.shape, sharding, p.__getitem__) for p in parts]
    return np.concatenate([step(params, part) for part in placed])

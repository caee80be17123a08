"""A vocabulary over the ranks of an axis: embedding, and cross entropy without the full logits.

Source: Shoeybi et al., "Megatron-LM" (2019).
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll.collectives.all_reduce import all_reduce
from jaxcoll.collectives.reduce_scatter import reduce_scatter
from jaxcoll.parallel.regions import reduce_from


def embed(
    tokens: jax.Array, table: jax.Array, axis_name: str | None, *, sequence_parallel: bool = False
) -> jax.Array:
    """Returns the rows of tokens, each of which is another rank's.

    Args:
        tokens: integers `(..., s)` in `[0, v)`, the same on all ranks.
        table: `(v/p, d)`, this rank's rows.
        axis_name: a mapped axis of p ranks, or None for a single device.
        sequence_parallel: each rank gets its part of the sequence.

    Returns:
        `(..., s, d)`, the same on all ranks; with `sequence_parallel` `(..., s/p, d)`.
    """
    if axis_name is None:
        return table[tokens]
    row, is_held = _held(tokens, table.shape[0], axis_name)
    rows = jnp.where(is_held[..., None], table[row], 0)
    if sequence_parallel:
        return reduce_scatter(rows, axis_name, scatter_dimension=rows.ndim - 2, tiled=True)
    return reduce_from(rows, axis_name)


def cross_entropy(logits: jax.Array, labels: jax.Array, axis_name: str | None) -> jax.Array:
    """Returns the cross entropy of each position; see `jaxcoll.vocab_parallel_cross_entropy`."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    peak = lax.stop_gradient(logits.max(-1))
    if axis_name is None:
        shifted = logits - peak[..., None]
        target = jnp.take_along_axis(shifted, labels[..., None], -1)[..., 0]
        return jnp.log(jnp.exp(shifted).sum(-1)) - target
    shifted = logits - all_reduce(peak, axis_name, op="max")[..., None]
    column, is_held = _held(labels, logits.shape[-1], axis_name)
    target = jnp.take_along_axis(shifted, column[..., None], -1)[..., 0]
    total, target = reduce_from(
        (jnp.exp(shifted).sum(-1), jnp.where(is_held, target, 0)), axis_name
    )
    return jnp.log(total) - target


def _held(tokens: jax.Array, count: int, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens as counted from this rank's first, and whether it is theirs."""
    place = tokens - lax.axis_index(axis_name) * count
    is_held = (place >= 0) & (place < count)
    return jnp.where(is_held, place, 0), is_held

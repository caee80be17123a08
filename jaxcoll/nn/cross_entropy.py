"""Cross entropy of logits that are split over a vocabulary."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxcoll.nn._place import Place
from jaxcoll.parallel.vocabulary import cross_entropy


def vocab_parallel_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    axis_name: str | None = "tensor",
    *,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Returns the cross entropy of each position, from logits that are split over a vocabulary.

    No rank ever has the logits of the whole vocabulary: the ranks exchange a maximum and two sums
    for each position.

    Args:
        logits: with p ranks this rank's, `(..., v/p)`; on global arrays, with the axis not mapped,
            all, `(..., v)`.
        labels: integers `(...)` in `[0, v)`, the same on all ranks.
        axis_name: a mapped axis, or one of `mesh`; None for a single device.
        mesh: for calls on global arrays.

    Returns:
        `(...)`, float32 at least, the same on all ranks.

    Raises:
        ValueError: a vocabulary that p does not divide, shapes that don't fit, an axis that the
            mesh lacks, or no mesh where the axis is not mapped.
        TypeError: labels that are no integers.

    Cost: two all_reduces, of one and of two numbers for each position; none backward.
    Differentiable: yes, with respect to the logits.
    Deterministic: yes.
    Source: Shoeybi et al., "Megatron-LM" (2019).

    Example:
        >>> losses = jaxcoll.vocab_parallel_cross_entropy(embed.attend(x), labels)
    """
    call = "vocab_parallel_cross_entropy"
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{call}: labels: expected integers, got {labels.dtype}.")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"{call}: labels: expected shape {logits.shape[:-1]}, that of the logits "
            f"{logits.shape} without the vocabulary, got {labels.shape}."
        )
    place = Place(call, axis_name, mesh)
    if not place.is_mapped:
        place.check_divides("the vocabulary", logits.shape[-1])
    # As many dimensions as the logits have, of which the first may be split by examples.
    operands = [(logits, -1), (labels[..., None], None)]
    return place.run(_with_last, operands, [], (logits.ndim, None))[..., 0]


def _with_last(logits: jax.Array, labels: jax.Array, axis_name: str | None) -> jax.Array:
    return cross_entropy(logits, labels[..., 0], axis_name)[..., None]

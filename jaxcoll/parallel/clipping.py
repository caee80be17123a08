"""Norms of whole trees, of which a rank may hold parts, and clipping by them."""

from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcoll import _compat
from jaxcoll.collectives.all_reduce import all_reduce


def global_norm(tree: Any) -> jax.Array:
    """Returns the Euclidean norm of all values of a tree, however it is split over ranks.

    Inside `jax.shard_map` a leaf's type says over which axes it is split: there its squares are
    summed, and every value is counted once. What is the same on all ranks of an axis is counted
    once, too.

    Args:
        tree: arrays of floating point or complex numbers; inside a map a rank's parts.

    Returns:
        A scalar, float32 at least, the same on all ranks.

    Raises:
        ValueError: inside a map without types (`check_vma=False`), where what is split can't be
            known.

    Cost: an all_reduce of a number for each set of axes over which leaves are split.
    Differentiable: yes, but where the norm is 0.
    Deterministic: yes.

    Example:
        >>> norm = jaxcoll.global_norm(grads)
    """
    if _compat.bound_axes() and not _compat.tracks_varying_axes():
        raise ValueError(
            "global_norm: which leaves are split over the axes of this map can't be known without "
            "typed axes (jax.shard_map with check_vma=True, its default). Where none is split, use "
            "optax.global_norm or optax.clip_by_global_norm."
        )
    return jaxcoll_whole_norm(tree)


@jax.jit
def jaxcoll_whole_norm(tree: Any) -> jax.Array:
    """`global_norm`, under a name by which `zero` knows that it is right on parts."""
    sums: dict[tuple[str, ...], jax.Array] = {}
    for leaf in jax.tree.leaves(tree):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        axes = tuple(sorted(_compat.varying_axes(jax.typeof(leaf))))
        squares = jnp.sum(jnp.real(wide * jnp.conj(wide)))
        sums[axes] = sums[axes] + squares if axes in sums else squares
    totals = [all_reduce(total, axes) if axes else total for axes, total in sums.items()]
    return jnp.sqrt(sum(totals[1:], totals[0])) if totals else jnp.zeros(())


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Returns an Optax transformation that scales gradients down to a norm, if theirs is larger.

    As `optax.clip_by_global_norm`, which on parts of gradients would take each rank's own norm, so
    that ranks would scale differently.

    Args:
        max_norm: the largest norm that is left as it is; see `jaxcoll.global_norm`.

    Returns:
        A transformation without a state, for `optax.chain`.

    Raises:
        TypeError: `max_norm` is no number.

    Example:
        >>> optimizer = optax.chain(jaxcoll.clip_by_global_norm(1.0), optax.adamw(1e-3))
    """
    if not isinstance(max_norm, Number | np.generic | np.ndarray | jax.Array):
        raise TypeError(f"clip_by_global_norm: max_norm: expected a number, got {max_norm!r}.")

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        norm = global_norm(updates)
        scale = jnp.where(norm <= max_norm, 1, max_norm / norm)  # NaN where the norm is
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)

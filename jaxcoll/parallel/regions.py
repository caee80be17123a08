"""Between values that all ranks of an axis have alike and values that each has of its own.

A layer whose weights are split begins with `copy_to` and ends with `reduce_from`, each the other's
gradient. They say where a sum over the ranks belongs, so that it is a native call and there is
exactly one, whether JAX types values by the axes over which they vary (`check_vma=True`) or not.

Source: the conjugate operators f and g of Shoeybi et al., "Megatron-LM" (2019).
"""

import functools as ft
from typing import Any

import jax
from jax import lax

from jaxcoll import _compat
from jaxcoll._config import resolve_backend
from jaxcoll._lax_rules import marked
from jaxcoll.collectives.all_gather import all_gather, all_gather_invariant
from jaxcoll.collectives.all_reduce import all_reduce

Axes = str | tuple[str, ...]


def copy_to(tree: Any, axes: Axes) -> Any:
    """Returns values, the same on all ranks, as each rank's own: their gradients are summed."""
    axes = (axes,) if isinstance(axes, str) else axes
    if not _compat.tracks_varying_axes():
        return jax.tree.map(lambda x: _copied(x, axes), tree)

    def copy(x: Any) -> Any:
        varying = _compat.varying_axes(jax.typeof(x))
        missing = tuple(axis for axis in axes if axis not in varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    # The mark goes with the equation to its transpose, which is a sum.
    with marked(resolve_backend("all_reduce", None)):
        return jax.tree.map(copy, tree)


def reduce_from(tree: Any, axes: Axes) -> Any:
    """Returns the sums over the ranks, the same on all: their gradients are each rank's."""
    axes = (axes,) if isinstance(axes, str) else axes
    return all_reduce(tree, axes) if _compat.tracks_varying_axes() else _reduced(tree, axes)


def gather_from(x: Any, axis_name: str, dimension: int) -> Any:
    """Returns all ranks' parts, the same on all; the gradient is this rank's part."""
    dimension %= x.ndim
    if _compat.tracks_varying_axes():
        return all_gather_invariant(x, axis_name, axis=dimension)
    return _gathered(x, axis_name, dimension)


# ---- Without types: JAX would transpose a sum to a sum -------------------------------------------


@ft.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copied(x: Any, axes: tuple[str, ...]) -> Any:
    del axes
    return x


_copied.defvjp(lambda x, axes: (x, None), lambda axes, _, g: (all_reduce(g, axes),))


@ft.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduced(tree: Any, axes: tuple[str, ...]) -> Any:
    return all_reduce(tree, axes)


_reduced.defvjp(lambda tree, axes: (all_reduce(tree, axes), None), lambda axes, _, g: (g,))


@ft.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: Any, axis_name: str, dimension: int) -> Any:
    return all_gather(x, axis_name, axis=dimension, tiled=True)


def _gathered_backward(axis_name: str, dimension: int, length: int, g: Any) -> tuple[Any]:
    start = lax.axis_index(axis_name) * length
    return (lax.dynamic_slice_in_dim(g, start, length, dimension),)


_gathered.defvjp(
    lambda x, axis_name, dimension: (_gathered(x, axis_name, dimension), x.shape[dimension]),
    _gathered_backward,
)

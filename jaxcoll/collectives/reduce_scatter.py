"""reduce_scatter: reduce over a mesh axis and keep this rank's slice of the result.

Bytes moved per rank: S read, S / p written, for an operand of S bytes.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll._config import resolve_backend
from jaxcoll._errors import one_of
from jaxcoll._lax_rules import marked
from jaxcoll._types import HALF_PRECISION, AxisIndexGroups, AxisName, Backend
from jaxcoll.collectives import _on_lax
from jaxcoll.collectives._arguments import (
    check_axes,
    check_dim,
    check_each_leaf,
    check_equal_groups,
    check_varies,
)

_OPS = ("sum", "mean")


def reduce_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    op: str = "sum",
    axis_index_groups: AxisIndexGroups | None = None,
    backend: Backend | None = None,
) -> Any:
    r"""Reduces over a mesh axis and keeps this rank's slice of the result.

    With p ranks on `axis_name`, rank i returns slice i along `scatter_dimension` of
    :math:`\sum_j x_j` (divided by p for `"mean"`).

    Args:
        x: an array of shape `(..., d, ...)`, or a tree of arrays; the dtypes of `all_reduce`,
            bool excepted. `d` is p, or divisible by p where tiled.
        axis_name: a mapped axis of size p, or a tuple of them.
        scatter_dimension: the array dimension to split.
        tiled: False removes the dimension, True leaves d / p of it.
        op: `"sum"` or `"mean"`.
        axis_index_groups: reduces within each of these groups of axis indices; p is their size.
        backend: see `jaxcoll.using`.

    Returns:
        Shape `(..., ...)`, or `(..., d / p, ...)` where tiled; the dtype of `x` (`"mean"` of
        integers: floating point); varying over `axis_name`, as `jax.lax.psum_scatter`'s.

    Raises:
        NameError: an axis is not mapped here.
        TypeError: bool, or a dtype that `all_reduce` does not take.
        ValueError: `d` does not fit p, `scatter_dimension` is out of range, an unknown `op` or
            `backend`, or groups that don't partition the axis.
        NativeUnavailableError: `backend="native"` where native can't serve.

    Cost: one meeting of the group; S bytes read and S / p written per rank.
    Differentiable: yes; the transpose is `all_gather`.
    Deterministic: yes, in rank order; f16 and bf16 are summed in f32 and rounded once.

    Example:
        >>> g_shard = jaxcoll.reduce_scatter(g, "fsdp", tiled=True, op="mean")
    """
    if op not in _OPS:
        raise ValueError(one_of("reduce_scatter", "op", op, _OPS))
    if _on_lax.is_all_there_is("reduce_scatter", backend):
        names = _on_lax.names_of(axis_name)
        size = len(axis_index_groups[0]) if axis_index_groups else lax.axis_size(names)
        groups = axis_index_groups
        sum_of = _on_lax.psum_scatter
        return _reduce(x, names, groups, size, scatter_dimension, tiled, op, sum_of, widen=True)
    axes = check_axes("reduce_scatter", x, axis_name, axis_index_groups)
    resolved = resolve_backend("reduce_scatter", backend)
    check_equal_groups(axes, "all results have one shape")

    def check(where: str, leaf: Any) -> None:
        if jnp.result_type(leaf) == np.bool_:
            raise TypeError(f"{where}: bool has no sum here. Convert it first: x.astype(int).")
        dim = check_dim(where, "scatter_dimension", scatter_dimension, np.ndim(leaf))
        length = np.shape(leaf)[dim]
        if tiled and length % axes.size:
            raise ValueError(
                f"{where}: scatter_dimension={scatter_dimension}: expected a length divisible by "
                f"the {axes.size} ranks, got shape {np.shape(leaf)}. Pad the array."
            )
        if not tiled and length != axes.size:
            raise ValueError(
                f"{where}: scatter_dimension={scatter_dimension}: expected length {axes.size}, one "
                f"slice for each rank, got shape {np.shape(leaf)}. To split a longer dimension, "
                "pass tiled=True."
            )
        check_varies(axes, where, leaf)

    check_each_leaf(axes, x, check)

    with marked(resolved):
        return _reduce(
            *(x, axes.names, axes.groups, axes.size, scatter_dimension, tiled, op),
            ft.partial(lax.psum_scatter, tiled=True),
            widen=op == "mean",
        )


def _reduce(
    tree: Any,
    names: tuple[str, ...],
    groups: Any,
    size: int,
    dimension: int,
    tiled: bool,
    op: str,
    sum_of: Callable[..., Any],
    *,
    widen: bool,
) -> Any:
    def reduce(leaf: Any) -> Any:
        # A float16 sum may overflow where the mean does not, so the mean stays wide until the end.
        leaf = jnp.asarray(leaf)
        dim = dimension % leaf.ndim
        total = sum_of(
            leaf.astype(np.float32) if widen and _is_half(leaf) else leaf,
            names,
            scatter_dimension=dim,
            axis_index_groups=groups,
        )
        # Not by lax's tiled=False, whose batching rule loses the batch dimension.
        total = total if tiled else lax.squeeze(total, [dim])
        result = total / size if op == "mean" else total
        return result.astype(leaf.dtype) if _is_half(leaf) else result

    return jax.tree.map(reduce, tree)


def _is_half(leaf: Any) -> bool:
    return leaf.dtype.name in HALF_PRECISION

"""all_gather: every rank gets the blocks of all ranks, in rank order.

Bytes moved per rank: p * S written, for an operand of S bytes.
"""

from typing import Any

import numpy as np
from jax import lax

from jaxcoll._config import resolve_backend
from jaxcoll._lax_rules import marked
from jaxcoll._types import AxisIndexGroups, AxisName, Backend
from jaxcoll.collectives import _on_lax
from jaxcoll.collectives._arguments import (
    check_axes,
    check_dim,
    check_each_leaf,
    check_equal_groups,
    check_varies,
)


def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis: int = 0,
    tiled: bool = False,
    axis_index_groups: AxisIndexGroups | None = None,
    backend: Backend | None = None,
) -> Any:
    """Gathers the blocks of all ranks of a mesh axis, in rank order.

    Args:
        x: an array of shape `(..., d, ...)`, or a tree of arrays; the dtypes of `all_reduce`,
            and random keys.
        axis_name: a mapped axis of size p, or a tuple of them.
        axis: the array dimension of the result along which blocks are laid.
        tiled: False makes a new dimension of size p, True joins blocks along an existing one.
        axis_index_groups: gathers within each of these groups of axis indices; p is their size.
        backend: see `jaxcoll.using`.

    Returns:
        Shape `(..., p, d, ...)`, or `(..., p * d, ...)` where tiled; the dtype of `x`; varying
        over `axis_name`, as `jax.lax.all_gather`'s.

    Raises:
        NameError: an axis is not mapped here.
        TypeError: a leaf is not an array, or has another dtype.
        ValueError: `axis` is out of range, the groups don't partition the axis, or an unknown
            `backend`.
        NativeUnavailableError: `backend="native"` where native can't serve.

    Cost: one meeting of the group; p * S bytes written per rank.
    Differentiable: yes; the transpose is `reduce_scatter`.
    Deterministic: yes, it copies.

    Example:
        >>> w_full = jaxcoll.all_gather(w_shard, "fsdp", axis=0, tiled=True)
    """
    if _on_lax.is_all_there_is("all_gather", backend):
        return lax.all_gather(
            x, axis_name, axis=axis, tiled=tiled, axis_index_groups=axis_index_groups
        )
    axes = check_axes("all_gather", x, axis_name, axis_index_groups)
    resolved = resolve_backend("all_gather", backend)
    check_equal_groups(axes, "all results have one shape")

    def check(where: str, leaf: Any) -> None:
        check_dim(where, "axis", axis, np.ndim(leaf) + (not tiled))
        check_varies(axes, where, leaf)

    check_each_leaf(axes, x, check)
    with marked(resolved):
        return lax.all_gather(x, axes.names, axis=axis, tiled=tiled, axis_index_groups=axes.groups)


def all_gather_invariant(x: Any, axis_name: AxisName, *, axis: int) -> Any:
    """As `all_gather(tiled=True)`, but typed as the same on all ranks, which it is.

    For results that leave a map whole; transposed, each rank gets its part.
    """
    with marked(resolve_backend("all_gather", None)):
        return lax.all_gather(x, axis_name, axis=axis, tiled=True, to="invarying")

"""all_to_all: block r of every rank goes to rank r.

Bytes moved per rank: S written, for an operand of S bytes.
"""

from typing import Any

import jax
import jax.numpy as jnp
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


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    axis_index_groups: AxisIndexGroups | None = None,
    backend: Backend | None = None,
) -> Any:
    """Splits `x` into a block for each rank, and joins the blocks that come from all ranks.

    Args:
        x: an array, or a tree of arrays; the dtypes of `all_reduce`, and random keys.
        axis_name: a mapped axis of size p, or a tuple of them.
        split_axis: the array dimension to split: of length p, or divisible by p where tiled.
        concat_axis: the array dimension of the result along which received blocks are laid, in
            rank order.
        tiled: False takes the split dimension away and makes a new one of length p at
            `concat_axis`; True keeps both, 1 / p and p times as long.
        axis_index_groups: exchanges within each of these groups of axis indices; p is their size.
        backend: see `jaxcoll.using`.

    Returns:
        As many elements as `x` has, of its dtype; varying over `axis_name`, as
        `jax.lax.all_to_all`'s.

    Raises:
        NameError: an axis is not mapped here.
        TypeError: a leaf is not an array, or has another dtype.
        ValueError: the split dimension does not fit p, a dimension is out of range, the groups
            don't partition the axis, or an unknown `backend`.
        NativeUnavailableError: `backend="native"` where native can't serve.

    Cost: one meeting of the group; S bytes read and written per rank, whatever the dimensions:
        no transposition before or after.
    Differentiable: yes; the transpose is `all_to_all` with the dimensions exchanged.
    Deterministic: yes, it copies.

    Example:
        >>> heads = jaxcoll.all_to_all(sequence_shard, "seq", 2, 1, tiled=True)
    """
    if _on_lax.is_all_there_is("all_to_all", backend):
        names = _on_lax.names_of(axis_name)
        return _exchange(x, names, axis_index_groups, split_axis, concat_axis, tiled)
    axes = check_axes("all_to_all", x, axis_name, axis_index_groups)
    resolved = resolve_backend("all_to_all", backend)
    check_equal_groups(axes, "all blocks have one shape")

    def check(where: str, leaf: Any) -> None:
        split = check_dim(where, "split_axis", split_axis, np.ndim(leaf))
        check_dim(where, "concat_axis", concat_axis, np.ndim(leaf))
        length = np.shape(leaf)[split]
        if tiled and length % axes.size:
            raise ValueError(
                f"{where}: split_axis={split_axis}: expected a length divisible by the "
                f"{axes.size} ranks, got shape {np.shape(leaf)}. Pad the array."
            )
        if not tiled and length != axes.size:
            raise ValueError(
                f"{where}: split_axis={split_axis}: expected length {axes.size}, one block for "
                f"each rank, got shape {np.shape(leaf)}. To split a longer dimension, pass "
                "tiled=True."
            )
        check_varies(axes, where, leaf)

    check_each_leaf(axes, x, check)

    with marked(resolved):
        return _exchange(x, axes.names, axes.groups, split_axis, concat_axis, tiled)


def _exchange(
    tree: Any, names: tuple[str, ...], groups: Any, split_axis: int, concat_axis: int, tiled: bool
) -> Any:
    def exchange(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        split, concat = split_axis % leaf.ndim, concat_axis % leaf.ndim
        if not tiled:
            # By a new dimension, not by lax's tiled=False, which has a wrong transpose.
            concat += concat > split
            leaf = jnp.expand_dims(leaf, concat)
            split += concat <= split
        result = lax.all_to_all(leaf, names, split, concat, tiled=True, axis_index_groups=groups)
        return result if tiled else lax.squeeze(result, [split])

    return jax.tree.map(exchange, tree)

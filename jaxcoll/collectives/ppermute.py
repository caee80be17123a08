"""ppermute: send this rank's block along the edges of a permutation.

Bytes moved per rank: S written, for an operand of S bytes.
"""

import operator
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.sharding import get_abstract_mesh

from jaxcoll import _compat
from jaxcoll._config import resolve_backend
from jaxcoll._errors import listed
from jaxcoll._lax_rules import marked
from jaxcoll._types import AxisName, Backend
from jaxcoll.collectives import _on_lax
from jaxcoll.collectives._arguments import Axes, check_axes, check_each_leaf, check_varies


def ppermute(
    x: Any,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    backend: Backend | None = None,
) -> Any:
    """Sends every rank's block to another rank.

    Args:
        x: an array, or a tree of arrays; any shapes, the dtypes of `all_reduce`, and random keys.
        axis_name: a mapped axis of size p, or a tuple of them.
        perm: pairs (source, target) of axis indices, each index at most once on either side.
        backend: see `jaxcoll.using`.

    Returns:
        The shapes and dtypes of `x`; rank t has the block of s for each (s, t) in `perm`, and
        ranks that receive nothing have zeros; varying over `axis_name`, as `jax.lax.ppermute`'s.

    Raises:
        NameError: an axis is not mapped here.
        TypeError: a leaf is not an array, or has another dtype.
        NotImplementedError: the axis_name of a `jax.vmap`, with a `perm` that leaves a rank out or
            in a tuple with others (`jax.lax` refuses the first and permutes the second wrongly).
        ValueError: a source or target stands twice or is no index of the axis, or an unknown
            `backend`.
        NativeUnavailableError: `backend="native"` where native can't serve.

    Cost: one meeting of the group; S bytes read and written per rank. With `backend="auto"`,
        blocks of 4 MiB and more go through `jax.lax`, which measures faster.
    Differentiable: yes; the transpose sends along the reversed pairs.
    Deterministic: yes, it copies.

    Example:
        >>> from_left = jaxcoll.ppermute(x, "ring", [(i, (i + 1) % p) for i in range(p)])
    """
    if _on_lax.is_all_there_is("ppermute", backend):
        names = _on_lax.names_of(axis_name)
        if len(names) > 1 and set(names) - set(get_abstract_mesh().axis_names):
            # lax permutes wrongly where one of them is that of a jax.vmap.
            raise NotImplementedError(f"ppermute(x, {names}): axis_name: expected mesh axes.")
        return lax.ppermute(x, names, perm)
    axes = check_axes("ppermute", x, axis_name)
    resolved = resolve_backend("ppermute", backend)
    pairs = _check_perm(axes, perm)
    if vmapped := _compat.vmapped(axes.names):
        _check_vmapped(axes, vmapped, pairs)
    check_each_leaf(axes, x, lambda where, leaf: check_varies(axes, where, leaf))
    with marked(resolved):
        return lax.ppermute(x, axes.names, pairs)


def _check_vmapped(axes: Axes, vmapped: list[str], pairs: Sequence[tuple[int, int]]) -> None:
    if len(axes.names) > 1:
        raise NotImplementedError(
            f"{axes.call}: axis_name: expected mesh axes, or the axis_name of one jax.vmap alone; "
            f"got {listed(vmapped)} of a jax.vmap in a tuple (which jax.lax permutes wrongly)."
        )
    if len(pairs) < axes.size:
        raise NotImplementedError(
            f"{axes.call}: perm: expected {axes.size} pairs, a whole permutation, because "
            f"{listed(vmapped)} is the axis_name of a jax.vmap; got {list(pairs)}. Add the missing "
            "pairs and mask what they bring, or map over a mesh axis."
        )


_TO_ALL = " To send one block to all ranks, use broadcast."
_TO_ONE = " To combine what several ranks send, use all_reduce or reduce_scatter."


def _check_perm(axes: Axes, perm: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    try:
        pairs = tuple((operator.index(source), operator.index(target)) for source, target in perm)
    except (TypeError, ValueError):
        raise ValueError(
            f"{axes.call}: perm: expected pairs (source, target) of axis indices, got {perm!r}."
        ) from None
    for side, indices in (
        ("source", [source for source, _ in pairs]),
        ("target", [target for _, target in pairs]),
    ):
        outside = [i for i in indices if not 0 <= i < axes.size]
        if outside:
            raise ValueError(
                f"{axes.call}: perm: expected each {side} in range({axes.size}), got {outside[0]} "
                f"in {list(pairs)}."
            )
        twice = [i for i in indices if indices.count(i) > 1]
        if twice:
            raise ValueError(
                f"{axes.call}: perm: expected each {side} at most once, got {twice[0]} twice in "
                f"{list(pairs)}." + (_TO_ALL if side == "source" else _TO_ONE)
            )
    return pairs

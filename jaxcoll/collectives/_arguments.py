"""Checks that all collectives share, with texts that say how to mend the call."""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxcoll import _compat, _decisions
from jaxcoll._config import refuse_after_fork
from jaxcoll._errors import did_you_mean, listed
from jaxcoll._types import DTYPES


@dataclasses.dataclass(frozen=True)
class Axes:
    """The mapped axes of one call.

    Attributes:
        call: how the call reads, for texts: `all_reduce(x, "data")`.
        names: the axes, in the order given.
        size: ranks per group.
        groups: canonical `axis_index_groups`, or None.
    """

    call: str
    names: tuple[str, ...]
    size: int
    groups: tuple[tuple[int, ...], ...] | None


def check_axes(op: str, tree: Any, axis_name: Any, axis_index_groups: Any = None) -> Axes:
    """Returns the axes of a call.

    Raises:
        TypeError: `axis_name` is not a name or a tuple of names.
        NameError: an axis is not bound here (as `jax.lax` does).
        RuntimeError: the process was forked after native calls.
        ValueError: `axis_index_groups` does not partition the axis, or a name stands twice.
    """
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    call = f"{op}(x, {axis_name!r})".replace("'", '"')
    refuse_after_fork(call)
    for name in names:
        if isinstance(name, int) or name is None:
            raise TypeError(
                f"{call}: axis_name: expected the name of a mesh axis or a tuple of names, got "
                f"{name!r}. To reduce over an array dimension, use jax.numpy."
            )
    if len(set(names)) != len(names):
        raise ValueError(f"{call}: axis_name: an axis stands twice in {names!r}.")
    check_mapped(call, names, tree)
    bound = _compat.bound_axes()
    if _compat.tracks_varying_axes() and (vmapped := _compat.vmapped(names)):
        raise NotImplementedError(
            f"{call}: axis_name: {listed(vmapped)} is the axis_name of a jax.vmap inside "
            "jax.shard_map(check_vma=True), whose types know mesh axes only (nor does jax.lax "
            "support it). Pass check_vma=False to jax.shard_map."
        )
    size = math.prod(bound[name] for name in names)
    groups = _check_groups(call, axis_index_groups, size)
    return Axes(call, names, len(groups[0]) if groups else size, groups)


def check_mapped(call: str, names: Sequence[Any], tree: Any = ()) -> None:
    """Raises NameError where one of the names is not that of a mapped axis here."""
    bound = _compat.bound_axes()
    for name in names:
        if name not in bound:
            raise NameError(_unbound_text(call, name, list(bound), tree))


def _unbound_text(call: str, name: Any, bound: Sequence[Any], tree: Any) -> str:
    named = [axis for axis in bound if _compat.is_named_by_user(axis)]
    if bound and not named:
        return (
            f"{call}: axis_name: the jax.pmap (or jax.vmap) around this call has no axis_name. "
            f'Write jax.pmap(f, axis_name="{name}").'
        )
    if named:
        return (
            f'{call}: axis_name: "{name}" is not a mapped axis here; mapped here: '
            f"{listed(named)}.{did_you_mean(str(name), named)}"
        )
    meshes = [mesh for mesh in map(_mesh_of, jax.tree.leaves(tree)) if mesh is not None]
    if meshes and name in meshes[0].axis_names:
        return (
            f'{call}: axis_name: "{name}" is an axis of the mesh that the operand is sharded over, '
            "but the compiler owns it here. Map the function over the mesh: "
            f'jax.shard_map(f, mesh=mesh, in_specs=jax.P("{name}"), out_specs=jax.P()), '
            "and jit that."
        )
    mesh_hint = f"; the operand's mesh has {listed(meshes[0].axis_names)}" if meshes else ""
    return (
        f'{call}: axis_name: "{name}" is not a mapped axis: the call is outside of a mapped '
        f"context{mesh_hint}. Call it inside jax.shard_map(f, mesh=mesh, "
        f'in_specs=jax.P("{name}"), out_specs=jax.P()), or under jax.vmap(f, axis_name="{name}").'
    )


def _mesh_of(leaf: Any) -> Any:
    """Returns the mesh of a leaf's NamedSharding, of an array or of a traced value, or None."""
    for holder in (leaf, getattr(leaf, "aval", None)):
        mesh = getattr(getattr(holder, "sharding", None), "mesh", None)
        if mesh is not None and getattr(mesh, "axis_names", ()):
            return mesh
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names else None


def _check_groups(call: str, groups: Any, size: int) -> tuple[tuple[int, ...], ...] | None:
    if groups is None:
        return None
    try:
        canonical = tuple(tuple(operator.index(i) for i in group) for group in groups)
    except TypeError:
        raise ValueError(
            f"{call}: axis_index_groups: expected a list of lists of axis indices, got {groups!r}."
        ) from None
    if sorted(i for group in canonical for i in group) != list(range(size)):
        raise ValueError(
            f"{call}: axis_index_groups: expected every index of range({size}) exactly once, got "
            f"{[list(group) for group in canonical]}."
        )
    return canonical


def check_equal_groups(axes: Axes, why: str) -> None:
    """Raises ValueError where the groups differ in size."""
    if axes.groups and len({len(group) for group in axes.groups}) > 1:
        raise ValueError(
            f"{axes.call}: axis_index_groups: expected groups of one size ({why}), got sizes "
            f"{[len(group) for group in axes.groups]}."
        )


def check_each_leaf(axes: Axes, tree: Any, check: Callable[[str, Any], None]) -> None:
    """Calls `check(text, leaf)` for each leaf, where `text` says which one; checks dtypes too.

    Raises:
        TypeError: a leaf is not an array, or has a dtype that no path supports.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        where = f"{axes.call}: x{jax.tree_util.keystr(path)}"
        if not hasattr(leaf, "shape") and not isinstance(leaf, bool | int | float | complex):
            raise TypeError(
                f"{where}: expected an array, got {type(leaf).__name__} ({leaf!r:.40}). Remove it "
                "from the tree, or pass only the arrays."
            )
        dtype = jax.numpy.result_type(leaf) if not hasattr(leaf, "dtype") else leaf.dtype
        if isinstance(dtype, np.dtype) and dtype.name not in DTYPES:
            raise TypeError(
                f"{where}: dtype {dtype.name} is not supported; use one of {', '.join(DTYPES)}."
            )
        check(where, leaf)


def check_dim(where: str, argument: str, dim: int, rank: int) -> int:
    """Returns `dim` counted from the front, or raises ValueError."""
    if isinstance(dim, bool) or not isinstance(dim, int | np.integer):
        raise TypeError(f"{where}: {argument}: expected an int, got {dim!r}.")
    if not -rank <= dim < rank:
        raise ValueError(
            f"{where}: {argument}: expected an array dimension in [{-rank}, {rank}), got {dim}."
        )
    return int(dim) % rank


def check_varies(axes: Axes, where: str, leaf: Any) -> None:
    """Warns, or raises where JAX or `config.strict` forbids it, about a replicated operand.

    Raises:
        ValueError: the leaf does not vary over one of the axes, and `jax_auto_pcast` is off or
            `config.strict` is on.
    """
    if not _compat.tracks_varying_axes() or not isinstance(leaf, jax.core.Tracer):
        return
    varying = jax.typeof(leaf).manual_axis_type.varying
    missing = tuple(name for name in axes.names if name not in varying)
    if not missing:
        return
    to_cast = f'"{missing[0]}"' if len(missing) == 1 else f"({listed(missing)})"
    text = (
        f"{where}: the operand is replicated over {listed(missing)}: it is the same on every rank, "
        f"so that a sum counts it {axes.size} times, and a mean leaves it as it is. Gradients of "
        "replicated parameters are such: JAX has summed them over the axis already. If they should "
        "be local to each rank, cast what they are computed from: "
        f'params = jax.lax.pcast(params, {to_cast}, to="varying").'
    )
    if not _compat.casts_implicitly():
        raise ValueError(text)
    _decisions.warn(text)


def cast_varying(axes: Axes, leaf: Any) -> Any:
    """Returns the leaf as varying over all axes of the call."""
    if not _compat.tracks_varying_axes():
        return leaf
    varying = jax.typeof(leaf).manual_axis_type.varying
    missing = tuple(name for name in axes.names if name not in varying)
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

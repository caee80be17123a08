"""broadcast: every rank gets the root's block.

Bytes moved per rank: S read and written, for an operand of S bytes; the root's stays in place.
"""

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxcoll import _compat, _engine, _nccl_calls
from jaxcoll._config import resolve_backend
from jaxcoll._lowering import Call, Request, lower, native_platform
from jaxcoll._types import AxisName, Backend
from jaxcoll.collectives import _on_lax
from jaxcoll.collectives._arguments import cast_varying, check_axes, check_each_leaf


def broadcast(x: Any, axis_name: AxisName, *, root: int = 0, backend: Backend | None = None) -> Any:
    """Gives every rank of a mesh axis the root's block.

    Args:
        x: an array, or a tree of arrays; any shapes, the dtypes of `all_reduce`, and random keys.
        axis_name: a mapped axis of size p, or a tuple of them.
        root: index of the root on the axis; for a tuple, the flat index, the last name fastest.
        backend: see `jaxcoll.using`.

    Returns:
        The shapes and dtypes of `x`, unvarying over `axis_name`.

    Raises:
        NameError: an axis is not mapped here.
        TypeError: a leaf is not an array, or has another dtype; `root` is not an int.
        ValueError: `root` is no index of the axis, or an unknown `backend`.
        NativeUnavailableError: `backend="native"` where native can't serve.

    Cost: one meeting of the group; S bytes read and written per rank, in place. On `jax.lax` it is
        a sum of the block and zeros.
    Differentiable: yes; the cotangents of all ranks go to the root.
    Deterministic: yes, it copies.

    Example:
        >>> params = jaxcoll.broadcast(params, "data")
    """
    if _on_lax.is_all_there_is("broadcast", backend):
        return _on_lax.broadcast(x, axis_name, root)
    axes = check_axes("broadcast", x, axis_name)
    resolved = resolve_backend("broadcast", backend)
    if isinstance(root, bool) or not isinstance(root, int | np.integer):
        raise TypeError(f"{axes.call}: root: expected an int, got {root!r}.")
    if not 0 <= root < axes.size:
        raise ValueError(f"{axes.call}: root: expected an index in range({axes.size}), got {root}.")
    check_each_leaf(axes, x, lambda where, leaf: None)

    def send(leaf: Any) -> Any:
        if not isinstance(leaf, jax.core.Tracer):
            return jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = send(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return broadcast_p.bind(
            cast_varying(axes, leaf), axes=axes.names, root=int(root), backend=resolved
        )

    return jax.tree.map(send, x)


# ---- The primitive -------------------------------------------------------------------------------

broadcast_p = Primitive("broadcast_from_root")


def _abstract_eval(
    aval: Any, *, axes: tuple[str, ...], root: int, backend: Backend
) -> tuple[Any, set[Any]]:
    del root, backend
    if _compat.tracks_varying_axes():
        mat = aval.manual_axis_type
        aval = aval.update(manual_axis_type=mat.update(varying=mat.varying - set(axes)))
    else:
        aval = _compat.without_weak_type(aval)
    return aval, _compat.named_axis_effects(axes)


broadcast_p.def_effectful_abstract_eval(_abstract_eval)


def _transpose(
    cotangent: Any, operand: Any, *, axes: tuple[str, ...], root: int, backend: Backend
) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(operand.aval)]
    if _compat.tracks_varying_axes():
        total = lax.pcast(cotangent, axes, to="varying")
    else:
        # Without typed axes every rank has a cotangent of its own. Imported here: the two ops are
        # each other's peers.
        from jaxcoll.collectives.all_reduce import all_reduce

        total = all_reduce(cotangent, axes, backend=backend)
    return [jnp.where(lax.axis_index(axes) == root, total, jnp.zeros_like(total))]


ad.deflinear2(broadcast_p, _transpose)


def _batch(
    axis_data: Any,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    axes: tuple[str, ...],
    root: int,
    backend: Backend,
) -> tuple[Any, int | None]:
    (x,), (dim,) = operands, dims
    if axis_data.name not in axes:
        return broadcast_p.bind(x, axes=axes, root=root, backend=backend), dim
    sizes = [
        axis_data.size if axis == axis_data.name else _compat.bound_axes()[axis] for axis in axes
    ]
    indices = [int(i) for i in np.unravel_index(root, sizes)]
    at = axes.index(axis_data.name)
    if dim is not None:
        x = lax.index_in_dim(x, indices[at], axis=dim, keepdims=False)
    remaining = axes[:at] + axes[at + 1 :]
    if not remaining:
        return x, None
    rest = [
        (size, index) for i, (size, index) in enumerate(zip(sizes, indices, strict=True)) if i != at
    ]
    flat = int(np.ravel_multi_index([index for _, index in rest], [size for size, _ in rest]))
    return broadcast_p.bind(x, axes=remaining, root=flat, backend=backend), None


batching.fancy_primitive_batchers[broadcast_p] = _batch


def _lower(
    ctx: mlir.LoweringRuleContext, x: Any, *, axes: tuple[str, ...], root: int, backend: Backend
) -> Sequence[Any]:
    (aval,) = ctx.avals_in
    size = aval.size * aval.dtype.itemsize
    return lower(
        ctx,
        Request("broadcast", axes, backend, copied=size, parameters=f"root={root}"),
        lambda _: (
            Call({"bytes": size, "root": root}, [x.type], in_place=True)
            if native_platform(ctx) == "cpu"
            else _nccl_calls.broadcast(ctx, x, root)
        ),
        [x],
        lambda: _lower_to_lax(ctx, x, axes, root),
        lambda levels: ft.partial(
            _on_lax.send, axes=axes, root=root, total=lambda y: levels.all_reduce("sum", y)[0]
        ),
    )


def _lower_to_lax(
    ctx: mlir.LoweringRuleContext, x: Any, axes: tuple[str, ...], root: int
) -> Sequence[Any]:
    with _compat.without_varying_axes():
        return mlir.lower_fun(lambda x: _on_lax.send(x, axes, root), multiple_results=False)(
            _compat.untyped(ctx), x
        )


mlir.register_lowering(broadcast_p, _lower, cacheable=False)
_engine.depends_on_places(broadcast_p)

"""all_reduce: reduce a tree over a mesh axis; every rank gets the result.

One equation for the whole tree, and one native call: every rank's block is read once and every
rank's result is written while the block is in cache, in place. Bytes moved per rank: S read, S
written, for a tree of S bytes.
"""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxcoll import _compat, _engine
from jaxcoll._config import resolve_backend
from jaxcoll._errors import one_of
from jaxcoll._lax_rules import all_reduce_call, reduction_text
from jaxcoll._lowering import Request, lower
from jaxcoll._types import (
    REDUCE_OPS,
    AxisIndexGroups,
    AxisName,
    Backend,
    ReduceOp,
    reduction_problem,
)
from jaxcoll.collectives import _on_lax
from jaxcoll.collectives._arguments import (
    Axes,
    cast_varying,
    check_axes,
    check_each_leaf,
    check_equal_groups,
    check_varies,
)

_LINEAR = ("sum", "mean")


def all_reduce(
    tree: Any,
    axis_name: AxisName,
    op: ReduceOp = "sum",
    *,
    axis_index_groups: AxisIndexGroups | None = None,
    backend: Backend | None = None,
) -> Any:
    r"""Reduces every leaf of a tree over a mesh axis; every rank gets the result.

    With p ranks on `axis_name`, every rank returns :math:`x_0 \circ x_1 \circ \dots \circ x_{p-1}`
    for each leaf. Works wherever `jax.lax.psum`, `pmean`, `pmax` and `pmin` do, with their values,
    types and gradients.

    Args:
        tree: a pytree of arrays of any shapes; f64 f32 f16 bf16 c64 c128, i8 to i64, u8 to u64 and
            bool (which `sum`, `mean` and `prod` take as int32).
        axis_name: a mapped axis, or a tuple of them.
        op: `"sum"`, `"mean"`, `"max"`, `"min"`, `"prod"`; `"and"` and `"or"`, bitwise on integers.
        axis_index_groups: reduces within each of these groups of axis indices instead. Under
            `check_vma=True` the result is then typed as varying.
        backend: see `jaxcoll.using`.

    Returns:
        The tree with the same shapes and dtypes (floating point for a `mean` of integers),
        unvarying over `axis_name`.

    Raises:
        NameError: an axis is not mapped here.
        TypeError: a leaf is not an array, or `op` has no meaning for its dtype.
        ValueError: an unknown `op` or `backend`; groups that don't partition the axis.
        NativeUnavailableError: `backend="native"` where native can't serve.

    Cost: one meeting of the group for the whole tree (a second one for the integers in a `mean`);
        S bytes read and S written per rank, in place.
    Differentiable: `sum` and `mean` as `lax.psum` and `pmean`; `max` and `min`, with the cotangent
        going to the ranks that hold the extremum, in equal shares among ties. The others are not.
    Deterministic: yes, in rank order; f16 and bf16 are summed in f32 and rounded once.

    Example:
        >>> grads = jaxcoll.all_reduce(grads, "data", op="mean")
    """
    if not isinstance(op, str) or op not in REDUCE_OPS:
        raise ValueError(one_of("all_reduce", "op", op, tuple(REDUCE_OPS)))
    if _on_lax.is_all_there_is("all_reduce", backend):
        return _on_lax.all_reduce(tree, axis_name, op, axis_index_groups)
    axes = check_axes("all_reduce", tree, axis_name, axis_index_groups)
    resolved = resolve_backend("all_reduce", backend)
    if op not in ("sum", "max", "min"):
        check_equal_groups(axes, f"for {op}")

    def check(where: str, leaf: Any) -> None:
        if problem := reduction_problem(op, jnp.result_type(leaf)):
            raise TypeError(f"{where}: {problem}.")
        check_varies(axes, where, leaf)

    check_each_leaf(axes, tree, check)
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(_reduce(leaves, axes, op, resolved))


def _reduce(leaves: list[Any], axes: Axes, op: ReduceOp, backend: Backend) -> list[Any]:
    """Reduces traced leaves in one equation, and constants without communication, as lax does."""
    results = list(leaves)
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
    for i in set(range(len(leaves))) - set(traced):
        results[i] = _reduce_constant(leaves[i], axes, op)
    operands = []
    for i in traced:
        leaf = leaves[i]
        if op in ("sum", "mean", "prod") and leaf.dtype == np.bool_:
            leaf = leaf.astype(np.int32)
        operands.append(cast_varying(axes, leaf))
    by_op: dict[ReduceOp, list[int]] = {}
    for at, operand in enumerate(operands):
        inexact = jnp.issubdtype(operand.dtype, np.inexact)
        by_op.setdefault("sum" if op == "mean" and not inexact else op, []).append(at)
    for part_op, ats in by_op.items():
        reduced = all_reduce_p.bind(
            *(operands[at] for at in ats),
            op=part_op,
            axes=axes.names,
            axis_index_groups=axes.groups,
            backend=backend,
        )
        for at, result in zip(ats, reduced, strict=True):
            # The mean of integers is a float: their sum, divided as lax.pmean does it.
            results[traced[at]] = result / axes.size if part_op != op else result
    return results


def _reduce_constant(leaf: Any, axes: Axes, op: ReduceOp) -> Any:
    if op in ("sum", "mean"):
        reduce = lax.psum if op == "sum" else lax.pmean
        with _compat.without_varying_axes():
            return reduce(leaf, axes.names, axis_index_groups=axes.groups)
    if op == "prod":
        leaf = jnp.asarray(leaf)
        leaf = leaf.astype(np.int32) if leaf.dtype == np.bool_ else leaf
        return lax.integer_pow(_on_lax.widened(leaf), axes.size).astype(leaf.dtype)
    leaf = jnp.asarray(leaf)
    return leaf if _compat.tracks_varying_axes() else lax.convert_element_type(leaf, leaf.dtype)


# ---- The primitive -------------------------------------------------------------------------------

all_reduce_p = Primitive("all_reduce")
all_reduce_p.multiple_results = True


def _abstract_eval(
    *avals: Any, op: ReduceOp, axes: tuple[str, ...], axis_index_groups: Any, backend: Backend
) -> tuple[list[Any], set[Any]]:
    typed = _compat.tracks_varying_axes()

    def result_type(aval: Any) -> Any:
        if not typed:
            return _compat.without_weak_type(aval)
        if axis_index_groups is not None:
            return aval
        mat = aval.manual_axis_type
        return aval.update(manual_axis_type=mat.update(varying=mat.varying - set(axes)))

    return [result_type(aval) for aval in avals], _compat.named_axis_effects(axes)


all_reduce_p.def_effectful_abstract_eval(_abstract_eval)


# ---- Derivatives ---------------------------------------------------------------------------------


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, op: ReduceOp, **params: Any
) -> tuple[Sequence[Any], Sequence[Any]]:
    results = all_reduce_p.bind(*primals, op=op, **params)
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    out_tangents: list[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    if not moving:
        return results, out_tangents
    if op in _LINEAR:
        moved = all_reduce_p.bind(*(tangents[i] for i in moving), op=op, **params)
    elif op in ("max", "min"):
        moved = _extremum_tangents(
            [primals[i] for i in moving],
            [results[i] for i in moving],
            [tangents[i] for i in moving],
            params,
        )
    else:
        raise NotImplementedError(
            f'all_reduce(x, {params["axes"]}, op="{op}") has no derivative. Differentiate "sum", '
            '"mean", "max" or "min", or stop the gradient with jax.lax.stop_gradient.'
        )
    for i, tangent in zip(moving, moved, strict=True):
        out_tangents[i] = tangent
    return results, out_tangents


ad.primitive_jvps[all_reduce_p] = _jvp


def _extremum_tangents(
    primals: list[Any], results: list[Any], tangents: list[Any], params: dict[str, Any]
) -> list[Any]:
    """Averages the tangents of the ranks that hold the extremum."""
    axes = Axes("all_reduce", params["axes"], 0, params["axis_index_groups"])
    shares, holders = [], []
    for x, y, tangent in zip(primals, results, tangents, strict=True):
        holds = lax.eq(x, cast_varying(axes, y))
        shares.append(jnp.where(holds, tangent, jnp.zeros_like(tangent)))
        holders.append(holds.astype(x.dtype))
    # Two calls: in one, the counts would seem to depend on the tangents.
    counts = all_reduce_p.bind(*holders, op="sum", **params)
    sums = all_reduce_p.bind(*shares, op="sum", **params)
    return [share / count for share, count in zip(sums, counts, strict=True)]


def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    op: ReduceOp,
    axes: tuple[str, ...],
    axis_index_groups: Any,
    backend: Backend,
) -> list[Any]:
    """Casts to varying where axes are typed; reduces again where they are not, as lax.psum does."""
    given = [i for i, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    results: list[Any] = list(cotangents)
    if _compat.tracks_varying_axes() and axis_index_groups is None:
        size = math.prod(_compat.bound_axes()[axis] for axis in axes)
        for i in given:
            share = cotangents[i] / size if op == "mean" else cotangents[i]
            results[i] = lax.pcast(share, axes, to="varying")
    elif given:
        reduced = all_reduce_p.bind(
            *(cotangents[i] for i in given),
            op=op,
            axes=axes,
            axis_index_groups=axis_index_groups,
            backend=backend,
        )
        for i, cotangent in zip(given, reduced, strict=True):
            results[i] = cotangent
    return [
        ad.Zero(operand.aval) if type(result) is ad.Zero else result
        for operand, result in zip(operands, results, strict=True)
    ]


ad.primitive_transposes[all_reduce_p] = _transpose


# ---- Batching ------------------------------------------------------------------------------------

_LOCAL: dict[str, Callable[..., Any]] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
    "and": jnp.bitwise_and.reduce,
    "or": jnp.bitwise_or.reduce,
}


def _batch(
    axis_data: Any,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    op: ReduceOp,
    axes: tuple[str, ...],
    axis_index_groups: Any,
    backend: Backend,
) -> tuple[Sequence[Any], Sequence[int | None]]:
    if axis_data.name not in axes:
        results = all_reduce_p.bind(
            *operands, op=op, axes=axes, axis_index_groups=axis_index_groups, backend=backend
        )
        return results, dims
    if axis_index_groups is not None:
        raise NotImplementedError(
            f"all_reduce(x, {axes}): axis_index_groups is not supported over the vmapped axis "
            f'"{axis_data.name}" (nor is it in jax.lax); use it under jax.shard_map.'
        )
    # In float32 until the very end: half precision is rounded once.
    local = [
        _reduce_locally(op, _on_lax.widened(operand), dim, axis_data.size)
        for operand, dim in zip(operands, dims, strict=True)
    ]
    remaining = tuple(axis for axis in axes if axis != axis_data.name)
    if remaining:
        local = all_reduce_p.bind(
            *local, op=op, axes=remaining, axis_index_groups=None, backend=backend
        )
    results = [x.astype(operand.dtype) for x, operand in zip(local, operands, strict=True)]
    return results, [None] * len(results)


batching.fancy_primitive_batchers[all_reduce_p] = _batch


def _reduce_locally(op: ReduceOp, x: Any, dim: int | None, size: int) -> Any:
    """Reduces over a vmapped dimension; an operand without one is the same at every index."""
    if dim is not None:
        return _LOCAL[op](x, axis=dim).astype(x.dtype)
    if op == "sum":
        return x * jnp.asarray(size, x.dtype)
    return lax.integer_pow(x, size) if op == "prod" else x


# ---- Lowering ------------------------------------------------------------------------------------


def _lower(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    op: ReduceOp,
    axes: tuple[str, ...],
    axis_index_groups: Any,
    backend: Backend,
) -> Sequence[Any]:
    return lower(
        ctx,
        Request(
            *("all_reduce", axes, backend, axis_index_groups),
            reduction=op,
            parameters=reduction_text(op),
        ),
        lambda groups: all_reduce_call(ctx, operands, op, groups),
        operands,
        lambda: _lower_to_lax(ctx, operands, op, axes, axis_index_groups),
        lambda levels: ft.partial(levels.all_reduce, op),
    )


def _lower_to_lax(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Any],
    op: ReduceOp,
    axes: tuple[str, ...],
    axis_index_groups: Any,
) -> Sequence[Any]:
    def on_lax(*xs: Any) -> list[Any]:
        return [_on_lax.reduce(op, axes, axis_index_groups, x) for x in xs]

    with _compat.without_varying_axes():
        return mlir.lower_fun(on_lax, multiple_results=True)(_compat.untyped(ctx), *operands)


mlir.register_lowering(all_reduce_p, _lower, cacheable=False)
_engine.depends_on_places(all_reduce_p)

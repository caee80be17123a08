"""Native lowering of lax's own collectives: under our functions, and under `accelerate_lax`.

lax's collectives have the right types, gradients and batching, so most of our functions bind them,
under a mark. The rules that are registered here lower marked equations through `_lowering.lower`.
Equations without a mark, from lax's own functions, do the same while `accelerate_lax` is on, and
else go to lax's rule untouched.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

import jaxcoll._clones
import jaxcoll._predicates  # noqa: F401  (watches the branches that collectives stand in)
from jaxcoll import _compat, _door, _engine, _native, _nccl_calls
from jaxcoll._config import accelerates_lax, refuse_after_fork, resolve_backend
from jaxcoll._hosts import TwoLevel
from jaxcoll._lowering import (
    Call,
    Context,
    Groups,
    Request,
    lower,
    native_platform,
    note,
)
from jaxcoll._lowering import marked as marked
from jaxcoll._types import DTYPES, HALF_PRECISION, MARK, REDUCE_OPS, reduction_problem

Params = dict[str, Any]

# Of a permutation, that texts show.
_MOST_PAIRS = 8


# ---- The native calls ----------------------------------------------------------------------------


def all_reduce_call(
    ctx: Context, operands: Sequence[Any], reduction: str, groups: Groups
) -> Call | str:
    """Returns the call for a whole tree, in place, or why there is none."""
    if native_platform(ctx) == "cuda":
        return _nccl_calls.all_reduce(ctx, operands, reduction, groups)
    for aval in ctx.avals_in:
        if problem := reduction_problem(reduction, aval.dtype):
            return problem
        if aval.dtype == np.bool_ and reduction in ("sum", "mean", "prod"):
            return f"bool has no native {reduction}"
    attributes = {
        "op": REDUCE_OPS[reduction],
        "dtypes": [DTYPES[aval.dtype.name] for aval in ctx.avals_in],
        "counts": [aval.size for aval in ctx.avals_in],
    }
    return Call(attributes, [operand.type for operand in operands], in_place=True)


def _all_gather(ctx: Context, x: Any, params: Params, groups: Groups) -> Call:
    del groups
    (aval,) = ctx.avals_in
    (out,) = ctx.avals_out
    dim = params["all_gather_dimension"]
    layout = {
        "outer": math.prod(aval.shape[:dim]),
        "inner": math.prod(aval.shape[dim:]) * aval.dtype.itemsize,
    }
    return Call(layout, [_typed_like(x, out.shape)])


def _reduce_scatter(ctx: Context, x: Any, params: Params, groups: Groups) -> Call | str:
    (aval,) = ctx.avals_in
    (out,) = ctx.avals_out
    if problem := reduction_problem("sum", aval.dtype):
        return problem
    if aval.dtype == np.bool_:
        return "bool has no native sum"
    dim = params["scatter_dimension"]
    layout = {
        "op": REDUCE_OPS["sum"],
        "dtype": DTYPES[aval.dtype.name],
        "outer": math.prod(aval.shape[:dim]),
        "inner": math.prod(aval.shape[dim + 1 :]) * (aval.shape[dim] // len(groups[0])),
    }
    return Call(layout, [_typed_like(x, out.shape)])


def _all_to_all(ctx: Context, x: Any, params: Params, groups: Groups) -> Call | str:
    (aval,) = ctx.avals_in
    (out,) = ctx.avals_out
    size, split, concat = len(groups[0]), params["split_axis"], params["concat_axis"]
    layout = {
        "bytes": aval.size * aval.dtype.itemsize,
        "layout": all_to_all_layout(aval.shape, aval.dtype.itemsize, split, concat, size),
    }
    return Call(layout, [_typed_like(x, out.shape)])


def _ppermute(ctx: Context, x: Any, params: Params, groups: Groups) -> Call | str:
    (aval,) = ctx.avals_in
    if any(group != sorted(group) for group in groups):
        # What an index then means depends on lax's version: let lax decide, or refuse.
        return "the axes are not in the mesh's order"
    size = len(groups[0])
    sources = [-1] * size
    for source, target in params["perm"]:
        sources[target % size] = source % size
    return Call({"bytes": aval.size * aval.dtype.itemsize, "sources": sources}, [x.type])


def all_to_all_layout(
    shape: Sequence[int], itemsize: int, split: int, concat: int, size: int
) -> tuple[int, ...]:
    """Returns the figures of csrc/host/copy_work.h, ExchangeLayout, all in bytes.

    Rank r's block goes to place r of dimension `concat`; block r of dimension `split` to rank r.
    With the dimensions named by size, (A, S, B, C, D) for split before concat and (A, C, B, S, D)
    after it, the longest contiguous run starts at the later of the two.
    """
    part = shape[split] // size  # of the split dimension, what each rank gets
    if split == concat:
        rows, columns = 1, math.prod(shape[:split])
        run = part * math.prod(shape[split + 1 :]) * itemsize
        return (rows, columns, run, run, 0, size * run, run, 0, size * run)
    rows = math.prod(shape[: min(split, concat)])
    between = math.prod(shape[min(split, concat) + 1 : max(split, concat)])
    after = math.prod(shape[max(split, concat) + 1 :])
    joined = shape[concat]
    if split < concat:
        run = joined * after * itemsize
        columns = part * between
        return (
            *(rows, columns, run),
            *(columns * run, size * columns * run, run),
            *(run, columns * size * run, size * run),
        )
    run = part * after * itemsize
    columns = joined * between
    return (
        *(rows, columns, run),
        *(run, columns * size * run, size * run),
        *(columns * run, size * columns * run, run),
    )


def _typed_like(x: ir.Value, shape: Sequence[int]) -> ir.Type:
    return ir.RankedTensorType.get(list(shape), ir.RankedTensorType(x.type).element_type)


_COPIES: dict[str, Callable[[Context, Any, Params, Groups], Call | str]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
}


def _gathered_on_hosts(levels: TwoLevel, x: Any, params: Params, _: Any) -> Any:
    dim = params["all_gather_dimension"]
    return levels.all_gather(x if params["tiled"] else jnp.expand_dims(x, dim), dim)


def _scattered_on_hosts(levels: TwoLevel, x: Any, params: Params, _: Any) -> Any:
    dim = params["scatter_dimension"]
    y = levels.reduce_scatter(x, dim)
    return y if params["tiled"] else jnp.squeeze(y, dim)


_ON_HOSTS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda levels, x, params, reduction: levels.all_reduce(reduction, x)[0],
    "all_gather": _gathered_on_hosts,
    "reduce_scatter": _scattered_on_hosts,
}

# ---- What texts say of a call --------------------------------------------------------------------


def reduction_text(reduction: str) -> str:
    """Returns a reduction as texts show it."""
    return f"op={reduction}"


def _perm_text(perm: Sequence[tuple[int, int]]) -> str:
    """Returns the pairs in order of their sources, so that equal permutations have one text."""
    pairs = [f"{source}>{target}" for source, target in sorted(perm)]
    shown = pairs[:_MOST_PAIRS] + ["..."] * (len(pairs) > _MOST_PAIRS)
    return f"perm={' '.join(shown) or 'none'}"


# The parameters of lax's equations, by the names that our functions and lax's have for them.
_PARAMETERS: dict[str, Callable[[Params], str]] = {
    "all_gather": lambda params: f"axis={params['all_gather_dimension']}",
    "reduce_scatter": lambda params: f"scatter_dimension={params['scatter_dimension']}",
    "all_to_all": lambda params: (
        f"split_axis={params['split_axis']}, concat_axis={params['concat_axis']}"
    ),
    "ppermute": lambda params: _perm_text(params["perm"]),
}


def _parameters(op: str, reduction: str | None, params: Params) -> str:
    """Returns those in which ranks may differ, as texts show them."""
    texts = [_PARAMETERS[op](params)] if op in _PARAMETERS else []
    return ", ".join([*texts, *([reduction_text(reduction)] if reduction else [])])


# ---- The rules -----------------------------------------------------------------------------------


def _replace_rule(primitive: Primitive, platform: str | None, op: str, reduction: str | None):
    """Puts ours in the place of the primitive's rule for a platform; None: where it has no own."""
    lax_rule = _compat.lax_rule(primitive, platform)

    def rule(ctx: Context, x: ir.Value, **params: Any) -> Sequence[ir.Value]:
        (aval,) = ctx.avals_in
        mark = _compat.equation_metadata(ctx).get(MARK)
        names = params["axes"] if "axes" in params else params["axis_name"]
        names = tuple(names) if isinstance(names, tuple | list) else (names,)
        request = Request(
            op=op,
            axes=tuple(name for name in names if isinstance(name, str)),
            # Programs that know lax alone are never refused.
            backend=mark or ("lax" if resolve_backend(op, None) == "lax" else "auto"),
            axis_index_groups=params.get("axis_index_groups"),
            reduction=reduction,
            called="jax.lax" if mark is None else "jaxcoll",
            copied=None if op == "all_reduce" else aval.size * aval.dtype.itemsize,
            parameters=_parameters(op, reduction, params),
        )
        if not request.axes:  # over dimensions of the array alone
            return lax_rule(ctx, x, **params)
        refuse_after_fork(f"jax.lax, for {op}")
        if mark is None and not accelerates_lax():
            groups = _compat.replica_groups(ctx, request.axes, request.axis_index_groups)
            missing = None if request.backend == "lax" else _native.missing_reason()
            note(ctx, request, groups, missing or "jaxcoll.accelerate_lax() is off")
            return lax_rule(ctx, x, **params)

        def lower_to_lax() -> Sequence[ir.Value]:
            (out,) = ctx.avals_out
            if out.size == 0 and isinstance(out.dtype, np.dtype) and op != "all_reduce":
                # XLA refuses to gather or scatter along a dimension of length zero.
                return [_empty(ctx, x)]
            if op == "all_gather" and _door.is_open() and _is_small_float(aval.dtype):
                return _as_bits(ctx, x, lax_rule, params)
            is_on_gloo = jax.process_count() > 1 and native_platform(ctx) != "cuda"
            if op == "reduce_scatter" and is_on_gloo and not _door.is_open():
                return _summed_and_sliced(ctx, x, params)
            reduces = op == "reduce_scatter" or (op == "all_reduce" and _door.is_open())
            if reduces and ctx.avals_in[0].dtype.name in HALF_PRECISION:
                return _in_float32(ctx, x, lax_rule, params)
            return lax_rule(ctx, x, **params)

        def make_call(groups: Groups) -> Call | str:
            if len(request.axes) < len(names):
                return "lax.psum over a dimension of the array as well"
            if not isinstance(aval.dtype, np.dtype) or not _is_whole_bytes(aval.dtype):
                return f"dtype {aval.dtype} is not supported"
            if reduction is not None and op == "all_reduce":
                return all_reduce_call(ctx, [x], reduction, groups)
            copies = _COPIES if native_platform(ctx) == "cpu" else _nccl_calls.COPIES
            return copies[op](ctx, x, params, groups)

        def on_hosts(levels: TwoLevel) -> Callable[..., Any]:
            return lambda x: _ON_HOSTS[op](levels, x, params, reduction)

        return lower(
            ctx, request, make_call, [x], lower_to_lax, on_hosts if op in _ON_HOSTS else None
        )

    # Equal equations are lowered once and inlined unless that is switched off; then they would
    # share one position in the module and one source line.
    mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)
    _engine.depends_on_places(primitive)


def _empty(ctx: Context, x: ir.Value) -> ir.Value:
    (out,) = ctx.avals_out
    zeros = mlir.lower_fun(lambda _: jnp.zeros(out.shape, out.dtype), multiple_results=False)
    with _compat.without_varying_axes():
        (result,) = zeros(_compat.untyped(ctx), x)
    return result


def _is_whole_bytes(dtype: np.dtype) -> bool:
    return "int4" not in dtype.name and "int2" not in dtype.name and dtype.itemsize >= 1


def _summed_and_sliced(ctx: Context, x: ir.Value, params: Params) -> Sequence[ir.Value]:
    """A reduce_scatter without Gloo's, which is wrong at times for large chunks (jax#40830)."""
    axes, groups, dim = (
        params["axis_name"],
        params["axis_index_groups"],
        params["scatter_dimension"],
    )

    def sliced(x: Any) -> Any:
        wide = x.astype(np.float32) if x.dtype.name in HALF_PRECISION else x
        total = lax.psum(wide, axes, axis_index_groups=groups).astype(x.dtype)
        index = lax.axis_index(axes)
        size = lax.axis_size(axes)
        if groups is not None:
            size = len(groups[0])
            place = np.zeros(sum(map(len, groups)), np.int32)
            for group in groups:
                place[list(group)] = np.arange(size)
            index = jnp.asarray(place)[index]
        length = x.shape[dim] // size
        part = lax.dynamic_slice_in_dim(total, index * length, length, axis=dim)
        return part if params["tiled"] else lax.squeeze(part, [dim])

    with _compat.without_varying_axes():
        return mlir.lower_fun(sliced, multiple_results=False)(_compat.untyped(ctx), x)


def _in_float32(
    ctx: Context, x: ir.Value, lax_rule: Callable[..., Any], params: Params
) -> Sequence[ir.Value]:
    """Runs lax's rule on float32 and rounds its result once."""
    (aval,) = ctx.avals_in
    (out,) = ctx.avals_out
    wide = ctx.replace(
        avals_in=[aval.update(dtype=np.dtype("float32"))],
        avals_out=[out.update(dtype=np.dtype("float32"))],
    )
    f32 = ir.F32Type.get()
    widened = stablehlo.convert(ir.RankedTensorType.get(list(aval.shape), f32), x)
    (result,) = lax_rule(wide, widened, **params)
    return [stablehlo.convert(_typed_like(x, out.shape), result)]


def _is_small_float(dtype: Any) -> bool:
    """Tells whether XLA gathers the type as float16, for which it has no MPI type."""
    return isinstance(dtype, np.dtype) and dtype.name.startswith(("float16", "float8"))


def _as_bits(
    ctx: Context, x: ir.Value, lax_rule: Callable[..., Any], params: Params
) -> Sequence[ir.Value]:
    """Runs lax's rule for a copy on integers of the same size."""
    (aval,) = ctx.avals_in
    (out,) = ctx.avals_out
    bits = np.dtype(f"uint{8 * aval.dtype.itemsize}")
    as_bits = ctx.replace(avals_in=[aval.update(dtype=bits)], avals_out=[out.update(dtype=bits)])
    integer = ir.IntegerType.get_unsigned(8 * aval.dtype.itemsize)
    cast = stablehlo.bitcast_convert(ir.RankedTensorType.get(list(aval.shape), integer), x)
    (result,) = lax_rule(as_bits, cast, **params)
    return [stablehlo.bitcast_convert(_typed_like(x, out.shape), result)]


if _compat.problem() is None:
    for _op, _reduction, _primitive in _compat.lax_primitives():
        for _platform in _compat.platforms_with_rules(_primitive):
            _replace_rule(_primitive, _platform, _op, _reduction)

"""From an equation to a native custom call, or to lax: the choice, the call, the marks.

lax's own collectives have the right types, gradients and batching. Our functions bind them under a
mark, an entry of `set_xla_metadata` that survives every transformation, and the CPU rules that are
registered here lower marked equations to native calls. Equations without a mark go to lax's rule
untouched. Ops that lax lacks have primitives of their own and call `lower` from their own rules.

Every native call has the operands (logical id, token, leaves...) and the results (token,
leaves...). The token comes from the block's previous native call, so that the order of the program
stands in the HLO; which call meets which does not depend on it.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jaxcoll import _compat, _native
from jaxcoll._config import logger
from jaxcoll._errors import NativeUnavailableError
from jaxcoll._types import DTYPES, HALF_PRECISION, REDUCE_OPS, Backend, reduction_problem

_MARK = "jaxcoll"
# csrc/host/work.h, kMaxRanks: the engine keeps a pointer for each rank on the stack.
_MAX_GROUP = 256

# Where "auto" takes lax although native can serve: only copies, which give the same bits, and only
# where benchmarks/results show native behind.
_LAX_FROM_BYTES = {"ppermute": 4 << 20}

Context = mlir.LoweringRuleContext
Groups = list[list[int]]


def marked(backend: Backend) -> AbstractContextManager[Any]:
    """Marks the lax collectives that are bound inside for the native path."""
    return set_xla_metadata(**{_MARK: backend})


@dataclasses.dataclass(frozen=True)
class Call:
    """A native call, all but its operands.

    Attributes:
        op: our name of the op; the target is `jaxcoll_<op>`.
        axes: the mesh axes, for texts.
        groups: logical ids of each group's members, in rank order.
        attributes: what the op's csrc/ffi file reads besides the groups.
        result_types: one for each leaf.
        in_place: whether result i takes the memory of operand i.
    """

    op: str
    axes: Sequence[str]
    groups: Groups
    attributes: Mapping[str, int | Sequence[int]]
    result_types: Sequence[ir.Type]
    in_place: bool = False


def lower(
    ctx: Context,
    backend: Backend,
    axes: Sequence[str],
    axis_index_groups: Any,
    make_call: Callable[[Groups], Call | str],
    operands: Sequence[ir.Value],
    lower_to_lax: Callable[[], Sequence[ir.Value]],
) -> Sequence[ir.Value]:
    """Lowers one collective natively where that is possible, else through `lower_to_lax`.

    `make_call` gets the groups and returns the call, or says why there is none for these operands.
    """
    reason = _lax_reason(ctx, backend)
    call: Call | None = None
    if reason is None:
        groups = _compat.replica_groups(ctx, axes, axis_index_groups)
        if max(map(len, groups)) == 1:
            return lower_to_lax()  # nothing to communicate, which lax knows
        reason = _group_reason(groups)
        if reason is None:
            made = make_call(groups)
            call, reason = (None, made) if isinstance(made, str) else (made, None)
    if call is not None:
        return _emit(ctx, call, operands)
    if backend == "native":
        raise NativeUnavailableError(
            f'{ctx.primitive}: backend="native" can\'t be served: {reason}. '
            'Use backend="auto" to let this call run on jax.lax.'
        )
    if backend == "auto":
        logger.debug("jaxcoll: %s runs on jax.lax: %s", ctx.primitive, reason)
    return lower_to_lax()


def _lax_reason(ctx: Context, backend: Backend) -> str | None:
    """Says why no native call can stand in this program, or None."""
    if backend == "lax":
        return 'backend="lax" was asked for'
    if problem := _compat.problem():
        return problem
    if tuple(ctx.module_context.platforms) != ("cpu",):
        return f"the program is for {', '.join(ctx.module_context.platforms)}, not for CPU alone"
    if _compat.lowers_for_export(ctx):
        return "the program is lowered for export"
    if (manual := _compat.manual_axes(ctx)) is None:
        return "the call is not in a manual region (shard_map or pmap)"
    if left := manual[1] - manual[0]:
        return f"shard_map leaves the mesh axes {sorted(left)} to the compiler"
    if jax.process_count() > 1:  # this also starts JAX's clients, which registration below needs
        return "the job has several processes"
    return _native.unavailable_reason()


def _group_reason(groups: Groups) -> str | None:
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        return f"the groups differ in size ({sorted(sizes)})"
    if max(sizes) > _MAX_GROUP:
        return f"a group has {max(sizes)} members, more than {_MAX_GROUP}"
    return None


def _emit(ctx: Context, call: Call, operands: Sequence[ir.Value]) -> Sequence[ir.Value]:
    memory = _compat.module_memory(ctx)
    position = memory["calls"] = memory.get("calls", 0) + 1
    tokens = memory.setdefault("tokens", {})
    block = ir.InsertionPoint.current.block
    token = tokens.get(block)
    if token is None:
        token = stablehlo.create_token()

    types = ", ".join(_type_text(operand.type) for operand in operands[:4])
    types += f" and {len(operands) - 4} more" if len(operands) > 4 else ""
    site = _site_id(_compat.module_name(ctx), position, call, types)
    axes = ", ".join(f'"{axis}"' for axis in call.axes)
    _native.describe_site(
        site,
        f"{call.op} over {axes or 'no axis'} of {types}, called at {_compat.source_line(ctx)}",
    )

    attributes: dict[str, int | Sequence[int]] = {
        "site": site,
        "groups": [member for group in call.groups for member in group],
        "group_size": len(call.groups[0]),
        **call.attributes,
    }
    layouts = [tuple(reversed(range(ir.RankedTensorType(o.type).rank))) for o in operands]
    result_layouts = [
        tuple(reversed(range(ir.RankedTensorType(t).rank))) for t in call.result_types
    ]
    custom_call = _compat.custom_call(
        f"jaxcoll_{call.op}",
        result_types=[token.type, *call.result_types],
        operands=[stablehlo.partition_id(), token, *operands],
        backend_config={name: _attribute(value) for name, value in attributes.items()},
        operand_layouts=[(), (), *layouts],
        result_layouts=[(), *result_layouts],
        operand_output_aliases=(
            {i + 2: i + 1 for i in range(len(operands))} if call.in_place else None
        ),
    )
    tokens[block] = custom_call.results[0]
    return list(custom_call.results)[1:]


def _type_text(tensor: ir.Type) -> str:
    """Returns a type as in f32[8,128]."""
    ranked = ir.RankedTensorType(tensor)
    return f"{ranked.element_type}[{','.join(map(str, ranked.shape))}]"


def _attribute(value: int | Sequence[int]) -> ir.Attribute:
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
    return ir.DenseI64ArrayAttr.get(list(value))


def _site_id(module: str, position: int, call: Call, types: str) -> int:
    """Identifies a call site by what it is and where it stands: the same on every process."""
    text = repr((module, position, call.op, call.groups, sorted(call.attributes.items()), types))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# ---- lax's primitives ----------------------------------------------------------------------------


def _all_gather(ctx: Context, x: Any, params: dict[str, Any], groups: Groups) -> Call:
    (aval,) = ctx.avals_in
    (out,) = ctx.avals_out
    dim = params["all_gather_dimension"]
    layout = {
        "outer": math.prod(aval.shape[:dim]),
        "inner": math.prod(aval.shape[dim:]) * aval.dtype.itemsize,
    }
    return Call("all_gather", params["axis_name"], groups, layout, [_typed_like(x, out.shape)])


def _reduce_scatter(ctx: Context, x: Any, params: dict[str, Any], groups: Groups) -> Call | str:
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
    return Call("reduce_scatter", params["axis_name"], groups, layout, [_typed_like(x, out.shape)])


def _all_to_all(ctx: Context, x: Any, params: dict[str, Any], groups: Groups) -> Call:
    (aval,) = ctx.avals_in
    (out,) = ctx.avals_out
    layout = {
        "bytes": aval.size * aval.dtype.itemsize,
        "layout": all_to_all_layout(
            aval.shape,
            aval.dtype.itemsize,
            params["split_axis"],
            params["concat_axis"],
            len(groups[0]),
        ),
    }
    return Call("all_to_all", params["axis_name"], groups, layout, [_typed_like(x, out.shape)])


def _ppermute(ctx: Context, x: Any, params: dict[str, Any], groups: Groups) -> Call | str:
    (aval,) = ctx.avals_in
    if any(group != sorted(group) for group in groups):
        # What an index then means depends on lax's version: let lax decide, or refuse.
        return "the axes are not in the mesh's order"
    size = len(groups[0])
    sources = [-1] * size
    for source, target in params["perm"]:
        sources[target % size] = source % size
    layout = {"bytes": aval.size * aval.dtype.itemsize, "sources": sources}
    return Call("ppermute", params["axis_name"], groups, layout, [x.type])


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


_LAX_CALLS: dict[str, Callable[[Context, Any, dict[str, Any], Groups], Call | str]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
}


def _replace_rule(op: str, primitive: Primitive) -> None:
    lax_rule = _compat.lax_rule(primitive, "cpu")

    def rule(ctx: Context, x: ir.Value, **params: Any) -> Sequence[ir.Value]:
        backend = _compat.equation_metadata(ctx).get(_MARK)
        if backend is None:
            return lax_rule(ctx, x, **params)

        def lower_to_lax() -> Sequence[ir.Value]:
            (out,) = ctx.avals_out
            if out.size == 0 and isinstance(out.dtype, np.dtype):
                # XLA refuses to gather or scatter along a dimension of length zero.
                return [_empty(ctx, x)]
            if op == "reduce_scatter" and ctx.avals_in[0].dtype.name in HALF_PRECISION:
                return _in_float32(ctx, x, lax_rule, params)
            return lax_rule(ctx, x, **params)

        axes = params["axis_name"]
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        aval = ctx.avals_in[0]

        def make_call(groups: Groups) -> Call | str:
            if not isinstance(aval.dtype, np.dtype) or not _is_whole_bytes(aval.dtype):
                return f"dtype {aval.dtype} is not supported"
            if backend == "auto" and aval.size * aval.dtype.itemsize >= _LAX_FROM_BYTES.get(
                op, math.inf
            ):
                return f"lax is faster from {_LAX_FROM_BYTES[op]} bytes on"
            return _LAX_CALLS[op](ctx, x, {**params, "axis_name": axes}, groups)

        if len(axes) == 0:
            return lower_to_lax()
        groups = params.get("axis_index_groups")
        return lower(ctx, backend, axes, groups, make_call, [x], lower_to_lax)

    # Equal equations are lowered once and inlined unless that is switched off; then they would
    # share one position in the module and one source line.
    mlir.register_lowering(primitive, rule, platform="cpu", cacheable=False)


def _empty(ctx: Context, x: ir.Value) -> ir.Value:
    (out,) = ctx.avals_out
    zeros = mlir.lower_fun(lambda _: jnp.zeros(out.shape, out.dtype), multiple_results=False)
    with _compat.without_varying_axes():
        (result,) = zeros(_compat.untyped(ctx), x)
    return result


def _is_whole_bytes(dtype: np.dtype) -> bool:
    return "int4" not in dtype.name and "int2" not in dtype.name and dtype.itemsize >= 1


def _in_float32(
    ctx: Context, x: ir.Value, lax_rule: Callable[..., Any], params: dict[str, Any]
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


if _compat.problem() is None:
    for _op, _primitive in _compat.lax_primitives().items():
        _replace_rule(_op, _primitive)

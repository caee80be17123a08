"""The native calls on GPUs: flat buffers with the ranks' blocks outermost.

NCCL knows no dimensions, so what is split or joined elsewhere is transposed before or after, in the
program, where XLA joins that with what is computed there.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jaxcoll import _compat, _engine, _native
from jaxcoll._lowering import Call, Context, Groups
from jaxcoll._nccl_types import Carried, carried
from jaxcoll._types import DTYPES, REDUCE_OPS, reduction_problem

Params = dict[str, Any]

# Bytes and leaves of a tree whose sum goes over peer memory: as csrc/cuda/peer_call.h and
# csrc/cuda/peer_seat.h have them; for several GPUs both are guesses.
_MOST_OVER_PEERS = 256 << 10
_MOST_LEAVES = 4


# ---- Reductions ----------------------------------------------------------------------------------


def all_reduce(ctx: Context, operands: Sequence[Any], reduction: str, groups: Groups) -> Call | str:
    """Returns the call for a whole tree, in place, or why there is none."""
    ranks = len(groups[0])
    ways = [_carried(aval, reduction, ranks) for aval in ctx.avals_in]
    if problems := [way for way in ways if isinstance(way, str)]:
        return problems[0]
    found = [way for way in ways if not isinstance(way, str)]
    ops = {way.op for way in found}
    if len(ops) > 1:
        return "the leaves need different reductions of NCCL's"
    leaves = [
        _sent(ctx, operand, way, aval)
        for operand, way, aval in zip(operands, found, ctx.avals_in, strict=True)
    ]
    op = ops.pop()
    attributes = {
        "op": REDUCE_OPS[op],
        "dtypes": [DTYPES[way.dtype] for way in found],
        "counts": [aval.size for aval in ctx.avals_in],
    }
    sizes = [
        aval.size * np.dtype(way.dtype).itemsize
        for way, aval in zip(found, ctx.avals_in, strict=True)
    ]
    fits = sum(sizes) <= _MOST_OVER_PEERS and len(sizes) <= _MOST_LEAVES
    is_small_sum = op == "sum" and fits
    # The same on all processes, whatever each of them knows: the group's communicators tell.
    attributes["is_small_sum"] = int(is_small_sum)
    over_peers = is_small_sum and _have_peer_memory(ctx, groups)

    def finish(results: Sequence[ir.Value]) -> Sequence[ir.Value]:
        return [
            _finished(ctx, result, way, aval, ranks)
            for result, way, aval in zip(results, found, ctx.avals_in, strict=True)
        ]

    types = [leaf.type for leaf in leaves]
    return Call(
        attributes, types, in_place=True, operands=leaves, finish=finish, over_peers=over_peers
    )


def _have_peer_memory(ctx: Context, groups: Groups) -> bool:
    """Tells whether GPUs read each other's memory in all groups, as far as is known by now."""
    devices = _compat.mesh_devices(ctx)
    if devices is None:
        return False
    for group in groups:
        members = [devices[member] for member in group]
        if _engine.knows_hosts():
            hosts = {_engine.host_of(device.process_index) for device in members}
            if len(hosts) > 1:
                return False
        if _native.gpu_peer_problem([device.id for device in members]):
            return False
    return True


def reduce_scatter(ctx: Context, x: ir.Value, params: Params, groups: Groups) -> Call | str:
    """Returns the call for `lax.reduce_scatter_p`, or why there is none."""
    (aval,) = ctx.avals_in
    (out,) = ctx.avals_out
    ranks, dim = len(groups[0]), params["scatter_dimension"]
    way = _carried(aval, "sum", ranks)
    if isinstance(way, str):
        return way
    part = aval.shape[dim] // ranks
    split = (*aval.shape[:dim], ranks, part, *aval.shape[dim + 1 :])
    order = (dim, *(i for i in range(len(split)) if i != dim))
    blocks = _transposed(_reshaped(_converted(x, way.dtype), split), order)
    attributes = {
        "op": REDUCE_OPS[way.op],
        "dtype": DTYPES[way.dtype],
        "count": aval.size // ranks,
    }
    return Call(
        attributes,
        [_type(out.shape, _element(blocks))],
        operands=[blocks],
        finish=lambda results: [_finished(ctx, results[0], way, out, ranks)],
    )


def _carried(aval: Any, reduction: str, ranks: int) -> Carried | str:
    problem = reduction_problem(reduction, aval.dtype)
    return problem or carried(aval.dtype.name, reduction, ranks)


def _sent(ctx: Context, x: ir.Value, way: Carried, aval: Any) -> ir.Value:
    """Returns what travels."""
    if way.bits_of is None:
        return _converted(x, way.dtype)
    x = _converted(x, way.bits_of)
    return _computed(ctx, lambda y: _as_integers(y, way.op), x, aval, (way.bits_of, way.dtype))


def _finished(ctx: Context, x: ir.Value, way: Carried, aval: Any, ranks: int) -> ir.Value:
    """Divides what is to be divided, and returns the result in the dtype of `aval`."""
    if way.bits_of is not None:
        x = _computed(ctx, _as_floats, x, aval, (way.dtype, way.bits_of))
    if way.divides:
        dtype = aval.dtype if way.dtype == "bfloat16" else way.dtype
        x = _computed(ctx, lambda y: y / ranks, x, aval, (dtype, dtype))
    return _converted(x, aval.dtype)


def _computed(
    ctx: Context, f: Callable[[Any], Any], x: ir.Value, aval: Any, dtypes: tuple[Any, Any]
) -> ir.Value:
    """Returns f(x), of the shape of `aval`; dtypes of x and of the result."""
    before, after = (aval.update(dtype=np.dtype(dtype)) for dtype in dtypes)
    context = _compat.untyped(ctx.replace(avals_in=[before], avals_out=[after]))
    with _compat.without_varying_axes():
        (y,) = mlir.lower_fun(f, multiple_results=False)(context, x)
    return y


def _as_integers(x: Any, op: str) -> Any:
    """Maps floats to integers in the same order; NaN to the one that wins."""
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{8 * x.dtype.itemsize}"))
    limits = np.iinfo(bits.dtype)
    winner = lax.full_like(bits, limits.max if op == "max" else limits.min)
    return lax.select(lax.ne(x, x), winner, _turned(bits))


def _as_floats(x: Any) -> Any:
    """Maps what `_as_integers` gives back."""
    return lax.bitcast_convert_type(_turned(x), np.dtype(f"float{8 * x.dtype.itemsize}"))


def _turned(bits: Any) -> Any:
    """Turns the order of negative floats' bits around; and that back."""
    limits = np.iinfo(bits.dtype)
    is_negative = lax.shift_right_arithmetic(bits, lax.full_like(bits, limits.bits - 1))
    return lax.bitwise_xor(bits, lax.bitwise_and(is_negative, lax.full_like(bits, limits.max)))


# ---- Copies --------------------------------------------------------------------------------------


def all_gather(ctx: Context, x: ir.Value, params: Params, groups: Groups) -> Call:
    """Returns the call for `lax.all_gather_p`."""
    (aval,) = ctx.avals_in
    (out,) = ctx.avals_out
    ranks, dim = len(groups[0]), params["all_gather_dimension"]
    gathered = (ranks, *aval.shape)
    order = (*range(1, dim + 1), 0, *range(dim + 1, len(gathered)))

    def finish(results: Sequence[ir.Value]) -> Sequence[ir.Value]:
        return [_reshaped(_transposed(results[0], order), out.shape)]

    return Call({"bytes": _bytes(aval)}, [_type(gathered, _element(x))], finish=finish)


def all_to_all(ctx: Context, x: ir.Value, params: Params, groups: Groups) -> Call:
    """Returns the call for `lax.all_to_all_p`, whose blocks are joined where `concat_axis` is."""
    (aval,) = ctx.avals_in
    (out,) = ctx.avals_out
    ranks, split, concat = len(groups[0]), params["split_axis"], params["concat_axis"]
    block = list(aval.shape)
    block[split] //= ranks
    parted = (*aval.shape[:split], ranks, block[split], *aval.shape[split + 1 :])
    to_front = (split, *(i for i in range(len(parted)) if i != split))
    blocks = _transposed(_reshaped(x, parted), to_front)
    to_place = (*range(1, concat + 1), 0, *range(concat + 1, len(parted)))
    return Call(
        {"bytes": _bytes(aval) // ranks},
        [blocks.type],
        operands=[blocks],
        finish=lambda results: [_reshaped(_transposed(results[0], to_place), out.shape)],
    )


def ppermute(ctx: Context, x: ir.Value, params: Params, groups: Groups) -> Call | str:
    """Returns the call for `lax.ppermute_p`, or why there is none."""
    (aval,) = ctx.avals_in
    if any(group != sorted(group) for group in groups):
        return "the axes are not in the mesh's order"  # as in _lax_rules
    size = len(groups[0])
    sources = [-1] * size
    for source, target in params["perm"]:
        sources[target % size] = source % size
    return Call({"bytes": _bytes(aval), "sources": sources}, [x.type])


def broadcast(ctx: Context, x: ir.Value, root: int) -> Call:
    """Returns the call for our broadcast, in place."""
    (aval,) = ctx.avals_in
    return Call({"bytes": _bytes(aval), "root": root}, [x.type], in_place=True)


COPIES: dict[str, Callable[[Context, ir.Value, Params, Groups], Call | str]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "ppermute": ppermute,
}


# ---- Matrix products -----------------------------------------------------------------------------

_KINDS = {"gather rows": 0, "scatter rows": 1, "scatter columns": 2, "gather inner": 3}
# For cuBLASLt: what XLA gives it on Hopper.
_WORKSPACE_BYTES = 32 << 20


def ring_matmul(
    kind: str,
    ranks: int,
    block: Sequence[int],
    operands: Sequence[tuple[ir.Value, bool]],
    y_shape: Sequence[int],
    dtypes: tuple[Any, Any],
    allows_tf32: bool,
) -> Call:
    """Returns the call of a collective matmul.

    Args:
        kind: one of `_KINDS`.
        ranks: of the group.
        block: batch, rows, inner and columns of one rank's block.
        operands: x and w, and whether each lies transposed.
        y_shape: of the result.
        dtypes: of the operands and of the result.
        allows_tf32: whether float32 operands may be rounded to TF32.
    """
    (x, x_is_transposed), (w, w_is_transposed) = operands
    batch, rows, inner, columns = block
    operand, result = (np.dtype(dtype) for dtype in dtypes)
    width, itemsize = (
        (inner, operand.itemsize) if kind.startswith("gather") else (columns, result.itemsize)
    )
    slots = (ranks - 1) * batch * rows * width * itemsize
    byte = ir.IntegerType.get_unsigned(8)
    attributes = {
        "kind": _KINDS[kind],
        "batch": batch,
        "rows": rows,
        "inner": inner,
        "columns": columns,
        "x_is_transposed": int(x_is_transposed),
        "w_is_transposed": int(w_is_transposed),
        "operand": DTYPES[operand.name],
        "result": DTYPES[result.name],
        "allows_tf32": int(allows_tf32),
        "workspace_bytes": _WORKSPACE_BYTES,
    }
    return Call(
        attributes,
        [
            _type(y_shape, mlir.dtype_to_ir_type(result)),
            _type((slots,), byte),
            _type((_WORKSPACE_BYTES,), byte),
        ],
        operands=[_converted(x, operand), _converted(w, operand)],
        finish=lambda results: results[:1],
    )


# ---- Values --------------------------------------------------------------------------------------


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _element(x: ir.Value) -> ir.Type:
    return ir.RankedTensorType(x.type).element_type


def _type(shape: Sequence[int], element: ir.Type) -> ir.Type:
    return ir.RankedTensorType.get(list(shape), element)


def _converted(x: ir.Value, dtype: Any) -> ir.Value:
    wanted = _type(ir.RankedTensorType(x.type).shape, mlir.dtype_to_ir_type(np.dtype(dtype)))
    return x if x.type == wanted else stablehlo.convert(wanted, x)


def _reshaped(x: ir.Value, shape: Sequence[int]) -> ir.Value:
    wanted = _type(shape, _element(x))
    return x if x.type == wanted else stablehlo.reshape(wanted, x)


def _transposed(x: ir.Value, order: Sequence[int]) -> ir.Value:
    if list(order) == list(range(len(order))):
        return x
    return stablehlo.transpose(x, ir.DenseI64ArrayAttr.get(list(order)))

"""What `all_gather_matmul` and `matmul_reduce_scatter` share: two primitives, each other's duals.

Both are linear in x and in w. With g the cotangent of the result, dx is the other primitive of g
and the transposed w, and dw a gather again, of x or of g, with the batch as the summed dimension.
So the derivatives of any order are made of the same calls; a transposed operand is multiplied as it
lies.

Operands: x `(batch, rows, inner)` and w `(inner, columns)`, where one dimension of one of them, or
of the result, has the blocks of all p ranks.
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
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

from jaxcoll import _compat, _cpu, _crossovers, _engine, _native, _nccl_calls
from jaxcoll._crossovers import Within
from jaxcoll._environment import num_cpus
from jaxcoll._lowering import Call, Request, lower, native_platform, spans_processes
from jaxcoll._types import DTYPES, AxisName, Backend
from jaxcoll.collectives import _matmul_ring
from jaxcoll.collectives._arguments import Axes, cast_varying
from jaxcoll.collectives.all_gather import all_gather
from jaxcoll.collectives.reduce_scatter import reduce_scatter

ROWS, INNER, COLUMNS = -2, -1, -1  # gather_axis and scatter_axis
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_MAX_SIZE = 2**31 - 1  # the BLAS counts with 32 bits
# Of a block of at least as many rows as columns. From there on devices of one process that gather
# rows are as fast or faster with a block on each core than with XLA's matmul of all blocks on all
# cores: on 2 cores of Intel Xeon and of AMD EPYC.
_LARGE_BLOCK_PRODUCTS = 2**31
# Of half precision, which this BLAS multiplies in float32: in bfloat16 that takes about twice as
# long as XLA's where the processor has instructions for it (benchmarks/blas.py).
_MOST_HALF_PRODUCTS = 2**20
# Where the BLAS keeps up with XLA's matmul, one call is faster from so many rows of a block on,
# within a process if its w has so many rows and columns: on 2 cores of AMD EPYC (Zen 3).
_BLAS_ROWS, _BLAS_SIDES = 512, 256
# Two steps have a buffer between them. From this size on it is fresh memory in each call, which
# the system clears: on 2 cores of AMD EPYC and of Intel Xeon one call is faster then.
_FRESH_BYTES = 2**25
# On GPUs, of one rank's block: below, a ring's steps would be too short to hide a transfer. This is
# a guess, not a measurement.
_RING_FROM_PRODUCTS = 2**32


def check(call: str, x: Any, w: Any, axis: Any, name: str, preferred: Any) -> tuple[int, Any]:
    """Returns the dimension as -2 or -1, and the dtype of the result.

    Raises:
        TypeError: an operand is no array of floats.
        ValueError: a shape or dimension that can't be.
    """
    for what, operand in (("x", x), ("w", w)):
        dtype = getattr(operand, "dtype", None)
        if dtype is None or getattr(dtype, "name", "") not in _FLOATS:
            raise TypeError(
                f"{call}: {what}: expected an array of {', '.join(_FLOATS)}, got "
                f"{type(operand).__name__ if dtype is None else dtype}. For others, call the "
                "collective and jnp.matmul one after the other."
            )
    if w.ndim != 2:
        raise ValueError(f"{call}: w: expected a matrix (k, n), got shape {w.shape}.")
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(f"{call}: {name}: expected -2 or -1, got {axis!r}.")
    axis = int(axis) - x.ndim if axis >= 0 else int(axis)
    if axis not in (-2, -1):
        raise ValueError(
            f"{call}: {name}: expected -2 (rows) or -1, one of the last two dimensions of x, "
            f"got {axis % x.ndim if x.ndim else axis} for shape {x.shape}."
        )
    if x.ndim < -axis:
        raise ValueError(f"{call}: x: expected {-axis} dimensions or more, got {x.shape}.")
    dtype = jnp.result_type(x, w) if preferred is None else jnp.dtype(preferred)
    if dtype.name not in _FLOATS:
        raise TypeError(
            f"{call}: preferred_element_type: expected one of {', '.join(_FLOATS)}, got {dtype}."
        )
    return axis, dtype


def _bind(primitive: Primitive, axes: Axes, x: Any, w: Any, **parameters: Any) -> Any:
    """Binds with operands that vary over the same axes."""
    x, w = cast_varying(axes, x), cast_varying(axes, w)
    if _compat.tracks_varying_axes():
        of_x, of_w = (jax.typeof(operand).manual_axis_type.varying for operand in (x, w))
        x = lax.pcast(x, tuple(of_w - of_x), to="varying") if of_w - of_x else x
        w = lax.pcast(w, tuple(of_x - of_w), to="varying") if of_x - of_w else w
    return primitive.bind(x, w, axes=axes.names, **parameters)


def apply(primitive: Primitive, axes: Axes, x: Any, w: Any, axis: int, **parameters: Any) -> Any:
    """Binds with x in the primitives' form, and returns the result in that of the functions."""
    *batch, rows, inner = x.shape if axis == ROWS else (math.prod(x.shape[:-1]), x.shape[-1])
    blocks = x.reshape(math.prod(batch), rows, inner)
    y = _bind(primitive, axes, blocks, w, axis=axis, **parameters)
    kept = (*batch, y.shape[1]) if axis == ROWS else x.shape[:-1]
    return y.reshape(*kept, y.shape[2])


# ---- In two steps --------------------------------------------------------------------------------


def wide(x: Any, w: Any) -> Any:
    """Returns the dtype in which products are summed: float32 at least."""
    return np.dtype(np.float64 if np.float64 in (x.dtype, w.dtype) else np.float32)


def multiply(x: Any, w: Any, *, platforms: Sequence[str] = (), rounded: Any = None) -> Any:
    """Returns the product in `wide`; or `rounded`, to a dtype, where nothing is added to it.

    `platforms`: those of the program, as far as they are known.
    """
    dtype = wide(x, w)
    result = dtype if rounded is None else rounded
    # A cotangent beside an operand of half precision; or XLA converts them, too, but of products
    # that are wider than their factors slowly.
    if x.dtype != w.dtype or (_cpu.converts(x.dtype.name) and _are_on_cpu(platforms)):
        x, w = x.astype(dtype), w.astype(dtype)
    # Elsewhere XLA sums in float32 all the same by default, and less is written if it rounds, too.
    rounds_at_once = bool(platforms) and "cpu" not in platforms and x.dtype == result
    product = jnp.matmul(x, w, preferred_element_type=result if rounds_at_once else dtype)
    return product.astype(result)


def _are_on_cpu(platforms: Sequence[str]) -> bool:
    return tuple(platforms or [jax.default_backend()]) == ("cpu",)


def gather_then_multiply(
    x: Any, w: Any, *, axes: AxisName, axis: int, dtype: Any, backend: Backend | None,
    platforms: Sequence[str] = (),
) -> Any:  # fmt: skip
    """`all_gather_matmul` in two steps."""
    gathered = all_gather(x, axes, axis=x.ndim + axis, tiled=True, backend=backend)
    return multiply(gathered, w, platforms=platforms, rounded=dtype)


def multiply_then_scatter(
    x: Any, w: Any, *, axes: AxisName, axis: int, dtype: Any, backend: Backend | None,
    platforms: Sequence[str] = (),
) -> Any:  # fmt: skip
    """`matmul_reduce_scatter` in two steps."""
    is_alone = lax.axis_size(axes) == 1
    y = multiply(x, w, platforms=platforms, rounded=dtype if is_alone else None)
    summed = reduce_scatter(y, axes, scatter_dimension=y.ndim + axis, tiled=True, backend=backend)
    return summed.astype(dtype)


# ---- Primitives ----------------------------------------------------------------------------------

gather_p = Primitive("all_gather_matmul")
scatter_p = Primitive("matmul_reduce_scatter")
# The parameter of the function that says which dimension has the blocks of all ranks.
_AXIS = {gather_p.name: "gather_axis", scatter_p.name: "scatter_axis"}


def _num_ranks(axes: tuple[str, ...]) -> int:
    return math.prod(_compat.bound_axes()[axis] for axis in axes)


def _typed_like(x: Any, w: Any, shape: tuple[int, ...], dtype: Any, axes: tuple[str, ...]) -> Any:
    if _compat.tracks_varying_axes():
        mats = [aval.manual_axis_type for aval in (x, w)]
        varying = mats[0].varying | mats[1].varying | set(axes)
        return x.update(
            shape=shape, dtype=dtype, weak_type=False,
            manual_axis_type=mats[0].update(varying=varying),
        )  # fmt: skip
    return _compat.without_weak_type(x.update(shape=shape, dtype=dtype))


def _gather_type(
    x: Any, w: Any, *, axes: tuple[str, ...], axis: int, dtype: Any, backend: Backend
) -> tuple[Any, set[Any]]:
    del backend
    batch, rows, _ = x.shape
    rows *= _num_ranks(axes) if axis == ROWS else 1
    aval = _typed_like(x, w, (batch, rows, w.shape[1]), dtype, axes)
    return aval, _compat.named_axis_effects(axes)


def _scatter_type(
    x: Any, w: Any, *, axes: tuple[str, ...], axis: int, dtype: Any, backend: Backend
) -> tuple[Any, set[Any]]:
    del backend
    p = _num_ranks(axes)
    batch, rows, _ = x.shape
    shape = (batch, rows // p, w.shape[1]) if axis == ROWS else (batch, rows, w.shape[1] // p)
    return _typed_like(x, w, shape, dtype, axes), _compat.named_axis_effects(axes)


gather_p.def_effectful_abstract_eval(_gather_type)
scatter_p.def_effectful_abstract_eval(_scatter_type)


def _transposed(x: Any) -> Any:
    """Swaps the last two dimensions; as an operand it costs nothing."""
    return lax.transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _flat(x: Any) -> Any:
    """Joins batch and rows."""
    return x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])


def _by_rank(x: Any, p: int) -> Any:
    """Joins batch and rows, the blocks of each rank together: (batch, p * m, n) to (p * ..., n)."""
    batch, rows, columns = x.shape
    if batch == 1:
        return x[0]
    blocks = x.reshape(batch, p, rows // p, columns)
    return lax.transpose(blocks, (1, 0, 2, 3)).reshape(batch * rows, columns)


def _gather_transpose_x(g: Any, x: Any, w: Any, *, dtype: Any, **parameters: Any) -> Any:
    del dtype
    return scatter_p.bind(g, _transposed(w), dtype=x.aval.dtype, **parameters)


def _gather_transpose_w(g: Any, x: Any, w: Any, *, axis: int, dtype: Any, **parameters: Any) -> Any:
    del dtype
    parameters |= {"dtype": w.aval.dtype}
    if axis == INNER:
        return gather_p.bind(_transposed(x), _flat(g)[0], axis=ROWS, **parameters)[0]
    by_rank = _by_rank(g, _num_ranks(parameters["axes"]))
    return gather_p.bind(_transposed(_flat(x)), by_rank, axis=INNER, **parameters)[0]


def _scatter_transpose_x(g: Any, x: Any, w: Any, *, dtype: Any, **parameters: Any) -> Any:
    del dtype
    return gather_p.bind(g, _transposed(w), dtype=x.aval.dtype, **parameters)


def _scatter_transpose_w(
    g: Any, x: Any, w: Any, *, axis: int, dtype: Any, **parameters: Any
) -> Any:
    del dtype
    parameters |= {"dtype": w.aval.dtype}
    if axis == COLUMNS:
        return _transposed(gather_p.bind(_transposed(g), _flat(x)[0], axis=ROWS, **parameters)[0])
    by_rank = _by_rank(x, _num_ranks(parameters["axes"]))
    return _transposed(gather_p.bind(_transposed(_flat(g)), by_rank, axis=INNER, **parameters)[0])


def _linear(transpose: Callable[..., Any], operand: int) -> Callable[..., Any]:
    """Makes a rule of defbilinear."""

    def rule(g: Any, x: Any, w: Any, **parameters: Any) -> Any:
        undefined = (x, w)[operand]
        if type(g) is ad.Zero:
            return ad.Zero(undefined.aval)
        return transpose(g, x, w, **parameters)

    return rule


ad.defbilinear(gather_p, _linear(_gather_transpose_x, 0), _linear(_gather_transpose_w, 1))
ad.defbilinear(scatter_p, _linear(_scatter_transpose_x, 0), _linear(_scatter_transpose_w, 1))


def _batch(primitive: Primitive, in_two_steps: Callable[..., Any]) -> Any:
    """A batch of x is more of its own; of w, or over the ranks, it is done in two steps."""

    def rule(
        axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], **parameters: Any
    ) -> tuple[Any, int]:
        (x, w), (x_dim, w_dim) = operands, dims
        if w_dim is not None or axis_data.name in parameters["axes"]:
            return (
                jax.vmap(
                    lambda x, w: in_two_steps(x, w, **parameters),
                    in_axes=(x_dim, w_dim),
                    axis_name=axis_data.name,
                    axis_size=axis_data.size,
                )(x, w),
                0,
            )
        x = jnp.moveaxis(x, x_dim or 0, 0)
        several, batch, rows, _ = x.shape
        if parameters["axis"] == ROWS:
            y = primitive.bind(x.reshape(several * batch, *x.shape[2:]), w, **parameters)
            rows = y.shape[1]
        else:
            y = primitive.bind(_flat(x), w, **parameters)
        return y.reshape(several, batch, rows, y.shape[-1]), 0

    return rule


batching.fancy_primitive_batchers[gather_p] = _batch(gather_p, gather_then_multiply)
batching.fancy_primitive_batchers[scatter_p] = _batch(scatter_p, multiply_then_scatter)


# ---- Lowering ------------------------------------------------------------------------------------


def _lower(
    primitive: Primitive, in_two_steps: Callable[..., Any], in_a_ring: Callable[..., Any]
) -> Callable[..., Any]:
    def rule(
        ctx: mlir.LoweringRuleContext, x: Any, w: Any, *, axes: tuple[str, ...], axis: int,
        dtype: Any, backend: Backend,
    ) -> Sequence[Any]:  # fmt: skip
        platforms = ctx.module_context.platforms

        def two_steps(x: Any, w: Any, backend: Backend) -> Any:
            return in_two_steps(
                x, w, axes=axes, axis=axis, dtype=dtype, backend=backend, platforms=platforms
            )

        def ring(x: Any, w: Any) -> Any:
            product = ft.partial(multiply, platforms=platforms)
            return in_a_ring(x, w, axes=axes, axis=axis, multiply=product).astype(dtype)

        def traced(f: Callable[..., Any]) -> Sequence[Any]:
            with _compat.without_varying_axes():
                return mlir.lower_fun(f, multiple_results=False)(_compat.untyped(ctx), x, w)

        (y,) = lower(
            ctx,
            Request(
                primitive.name,
                axes,
                backend,
                reduction=_reduction(primitive, axis),
                parameters=f"{_AXIS[primitive.name]}={axis}",
            ),
            lambda groups: (
                _slower(ctx, primitive, axis, groups, backend)
                or _call(ctx, primitive, axis, groups, x, w)
            ),
            [x, w],
            lambda: traced(ring if _overlaps(ctx, axes) else ft.partial(two_steps, backend="lax")),
            in_two_steps=lambda: traced(ft.partial(two_steps, backend="auto")),
        )
        (of_y,) = ctx.avals_out
        wanted = _type(of_y.shape, of_y.dtype)
        return [y if y.type == wanted else stablehlo.convert(wanted, y)]

    return rule


def _overlaps(ctx: mlir.LoweringRuleContext, axes: tuple[str, ...]) -> bool:
    """Tells whether lax's communication can run beside computation: not where devices share it."""
    groups = _compat.replica_groups(ctx, axes, None)
    if groups is None or any(group != sorted(group) for group in groups):
        return False  # lax.ppermute has no meaning for axes that are not in the mesh's order
    platforms = tuple(ctx.module_context.platforms)
    if platforms == ("cuda",):
        return False  # there sends are slower than a gather, and take what multiplies
    if platforms != ("cpu",):
        return True
    return len(groups[0]) > 1 and spans_processes(ctx, groups)


def _reduction(primitive: Primitive, axis: int) -> str | None:
    return "sum" if primitive is scatter_p or axis == INNER else None


def _slower(
    ctx: mlir.LoweringRuleContext, primitive: Primitive, axis: int, groups: Any, backend: Backend
) -> str | None:
    """Says why "auto" does better in two steps, or None."""
    if backend != "auto":
        return None
    (of_x, of_w), p = ctx.avals_in, len(groups[0])
    if native_platform(ctx) == "cuda":
        of_block = of_x.size * of_w.shape[1] // (1 if primitive is gather_p else p)
        return "its blocks are small for a ring" if of_block < _RING_FROM_PRODUCTS else None
    if not _engine.multiplies_alike():
        return "the processes have not the same processor and BLAS"
    across = spans_processes(ctx, groups)
    if across and _engine.has_spare_cores():
        return "a process has more cores than devices, and XLA's matmul takes them all"
    if reason := _native.matmul_is_behind():
        return reason
    better = "XLA's matmul is faster for this shape and dtype"
    of_rank = of_x.size * of_w.shape[1] * (p if primitive is gather_p else 1)
    within: Within = "several processes" if across else "one process"
    is_half = of_x.dtype == of_w.dtype != wide(of_x, of_w)
    suits_the_blas = axis == ROWS and _suits_the_blas(primitive, of_x, of_w, p, within, is_half)
    if suits_the_blas and (across or _are_all_busy(groups)):
        return None
    if is_half:
        return better if p * of_rank > _MOST_HALF_PRODUCTS else None
    one_call = _saves_a_large_buffer if across else _is_mostly_communication
    if axis == ROWS and one_call(primitive, of_x, of_w, p):
        return None
    gathers_rows = (primitive, axis) == (gather_p, ROWS)
    if gathers_rows and not across and _has_large_blocks(of_x, of_w) and _are_all_busy(groups):
        return None
    most = _crossovers.one_call_to_products(primitive.name, p, within)
    rows = _block_rows(primitive, of_x, p)
    largest_w = _crossovers.one_call_to_w(primitive.name, p, within, rows)
    return better if p * of_rank > most or of_w.size > largest_w else None


def _block_rows(primitive: Primitive, of_x: Any, p: int) -> int:
    return of_x.shape[1] // (1 if primitive is gather_p else p)


def _suits_the_blas(
    primitive: Primitive, of_x: Any, of_w: Any, p: int, within: Within, is_half: bool
) -> bool:
    """Tells whether blocks are large enough for a BLAS that is as fast as XLA's matmul."""
    if _crossovers.two_steps_won_at(primitive.name, p, within) >= _BLAS_ROWS:
        return False  # here it is not
    if _block_rows(primitive, of_x, p) < _BLAS_ROWS:
        return False
    if within == "one process" and (is_half or min(of_w.shape) < _BLAS_SIDES):
        return False
    return _native.matmul_keeps_up()


def _is_mostly_communication(primitive: Primitive, of_x: Any, of_w: Any, p: int) -> bool:
    """Tells whether few multiplications are made with what travels, and of enough rows.

    In one process: there one call writes no gathered x and no products to scatter, of which large
    ones are fresh memory.
    """
    rows, (inner, columns) = of_x.shape[1], of_w.shape
    if primitive is gather_p:
        return rows >= 128 and columns <= 256
    is_large = _saves_a_large_buffer(primitive, of_x, of_w, p)
    return (rows >= 512 * p and inner <= 256) or is_large


def _saves_a_large_buffer(primitive: Primitive, of_x: Any, of_w: Any, p: int) -> bool:
    """Tells whether two steps would have fresh memory between them, and few multiplications.

    What counts across processes, where one call copies, too; and of sums in one process.
    """
    (batch, rows, _), (inner, columns) = of_x.shape, of_w.shape
    size = wide(of_x, of_w).itemsize
    if primitive is gather_p:
        return columns <= 1024 and p * of_x.size * size >= _FRESH_BYTES
    return inner <= 1024 and batch * rows * columns * size >= _FRESH_BYTES


def _are_all_busy(groups: Any) -> bool:
    """Tells whether the devices in the groups leave no core without work."""
    if jax.process_count() > 1:
        return not _engine.has_spare_cores()  # the same for all, as programs have to be
    return num_cpus() <= sum(map(len, groups))


def _has_large_blocks(of_x: Any, of_w: Any) -> bool:
    rows, columns = of_x.shape[1], of_w.shape[1]
    return rows >= columns and of_x.size * columns >= _LARGE_BLOCK_PRODUCTS


def _call(
    ctx: mlir.LoweringRuleContext, primitive: Primitive, axis: int, groups: Any, x: Any, w: Any
) -> Call | str:
    """Returns the native call, or says why there is none."""
    if native_platform(ctx) == "cuda":
        return _call_on_gpus(ctx, primitive, axis, groups, x, w)
    (of_x, of_w), (of_y,) = ctx.avals_in, ctx.avals_out
    if problem := _native.matmul_problem():
        return problem
    sizes = (*of_x.shape, *of_w.shape, *of_y.shape)
    if 0 in sizes:
        return "there is nothing to multiply"
    if math.prod(of_x.shape[:2]) > _MAX_SIZE or max(sizes) > _MAX_SIZE:
        return f"a dimension is larger than {_MAX_SIZE}"
    dtype = wide(of_x, of_w)
    batch, rows, inner = of_x.shape
    if primitive is scatter_p and axis == ROWS:
        rows //= len(groups[0])
    x, x_is_transposed = _as_it_lies(x) if batch == 1 else (x, False)
    w, w_is_transposed = _as_it_lies(w)
    inner_or_columns = "gathers_inner" if primitive is gather_p else "scatters_columns"
    return Call(
        {
            inner_or_columns: int(axis == -1),
            "dtype": DTYPES[dtype.name],
            "batch": batch,
            "rows": batch * rows,
            "inner": inner,
            "columns": of_y.shape[2],
            "x_is_transposed": int(x_is_transposed),
            "w_is_transposed": int(w_is_transposed),
        },
        [_type(of_y.shape, dtype)],
        operands=[_converted(x, dtype), _converted(w, dtype)],
    )


def _call_on_gpus(
    ctx: mlir.LoweringRuleContext, primitive: Primitive, axis: int, groups: Any, x: Any, w: Any
) -> Call | str:
    """As `_call`, a ring over NCCL with cuBLASLt."""
    (of_x, of_w), (of_y,) = ctx.avals_in, ctx.avals_out
    if problem := _native.gpu_matmul_problem():
        return problem
    sizes = (*of_x.shape, *of_w.shape, *of_y.shape)
    if 0 in sizes:
        return "there is nothing to multiply"
    if max(sizes) > _MAX_SIZE:
        return f"a dimension is larger than {_MAX_SIZE}"
    # Partial sums are wide; a product of gathered rows is rounded where it is made.
    summed = wide(of_x, of_w)
    operand = of_x.dtype if of_x.dtype == of_w.dtype else summed
    rounds_once = primitive is gather_p and axis == ROWS and of_y.dtype == operand
    batch, rows, inner = of_x.shape
    kinds = {
        (gather_p, ROWS): "gather rows",
        (gather_p, INNER): "gather inner",
        (scatter_p, ROWS): "scatter rows",
        (scatter_p, COLUMNS): "scatter columns",
    }
    kind = kinds[primitive, axis]
    rows = of_y.shape[1] if kind == "scatter rows" else rows
    return _nccl_calls.ring_matmul(
        kind,
        len(groups[0]),
        (batch, rows, inner, of_y.shape[2]),
        (_as_it_lies(x) if batch == 1 else (x, False), _as_it_lies(w)),
        of_y.shape,
        (operand, operand if rounds_once else summed),
        _allows_tf32(),
    )


def _allows_tf32() -> bool:
    """Tells whether a matmul of XLA's would round float32 to TF32 here, as it does by default."""
    precision = str(jax.config.jax_default_matmul_precision or "default").lower()
    return precision not in ("highest", "float32", "f32_f32_f32")


def _as_it_lies(operand: Any) -> tuple[Any, bool]:
    """Returns what a value is the transpose of, and whether it is one."""
    op = operand.owner if isinstance(operand, ir.OpResult) else None
    view = getattr(op, "opview", op)
    if isinstance(view, stablehlo.TransposeOp):
        rank = ir.RankedTensorType(operand.type).rank
        swapped = [*range(rank - 2), rank - 1, rank - 2]
        if [int(i) for i in view.permutation] == swapped:
            return view.operand, True
    return operand, False


def _type(shape: Sequence[int], dtype: Any) -> ir.Type:
    return ir.RankedTensorType.get(shape, mlir.dtype_to_ir_type(np.dtype(dtype)))


def _converted(operand: Any, dtype: Any) -> Any:
    wanted = _type(ir.RankedTensorType(operand.type).shape, dtype)
    return operand if operand.type == wanted else stablehlo.convert(wanted, operand)


for primitive, in_two_steps, in_a_ring in (
    (gather_p, gather_then_multiply, _matmul_ring.gather_and_multiply),
    (scatter_p, multiply_then_scatter, _matmul_ring.multiply_and_scatter),
):
    mlir.register_lowering(primitive, _lower(primitive, in_two_steps, in_a_ring), cacheable=False)
    _engine.depends_on_places(primitive)

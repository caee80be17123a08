"""The table of ops that drives the conformance tests.

A row of `OPS` is one of our functions with its `jax.lax` twin and a NumPy reference. Blocks hold
small integers, so that sums are exact in every dtype and in every order, and results are compared
with `==`.
"""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import jaxcoll

SIZES = (1, 2, 3, 4, 8)  # ranks; 3 catches whoever counts on powers of two

Function = Callable[..., Any]


# ---- The table -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Op:
    """A row: `ours(x, axis)` and `twin(x, axis)` compute `reference(blocks of all ranks)`.

    Attributes:
        name: for test ids.
        ours: also takes `backend`, and `axis_index_groups` where `grouped`.
        twin: the same with `jax.lax`.
        reference: NumPy, from (ranks, *shape) to (ranks, *result shape).
        shape: a rank's operand, by the number of ranks.
        unvarying: whether the result is typed as the same on every rank.
        grouped: whether it takes `axis_index_groups`.
        differentiable: whether it has gradients.
        smooth_twin: the twin for derivatives, where lax's own has none.
    """

    name: str
    ours: Function
    twin: Function
    reference: Callable[[np.ndarray], np.ndarray]
    shape: Callable[[int], tuple[int, ...]] = lambda size: (3, 4)
    unvarying: bool = False
    grouped: bool = True
    differentiable: bool = True
    smooth_twin: Function | None = None

    def over(self, axis: Any, *, smooth: bool = False, **keywords: Any) -> dict[str, Function]:
        """Returns ours and the twin as functions of the operand alone."""
        twin = self.smooth_twin if smooth and self.smooth_twin else self.twin
        return {
            "ours": lambda x: self.ours(x, axis, **keywords),
            "twin": lambda x: twin(x, axis, **keywords),
        }


def _to_all(reduce: Function) -> Callable[[np.ndarray], np.ndarray]:
    """Gives every rank what `reduce` makes of all blocks."""

    def reference(xs: np.ndarray) -> np.ndarray:
        return np.stack([reduce(xs)] * len(xs))

    return reference


def _sum(xs: np.ndarray) -> np.ndarray:
    return xs.sum(axis=0, dtype=np.int32 if xs.dtype == np.bool_ else xs.dtype)


def _prod(xs: np.ndarray) -> np.ndarray:
    return xs.prod(axis=0, dtype=np.int32 if xs.dtype == np.bool_ else xs.dtype)


def _mean(xs: np.ndarray) -> np.ndarray:
    total = _sum(xs)
    dtype = total.dtype
    if dtype.kind in "iu":  # as JAX divides integers
        dtype = np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)
    return (total / np.asarray(len(xs), dtype)).astype(dtype)


def _gathered(reduce: Function) -> Function:
    """The twin of an op that lax lacks: gather, reduce, and type the result as unvarying."""

    def twin(x: Any, axis: Any, *, axis_index_groups: Any = None) -> Any:
        y = reduce(lax.all_gather(x, axis, axis_index_groups=axis_index_groups))
        if axis_index_groups is not None:
            return y
        from_first = jnp.where(lax.axis_index(axis) == 0, y, jnp.zeros_like(y))
        return lax.psum(from_first, axis).astype(y.dtype)

    return twin


def _jax_prod(xs: Any) -> Any:
    return jnp.prod(xs, axis=0, dtype=np.int32 if xs.dtype == np.bool_ else xs.dtype)


def _smooth(extremum: Function) -> Function:
    """An extremum whose cotangent goes in equal shares to the ranks that hold it."""

    def twin(x: Any, axis: Any, *, axis_index_groups: Any = None) -> Any:
        psum = ft.partial(lax.psum, axis_name=axis, axis_index_groups=axis_index_groups)
        frozen = lax.stop_gradient(x)
        holds = frozen == extremum(frozen, axis, axis_index_groups=axis_index_groups)
        held = psum(jnp.where(holds, x, jnp.zeros_like(x)))
        return held / psum(holds.astype(x.dtype))

    return twin


def _all_reduces() -> Iterator[Op]:
    ops: dict[str, tuple[Function, Function]] = {
        "sum": (lax.psum, _sum),
        "mean": (lax.pmean, _mean),
        "max": (lax.pmax, ft.partial(np.max, axis=0)),
        "min": (lax.pmin, ft.partial(np.min, axis=0)),
        "prod": (_gathered(_jax_prod), _prod),
        "and": (_gathered(jnp.bitwise_and.reduce), np.bitwise_and.reduce),
        "or": (_gathered(jnp.bitwise_or.reduce), np.bitwise_or.reduce),
    }
    for name, (twin, reduce) in ops.items():
        yield Op(
            f"all_reduce_{name}",
            ft.partial(jaxcoll.all_reduce, op=name),
            twin,
            _to_all(reduce),
            unvarying=True,
            differentiable=name in ("sum", "mean", "max", "min"),
            smooth_twin=_smooth(twin) if name in ("max", "min") else None,
        )


def _all_gathers() -> Iterator[Op]:
    for axis, tiled in it.product((0, 1, -1), (False, True)):
        join = np.concatenate if tiled else np.stack
        yield Op(
            f"all_gather_{axis}{'_tiled' * tiled}",
            ft.partial(jaxcoll.all_gather, axis=axis, tiled=tiled),
            ft.partial(lax.all_gather, axis=axis, tiled=tiled),
            _to_all(lambda xs, join=join, axis=axis: join(list(xs), axis=axis)),
        )


def _reduce_scatters() -> Iterator[Op]:
    def twin(x: Any, axis: Any, *, dim: int, tiled: bool, op: str, axis_index_groups: Any = None):
        groups, size = axis_index_groups, lax.axis_size(axis)
        # Always tiled: lax's rule for vmap is wrong for the other form (jax 0.10.2 to 0.12).
        total = lax.psum_scatter(
            x, axis, scatter_dimension=dim, tiled=True, axis_index_groups=groups
        )
        total = total if tiled else lax.squeeze(total, [dim])
        return total if op == "sum" else total / (len(groups[0]) if groups else size)

    def reference(xs: np.ndarray, *, dim: int, tiled: bool, op: str) -> np.ndarray:
        total = (_sum if op == "sum" else _mean)(xs)
        if tiled:
            return np.stack(np.split(total, len(xs), axis=dim))
        return np.moveaxis(total, dim, 0)

    for dim, tiled, op in (
        (0, False, "sum"),
        (1, False, "mean"),
        (0, True, "mean"),
        (1, True, "sum"),
    ):
        keywords: dict[str, Any] = {"dim": dim, "tiled": tiled, "op": op}
        yield Op(
            f"reduce_scatter_{op}_{dim}{'_tiled' * tiled}",
            ft.partial(jaxcoll.reduce_scatter, scatter_dimension=dim, tiled=tiled, op=op),
            ft.partial(twin, **keywords),
            ft.partial(reference, **keywords),
            shape=ft.partial(_divided, dim=dim, times=2 if tiled else 1),
        )


def _all_to_alls() -> Iterator[Op]:
    def reference(xs: np.ndarray, *, split: int, concat: int, tiled: bool) -> np.ndarray:
        size = len(xs)
        if tiled:
            parts = [np.split(x, size, axis=split) for x in xs]
            join = np.concatenate
        else:
            parts = [list(np.moveaxis(x, split, 0)) for x in xs]
            join = np.stack
        return np.stack([join([part[r] for part in parts], axis=concat) for r in range(size)])

    def twin(x: Any, axis: Any, *, split: int, concat: int, tiled: bool, **keywords: Any) -> Any:
        # Always tiled: lax's other form has no derivative (jax 0.10.2 to 0.12: ValueError).
        if tiled or split == concat:
            return lax.all_to_all(x, axis, split, concat, tiled=True, **keywords)
        after = split < concat
        x = lax.expand_dims(x, [concat + after])
        y = lax.all_to_all(x, axis, split + (not after), concat + after, tiled=True, **keywords)
        return lax.squeeze(y, [split + (not after)])

    for (split, concat), tiled in it.product(((0, 2), (1, 1), (2, 0)), (False, True)):
        yield Op(
            f"all_to_all_{split}_{concat}{'_tiled' * tiled}",
            ft.partial(jaxcoll.all_to_all, split_axis=split, concat_axis=concat, tiled=tiled),
            ft.partial(twin, split=split, concat=concat, tiled=tiled),
            ft.partial(reference, split=split, concat=concat, tiled=tiled),
            shape=ft.partial(_divided, dim=split, times=2 if tiled else 1),
        )


def _divided(size: int, dim: int, times: int) -> tuple[int, ...]:
    shape = [2, 3, 4]
    shape[dim] = times * size
    return tuple(shape)


EDGES: dict[str, Callable[[int], list[tuple[int, int]]]] = {
    "ring": lambda size: [(i, (i + 1) % size) for i in range(size)],
    "partial": lambda size: [(i, i + 1) for i in range(size - 1)],
    "reversal": lambda size: [(i, size - 1 - i) for i in range(size)],
}


def _ppermutes() -> Iterator[Op]:
    def apply(x: Any, axis: Any, *, permute: Function, edges: Function, **keywords: Any) -> Any:
        return permute(x, axis, edges(lax.axis_size(axis)), **keywords)

    def reference(xs: np.ndarray, *, edges: Function) -> np.ndarray:
        results = np.zeros_like(xs)
        for source, target in edges(len(xs)):
            results[target] = xs[source]
        return results

    for name, edges in EDGES.items():
        yield Op(
            f"ppermute_{name}",
            ft.partial(apply, permute=jaxcoll.ppermute, edges=edges),
            ft.partial(apply, permute=lax.ppermute, edges=edges),
            ft.partial(reference, edges=edges),
            grouped=False,
        )


def _broadcasts() -> Iterator[Op]:
    def ours(x: Any, axis: Any, *, last: bool, **keywords: Any) -> Any:
        root = lax.axis_size(axis) - 1 if last else 0
        return jaxcoll.broadcast(x, axis, root=root, **keywords)

    def twin(x: Any, axis: Any, *, last: bool) -> Any:
        root = lax.axis_size(axis) - 1 if last else 0
        sent = jnp.where(lax.axis_index(axis) == root, x, jnp.zeros_like(x))
        return lax.psum(sent, axis).astype(x.dtype)

    for name in ("first", "last"):
        last = name == "last"
        yield Op(
            f"broadcast_{name}",
            ft.partial(ours, last=last),
            ft.partial(twin, last=last),
            _to_all(lambda xs, last=last: xs[-1 if last else 0]),
            unvarying=True,
            grouped=False,
        )


OPS: tuple[Op, ...] = (
    *_all_reduces(),
    *_all_gathers(),
    *_reduce_scatters(),
    *_all_to_alls(),
    *_ppermutes(),
    *_broadcasts(),
)
BY_NAME = {op.name: op for op in OPS}
DIFFERENTIABLE = tuple(op for op in OPS if op.differentiable)
GROUPED = tuple(op for op in OPS if op.grouped)
# One of each function, for what does not depend on its arguments.
EXAMPLES = tuple(
    BY_NAME[name]
    for name in (
        "all_reduce_sum",
        "all_gather_0",
        "reduce_scatter_sum_0",
        "all_to_all_0_2",
        "ppermute_ring",
        "broadcast_last",
    )
)


DTYPES = tuple(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128"),
    )
)


def refused(op: Op, dtype: np.dtype) -> str | None:
    """Returns what the error says where `op` has no meaning for `dtype`, as in lax."""
    reduction = op.name.split("_")[-1] if op.name.startswith("all_reduce") else ""
    if reduction in ("max", "min") and dtype.kind == "c":
        return f"{reduction} has no meaning for {dtype.name}: complex numbers have no order"
    if reduction in ("and", "or") and dtype.kind not in "biu":
        return f"'{reduction}' is for bool and integers, got {dtype.name}"
    if op.name.startswith("reduce_scatter") and dtype == np.bool_:
        return r"bool has no sum here. Convert it first: x.astype\(int\)"
    return None


def default_dtype(op: Op) -> Any:
    """Returns float32, or int32 for the bitwise ops."""
    return np.int32 if op.name in ("all_reduce_and", "all_reduce_or") else np.float32


def blocks(op: Op, size: int, dtype: Any = None, *, shape: Sequence[int] | None = None) -> Any:
    """Returns an operand for each rank, stacked: small integers, other ones on every rank."""
    dtype = np.dtype(default_dtype(op) if dtype is None else dtype)
    shape = (size, *(op.shape(size) if shape is None else shape))
    rng = np.random.default_rng(len(op.name) + size)
    if dtype == np.bool_:
        return rng.random(shape) < 0.7
    low, high = (1, 3) if "prod" in op.name else (0, 7) if dtype.kind == "u" else (-3, 4)
    values = rng.integers(low, high, shape)
    if dtype.kind == "c":
        values = values + 1j * rng.integers(low, high, shape)
    if "mean" in op.name:
        values = 3 * values  # XLA divides by 3 through a rounded reciprocal: one ulp off
    return values.astype(dtype)

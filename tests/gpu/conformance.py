"""The table of ops and of collective matmuls, natively, against NumPy; on all devices of a job.

Many calls stand in one program each, as compiling takes longest.
"""

import itertools as it
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import matmuls
import numpy as np
from checks import assert_same
from helpers import BY_NAME, DTYPES, EXAMPLES, OPS, Op, blocks, refused

import jaxcoll

# Every dtype of what computes, and of one of each that copies.
_EACH_DTYPE = (
    *(BY_NAME[f"all_reduce_{name}"] for name in ("sum", "mean", "max", "min", "prod")),
    *EXAMPLES[1:],
)
# Empty, a scalar, odd ones, and one that NCCL cuts into pieces.
_SHAPES = ((0,), (), (1,), (7, 3), (2**20 + 3,))
_MATMUL_DTYPES = (np.float32, np.float64, *matmuls.DTYPES[:2])
_IN_A_PROGRAM = 24


class Row(NamedTuple):
    """A call: its name, all ranks' operands, `f(operand)` of a rank, and all ranks' results."""

    name: str
    xs: Any
    f: Callable[[Any], Any]
    expected: np.ndarray


class Outcome(NamedTuple):
    """How many results of local ranks were right, and which calls NCCL has not."""

    right: int
    on_lax: list[str]


def rows(size: int) -> Iterator[Row]:
    """Yields the whole table for so many ranks."""
    for op in OPS:
        yield _row(op, size, None, None)
    for op, dtype in it.product(_EACH_DTYPE, DTYPES):
        if not refused(op, dtype):
            yield _row(op, size, dtype, None)
    for shape in _SHAPES:
        yield _row(BY_NAME["all_reduce_sum"], size, None, shape)
    for kind, dtype in it.product(matmuls.KINDS, _MATMUL_DTYPES):
        yield _matmul(kind, size, dtype)


def a_few(size: int) -> Iterator[Row]:
    """Yields a part of the table that compiles in a moment."""
    for op in EXAMPLES:
        yield _row(op, size, None, None)
    yield _row(BY_NAME["all_reduce_or"], size, None, None)
    yield _matmul("gather_rows", size, np.float32)


def _row(op: Op, size: int, dtype: Any, shape: tuple[int, ...] | None) -> Row:
    xs = blocks(op, size, dtype, shape=shape)
    name = " ".join(str(part) for part in (op.name, dtype, shape) if part is not None)
    return Row(name, xs, lambda x: op.ours(x, "x", backend="native"), op.reference(np.asarray(xs)))


def _matmul(kind: str, size: int, dtype: Any) -> Row:
    x, w = matmuls.operands(kind, size, 24, 16, 40, dtype)
    call = matmuls.function(kind)
    return Row(
        f"{kind} {np.dtype(dtype)}",
        (x, w),
        lambda xw: call(*xw, "x", backend="native"),
        matmuls.reference(kind, x, w),
    )


def conform(mesh: Any, table: Sequence[Row]) -> Outcome:
    """Runs rows natively, each program twice, and compares what the local ranks have."""
    right, on_lax, native = 0, [], []
    for row in table:
        try:
            _mapped(row.f, mesh).lower(_put(row.xs, mesh))
        except jaxcoll.NativeUnavailableError as error:
            on_lax.append(f"{row.name}: {error}")
        else:
            native.append(row)
    for part in _parts(native):
        program = _mapped(
            lambda xs, part=part: [row.f(x) for row, x in zip(part, xs, strict=True)], mesh
        )
        operands = [_put(row.xs, mesh) for row in part]
        for _ in range(2):
            for row, ys in zip(part, program(operands), strict=True):
                right += _compare(row, ys)
    return Outcome(right, on_lax)


def _parts(table: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Yields the rows of each program."""
    # XLA's compiler crashes where one of several operands is empty (jaxlib 0.11.2, lax too).
    empty = [row for row in table if _is_empty(row)]
    yield from ([row] for row in empty)
    others = [row for row in table if not _is_empty(row)]
    for start in range(0, len(others), _IN_A_PROGRAM):
        yield others[start : start + _IN_A_PROGRAM]


def _is_empty(row: Row) -> bool:
    return any(leaf.size == 0 for leaf in jax.tree.leaves(row.xs))


def _compare(row: Row, ys: Any) -> int:
    for shard in ys.addressable_shards:
        rank = shard.index[0].start or 0
        try:
            assert_same(np.asarray(shard.data)[0], row.expected[rank])
        except AssertionError as error:
            raise AssertionError(f"{row.name}, rank {rank}: {error}") from error
    return len(ys.addressable_shards)


def _mapped(f: Callable[[Any], Any], mesh: Any) -> Any:
    def body(stacked: Any) -> Any:
        return jax.tree.map(lambda y: y[None], f(jax.tree.map(lambda x: x[0], stacked)))

    spec = jax.P("x")
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def _put(tree: Any, mesh: Any) -> Any:
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    return jax.tree.map(
        lambda xs: jax.make_array_from_callback(xs.shape, sharding, lambda at: xs[at]), tree
    )

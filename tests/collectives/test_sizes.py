"""Every op at the sizes that break loops: nothing, one, odd, prime, around a vector, large."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_conforms, assert_same, auto_is_native, counted_calls, mapped, mesh
from helpers import BY_NAME, EXAMPLES, OPS, Op, blocks

import jaxcoll
from jaxcoll._lax_rules import all_to_all_layout

COUNTS = (0, 1, 7, 33, 509, 4097)
ANY_SHAPE = [op for op in OPS if op.name.startswith(("all_reduce", "ppermute", "broadcast"))]


def with_length(op: Op, size: int, count: int) -> list[int]:
    """Returns the op's shape with `count` in the last dimension that it does not divide."""
    shape = list(op.shape(size))
    shape[max(dim for dim, length in enumerate(op.shape(97)) if length < 97)] = count
    return shape


@pytest.mark.product(
    op=ANY_SHAPE, count=COUNTS, size=(2, 3, 4), dtype=(np.int8, np.float32, np.float64)
)
def test_lengths(op: Op, count: int, size: int, dtype: Any):
    xs = blocks(op, size, None if op.name[11:] in ("and", "or") else dtype, shape=(count,))
    ys = assert_conforms(op, lambda f, x: f(x), mesh(size), xs)
    assert_same(ys, op.reference(xs))


@pytest.mark.product(
    op=[op for op in OPS if op not in ANY_SHAPE],
    count=(0, 1, 33, 509),
    size=(2, 3, 8),
    dtype=(np.int8, np.float32, np.complex128),
)
def test_lengths_of_the_free_dimension(op: Op, count: int, size: int, dtype: Any):
    xs = blocks(op, size, dtype, shape=with_length(op, size, count))
    if count:
        ys = assert_conforms(op, lambda f, x: f(x), mesh(size), xs)
    else:  # with which lax.all_gather fails
        ys = jax.jit(mapped(op.over("x")["ours"], mesh(size)))(xs)
    assert_same(ys, op.reference(xs))


@pytest.mark.parametrize(
    "op", [op for op in OPS if op.name.endswith("_tiled")], ids=lambda op: op.name
)
def test_dividing_and_joining_nothing(op: Op):
    shape = [0 if length % 97 == 0 else length for length in op.shape(97)]
    if op.name.startswith("all_gather"):
        shape[int(op.name.split("_")[2])] = 0
    xs = np.zeros((2, *shape), np.float32)
    assert_same(jax.jit(mapped(op.over("x")["ours"], mesh(2)))(xs), op.reference(xs))


@pytest.mark.product(
    op=[op for op in OPS if "_1" not in op.name and not op.name.startswith(("reduce_s", "all_to"))],
    size=(1, 2, 3),
)
def test_scalars(op: Op, size: int):
    if op.name.endswith("_tiled"):
        text = r'all_gather\(x, "x"\): x: axis: expected an array dimension in \[0, 0\), got'
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(mapped(op.over("x")["ours"], mesh(size)), blocks(op, size, shape=()))
        return
    xs = blocks(op, size, shape=())
    ys = assert_conforms(op, lambda f, x: f(x), mesh(size), xs)
    assert_same(ys, op.reference(xs))


@pytest.mark.parametrize("start", [1, 3])
@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_operands_that_start_anywhere(op: Op, start: int):
    shape = op.shape(4)
    xs = blocks(op, 4, np.int8, shape=(int(np.prod(shape)) + start,))

    def f(f: Any, x: Any) -> Any:
        return f(x[start:].reshape(shape))

    ys = assert_conforms(op, f, mesh(4), xs)
    assert_same(ys, op.reference(xs[:, start:].reshape(4, *shape)))


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_a_few_mebibytes(op: Op):
    size = 4
    xs = blocks(op, size, shape=with_length(op, size, 2**16 + 3))
    with counted_calls() as count:
        assert_same(jax.jit(mapped(op.over("x")["ours"], mesh(size)))(xs), op.reference(xs))
    assert count.calls == (size if auto_is_native() else 0)


@pytest.mark.full
def test_more_than_two_to_the_31_elements():
    size, count = 2, 2**31 + 5
    # Made on the devices and looked at there: a block is 2 GiB.

    def ends(x: Any) -> Any:
        bits = jnp.full(count, 1, np.int8).at[-1].set(x.astype(np.int8))
        y = jaxcoll.all_reduce(bits, "x")
        return y[0], y[2**31], y[-1]

    got = jax.jit(mapped(ends, mesh(size)))(np.array([3, 4]))
    assert_same(got, tuple(np.full(2, value, np.int8) for value in (2, 2, 7)))


def test_the_figures_of_an_exchange_do_not_overflow():
    # 2**31 elements a block, 2**34 bytes: csrc/host/copy_work.h takes int64.
    wide = 2**31
    figures = all_to_all_layout((8, wide, 2), 8, 0, 2, 8)
    rows, columns, run = figures[:3]
    assert rows * columns * run == 8 * wide * 2 * 8 // 8
    assert all(0 <= figure < 2**63 for figure in figures)


@pytest.mark.parametrize("split", range(3))
@pytest.mark.parametrize("concat", range(3))
def test_an_exchange_moves_every_byte_once(split: int, concat: int):
    """Applies the figures with NumPy, and compares with what they stand for."""
    size, shape = 3, [2, 4, 5]
    shape[split] = 6
    op = BY_NAME["all_to_all_1_1_tiled"]
    xs = blocks(op, size, np.int8, shape=shape)
    layout = all_to_all_layout(shape, 1, split, concat, size)
    reference: Any = op.reference  # a partial, whose other dimensions are wanted
    ys = reference.func(xs, split=split, concat=concat, tiled=True)
    moved = np.full_like(ys, -99)
    rows, columns, run, from_block, from_row, from_column, to_block, to_row, to_column = layout
    for source, target, i, j in np.ndindex(size, size, rows, columns):
        start = target * from_block + i * from_row + j * from_column
        end = source * to_block + i * to_row + j * to_column
        moved[target].reshape(-1)[end : end + run] = xs[source].reshape(-1)[start : start + run]
    assert_same(moved, ys)

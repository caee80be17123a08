"""The same bits on every rank and in every run, in rank order, in a tree or alone."""

from typing import Any

import jax
import numpy as np
import pytest
from checks import assert_same, auto_is_native, mapped, mesh
from matmuls import KINDS, function, operands

import jaxcoll

# One remainder of every vector length, and more than one piece of the engine's work.
LENGTHS = (1, 3, 17, 1009, 65537)


def random_blocks(size: int, length: int, dtype: Any) -> np.ndarray:
    """Returns floats whose sum depends on the order, over many magnitudes."""
    rng = np.random.default_rng(length)
    shape = (size, length)
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 5, shape)).astype(dtype)


def in_rank_order(xs: np.ndarray, op: str) -> np.ndarray:
    """Returns x_0 + x_1 + ... in that order, in float32 for half precision."""
    wide = xs.astype(np.float32) if xs.dtype == np.float16 else xs
    total = wide[0]
    for x in wide[1:]:
        total = total * x if op == "prod" else total + x
    total = total / wide.dtype.type(len(xs)) if op == "mean" else total
    with np.errstate(over="ignore"):  # beyond float16 is inf
        return total.astype(xs.dtype)


@pytest.mark.product(
    op=("sum", "mean", "prod"),
    dtype=(np.float32, np.float64, np.float16),
    size=(2, 3, 4, 8),
    length=LENGTHS,
)
def test_sums_are_in_rank_order_on_every_rank_and_in_every_run(
    op: Any, dtype: Any, size: int, length: int
):
    xs = random_blocks(size, length, dtype)
    if op == "prod":
        xs = (1 + xs / np.abs(xs).max() / 8).astype(dtype)
    f = jax.jit(mapped(lambda x: jaxcoll.all_reduce(x, "x", op), mesh(size)))
    runs = [np.asarray(f(xs)) for _ in range(3)]
    for ys in runs:
        assert_same(ys, np.stack([runs[0][0]] * size))
    if auto_is_native():
        assert_same(runs[0][0], in_rank_order(xs, op))


@pytest.mark.product(op=("sum", "mean"), size=(2, 3, 4, 8), length=LENGTHS)
def test_scattered_sums_have_the_bits_of_whole_ones(op: Any, size: int, length: int):
    if not auto_is_native():
        pytest.skip("lax promises no order")
    xs = random_blocks(size, size * length, np.float32)

    def both(x: Any) -> Any:
        whole = jaxcoll.all_reduce(x, "x", op)
        return whole, jaxcoll.reduce_scatter(x, "x", op=op, tiled=True)

    whole, parts = jax.jit(mapped(both, mesh(size)))(xs)
    assert_same(whole[0], in_rank_order(xs, op))
    if op == "sum":
        assert_same(parts.reshape(-1), whole[0])
    else:
        np.testing.assert_array_max_ulp(np.asarray(parts).reshape(-1), np.asarray(whole[0]), 1)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_tree_has_the_bits_of_its_leaves(size: int):
    tree = {
        f"{np.dtype(dtype).name}_{length}": random_blocks(size, length, dtype)
        for dtype in (np.float32, np.float64, np.float16)
        for length in (*LENGTHS[:3], 4099)
    }

    def both(tree: Any) -> Any:
        together = jaxcoll.all_reduce(tree, "x")
        return together, jax.tree.map(lambda x: jaxcoll.all_reduce(x, "x"), tree)

    together, alone = jax.jit(mapped(both, mesh(size)))(tree)
    assert_same(together, alone)


def test_permuted_devices_keep_the_order_of_ranks():
    if not auto_is_native():
        pytest.skip("lax promises no order")
    xs = random_blocks(4, 4099, np.float32)
    for over in (mesh(4), mesh(4, reverse=True)):
        ys = jax.jit(mapped(lambda x: jaxcoll.all_reduce(x, "x"), over))(xs)
        assert_same(ys, np.stack([in_rank_order(xs, "sum")] * 4))


@pytest.mark.parametrize("backend", ["auto", "native"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_products_have_the_same_bits_in_every_run_and_gathered_ones_on_every_rank(
    kind: str, backend: str, size: int
):
    if backend == "native" and not auto_is_native():
        pytest.skip("about native calls")
    rng = np.random.default_rng(0)
    xs, ws = (
        rng.normal(size=a.shape).astype(np.float32) for a in operands(kind, size, 33, 700, 65)
    )
    ws[:] = ws[0]
    f = jax.jit(mapped(lambda x, w: function(kind)(x, w, "x", backend=backend), mesh(size)))
    runs = [np.asarray(f(xs, ws)) for _ in range(4)]
    for ys in runs:
        assert_same(ys, runs[0])
        if "gather" in kind:
            assert_same(ys, np.stack([ys[0]] * size))

"""Small sums over peer memory, in programs lowered for GPUs; the body of the kernels is real."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, auto_is_native, mesh

import jaxcoll
from jaxcoll import _decisions

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")

Log = Callable[[], str]


def _run(xs: Any, op: Any = "sum") -> tuple[Any, str]:
    """Returns the reduction over the first dimension, and the order that `explain` says."""
    size = len(jax.tree.leaves(xs)[0])
    f = jax.shard_map(
        lambda x: jaxcoll.all_reduce(x, "x", op=op), mesh=mesh(size), in_specs=jax.P("x"),
        out_specs=jax.P(),
    )  # fmt: skip
    with _decisions.recording() as recording:
        ys = jax.block_until_ready(jax.jit(f)(xs))
    (row,) = recording.decisions
    assert row.path == "native"
    return jax.tree.map(lambda y: y[0], ys), row.order


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float32, "f32"),
        (np.float64, "f64"),
        (np.int8, "i8"),
        (np.uint32, "i32"),
        (np.int64, "i64"),
        (np.complex64, "f32"),
    ],
)
def test_sums(dtype: Any, name: str, size: int, peers: Log):
    rng = np.random.default_rng(size)
    xs = rng.integers(-9, 9, (size, 3, 5)).astype(dtype)
    with jax.enable_x64(True):
        y, order = _run(xs)
    assert_same(y, xs.sum(0, dtype=dtype))
    assert order == "by rank"
    assert f"kernel jaxcoll_one_shot_{name}" in peers()


def test_the_order_is_that_of_the_ranks(peers: Log):
    del peers
    for numbers, expected in (([1e8, 1, -1e8], 0), ([1e8, -1e8, 1], 1)):
        y, _ = _run(np.array(numbers, np.float32)[:, None])
        assert y[0] == expected


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_rounded_once(dtype: Any, peers: Log):
    one = 2048 if dtype == jnp.float16 else 256
    for size in (2, 4):
        xs = np.array([one, *[1.0] * (size - 1)], dtype)[:, None]
        y, order = _run(xs)
        assert y[0] == jnp.asarray(one + size - 1, dtype)
        assert order == "by rank"
    log = peers()
    assert f"two_shot_{'f16' if dtype == jnp.float16 else 'bf16'}" not in log
    assert "one_shot_f32" in log  # of four ranks, which the program has widened


def test_trees_and_large_sums(peers: Log):
    tree = {"w": np.ones((2, 30_000), np.float32), "b": np.ones((2, 7), np.int32)}
    y, order = _run(tree)
    assert_same(y, jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), tree))
    log = peers()
    assert order == "by rank"
    assert "kernel jaxcoll_two_shot_f32" in log
    _, order = _run(np.ones((2, 100_000), np.float32))
    assert order == "NCCL's"
    _, order = _run([np.ones((2, 3), np.float32)] * 5)
    assert order == "NCCL's"
    assert "two_shot" not in peers()


def test_other_reductions_are_nccls(peers: Log):
    _, order = _run(np.ones((2, 3), np.float32), op="max")
    assert order == "NCCL's"
    assert "all_reduce" in peers()
    _, order = _run(np.ones((3, 3), np.float32), op="mean")  # a sum, and a division
    assert order == "by rank"

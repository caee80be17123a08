"""Programs as they are lowered for GPUs, computed on the CPU: every op, dtype and matmul."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_conforms, assert_same, auto_is_native, mesh
from helpers import BY_NAME, DTYPES, EXAMPLES, OPS, Op, blocks, refused

import jaxcoll
from jaxcoll import _cuda, _decisions, _nccl_types

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")

Log = Callable[[], str]
# What NCCL does not have, and lax does.
_ON_LAX = ("all_reduce_and", "all_reduce_or")
_REDUCES = [BY_NAME[f"all_reduce_{name}"] for name in ("sum", "mean", "max", "prod")]


@pytest.mark.slow
@pytest.mark.product(op=OPS, size=(2, 3, 4))
def test_values_and_types(op: Op, size: int, gpus: Log):
    xs = blocks(op, size)
    ys = assert_conforms(op, lambda f, x: f(x), mesh(size), xs, check_vma=True)
    assert_same(ys, op.reference(xs))
    calls = [line for line in gpus().splitlines() if re.match(r"\d ", line)]
    assert bool(calls) == (op.name not in _ON_LAX)


@pytest.mark.slow
@pytest.mark.product(op=(*_REDUCES, BY_NAME["reduce_scatter_sum_0"]), dtype=DTYPES, size=(2, 3))
def test_dtypes(op: Op, dtype: np.dtype, size: int, gpus: Log):
    del gpus
    if refused(op, dtype):
        pytest.skip("it has no meaning")
    with jax.enable_x64(True):
        xs = blocks(op, size, dtype)
        f = jax.jit(lambda x: op.ours(x, "x"))
        ys = jax.shard_map(
            lambda x: f(x[0])[None], mesh=mesh(size), in_specs=jax.P("x"), out_specs=jax.P("x"),
            check_vma=False,
        )(xs)  # fmt: skip
        assert_same(ys, op.reference(xs))


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_gradients(op: Op, gpus: Log):
    def squared(f: Any, x: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jnp.square(f(x))))(x)

    assert_conforms(op, squared, mesh(3), blocks(op, 3), check_vma=True)
    assert "type" in gpus()


def test_half_precision_is_rounded_once(gpus: Log):
    """2048 + 1 + 1 + 1: float16 has no 2049."""
    xs = np.array([[2048], [1], [1], [1]], np.float16)
    f = jax.shard_map(
        lambda x: jaxcoll.all_reduce(x, "x"), mesh=mesh(4), in_specs=jax.P("x"), out_specs=jax.P()
    )
    assert jax.jit(f)(xs)[0] == np.float16(2051)
    assert "type 7 " in gpus()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float64])
def test_max_and_min_of_nan_and_others(dtype: Any, gpus: Log):
    """NCCL's own drop NaN."""
    del gpus
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 2e-38, -2e-38, 1.5, -2.5, -1.5])
    xs = np.stack([np.roll(values, i) for i in range(3)]).astype(dtype)

    def both(x: Any) -> Any:
        return jaxcoll.all_reduce(x, "x", op="max"), jaxcoll.all_reduce(x, "x", op="min")

    with jax.enable_x64(True):
        f = jax.shard_map(both, mesh=mesh(3), in_specs=jax.P("x"), out_specs=jax.P())
        most, least = jax.jit(f)(xs)
    wide = xs.astype(np.float64)
    assert_same(most, np.maximum.reduce(wide)[None].astype(dtype))
    assert_same(least, np.minimum.reduce(wide)[None].astype(dtype))


def test_auto_is_lax_until_it_is_faster(gpus: Log, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_cuda, "IS_FASTER", False)
    del gpus

    def row(backend: Any) -> Any:
        f = jax.shard_map(
            lambda x: jaxcoll.all_reduce(x, "x", backend=backend),
            mesh=mesh(2),
            in_specs=jax.P("x"),
            out_specs=jax.P(),
        )
        (row,) = jaxcoll.explain(f, np.ones((2, 3), np.float32)).rows
        return row

    assert row("native").path == "native"
    assert (row("auto").path, "as fast as XLA's own" in row("auto").reason) == ("lax", True)


def test_a_tree_is_one_group(gpus: Log):
    tree = {"w": np.ones((2, 300)), "b": np.ones((2, 7)), "n": np.ones((2, 5), np.int32)}
    f = jax.shard_map(
        lambda x: jaxcoll.all_reduce(x, "x"), mesh=mesh(2), in_specs=jax.P("x"), out_specs=jax.P()
    )
    with _decisions.recording() as recording:
        jax.block_until_ready(jax.jit(f)(tree))
    log = gpus().splitlines()
    lines = [line for line in log if "all_reduce" in line]
    lines = [line for line in lines if " all_reduce 1 " not in line]  # with which NCCL connects
    assert len(lines) == 6
    for rank in range(2):
        # After the one with which NCCL connects.
        groups = [line for line in log if line.startswith(f"{rank} group of ")]
        assert groups[-1] == f"{rank} group of 3"
    (row,) = recording.decisions
    assert (row.path, row.order) == ("native", "NCCL's")


def test_communicators_are_made_once_for_a_group(gpus: Log):
    f = jax.jit(
        jax.shard_map(
            lambda x: jaxcoll.all_gather(jaxcoll.all_reduce(x, "x"), "x"),
            mesh=mesh(4),
            in_specs=jax.P("x"),
            out_specs=jax.P(None, "x"),
            check_vma=False,
        )
    )
    for _ in range(2):
        jax.block_until_ready(f(np.ones((4, 3))))
    log = gpus()
    assert log.count("get_unique_id") == 1
    assert log.count("init rank") == 4


@pytest.mark.product(
    dtype=(np.float32, jnp.bfloat16), axis=(-2, -1), size=(2, 3), way=("gpus", "peers")
)
def test_matmuls(axis: int, size: int, dtype: Any, way: str, request: pytest.FixtureRequest):
    """With their gradients, whose operands are transposed; by NCCL and over peer memory."""
    log: Log = request.getfixturevalue(way)
    rng = np.random.default_rng(size)
    x = jnp.asarray(rng.integers(-3, 4, (2, 6 * size, 4)), dtype)
    w = jnp.asarray(rng.integers(-3, 4, (4, 3 * size)), dtype)

    def loss(x: Any, w: Any, backend: Any) -> Any:
        y = jaxcoll.all_gather_matmul(x, w, "x", backend=backend)
        z = jaxcoll.matmul_reduce_scatter(y, y[0, :1].T, "x", scatter_axis=-2, backend=backend)
        v = jaxcoll.matmul_reduce_scatter(x, w, "x", scatter_axis=axis, backend=backend)
        return jax.lax.psum(jnp.sum(z).astype(np.float32) + jnp.sum(v * v), "x")

    def run(backend: str) -> Any:
        f = jax.value_and_grad(lambda x, w: loss(x, w, backend), argnums=(0, 1))
        mapped = jax.shard_map(
            f, mesh=mesh(size), in_specs=(jax.P(None, "x"), jax.P()),
            out_specs=(jax.P(), (jax.P(None, "x"), jax.P())), check_vma=True,
        )  # fmt: skip
        with jaxcoll.using(backend="auto"):
            return jax.jit(mapped)(x, w)

    expected = run("lax")
    log()
    assert_same(run("native"), expected)
    lines = log()
    assert (" send " in lines) == (way == "gpus")
    assert ("kernel jaxcoll_say" in lines) == (way == "peers")


def test_the_program_for_cuda(gpus: Log):
    """No operand says which rank a device is: its id stands in the call."""
    del gpus
    f = jax.shard_map(
        lambda x: jaxcoll.all_gather(x, "x", axis=1), mesh=mesh(2),
        in_specs=jax.P("x"), out_specs=jax.P("x"),
    )  # fmt: skip
    shape = jax.ShapeDtypeStruct((2, 3), np.float32)
    text = jax.jit(f).trace(shape).lower(lowering_platforms=("cuda",)).as_text()
    assert "@jaxcoll_cuda_all_gather" in text
    assert "devices = array<i64: 0, 1>" in text
    assert "partition_id" not in text


@pytest.mark.parametrize(
    ("dtype", "op", "ranks", "expected"),
    [
        ("float32", "mean", 4, ("float32", "mean", False)),
        ("float32", "mean", 3, ("float32", "sum", True)),
        ("bfloat16", "sum", 2, ("bfloat16", "sum", False)),
        ("bfloat16", "sum", 3, ("float32", "sum", False)),
        ("bfloat16", "max", 3, ("int32", "max", False, "float32")),
        ("float64", "min", 2, ("int64", "min", False, "float64")),
        ("float16", "mean", 6, ("float32", "sum", True)),
        ("float16", "mean", 2, ("float32", "mean", False)),
        ("bfloat16", "mean", 2, ("bfloat16", "mean", False)),
        ("int16", "min", 2, ("int32", "min", False)),
        ("bool", "or", 2, ("bool", "or", False)),
    ],
)
def test_how_reductions_travel(dtype: str, op: str, ranks: int, expected: tuple):
    assert _nccl_types.carried(dtype, op, ranks) == _nccl_types.Carried(*expected)


@pytest.mark.parametrize(
    ("dtype", "op"), [("int32", "and"), ("complex64", "prod"), ("bool", "sum")]
)
def test_what_nccl_has_not(dtype: str, op: str):
    assert isinstance(_nccl_types.carried(dtype, op, 2), str)

"""Every op with every dtype, and what floating point has beside numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checks import assert_conforms, assert_same, auto_is_native, counted_calls, mapped, mesh
from helpers import BY_NAME, DTYPES, EXAMPLES, OPS, Op, blocks, refused
from jax import lax

import jaxcoll

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BFLOAT16)


@pytest.mark.product(op=OPS, size=(2, 3), check_vma=(True, False))
def test_values_and_types(op: Op, size: int, check_vma: bool):
    dtypes = [dtype for dtype in DTYPES if not refused(op, dtype)]
    xs = {dtype.name: blocks(op, size, dtype) for dtype in dtypes}

    def of_each(which: str) -> Any:
        f = op.over("x")[which]
        return mapped(lambda tree: jax.tree.map(f, tree), mesh(size), check_vma=check_vma)

    assert jax.eval_shape(of_each("ours"), xs) == jax.eval_shape(of_each("twin"), xs)
    with counted_calls() as count:
        ys = jax.block_until_ready(jax.jit(of_each("ours"))(xs))
    assert_same(ys, {name: op.reference(x) for name, x in xs.items()})
    assert count.calls == (size * len(dtypes) if auto_is_native() else 0)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_dtypes_that_have_no_meaning(op: Op):
    for dtype in DTYPES:
        if text := refused(op, dtype):
            with pytest.raises(TypeError, match=rf'\(x, "x"\): x: {text}'):
                jax.eval_shape(mapped(op.over("x")["ours"], mesh(2)), blocks(op, 2, dtype))


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
@pytest.mark.parametrize(
    "dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.int4], ids=lambda d: d.__name__
)
def test_dtypes_that_no_path_supports(op: Op, dtype: Any):
    xs = jax.ShapeDtypeStruct((4, *op.shape(4)), dtype)
    text = rf'\(x, "x"\): x: dtype {np.dtype(dtype).name} is not supported; use one of bool, int8,'
    with pytest.raises(TypeError, match=text):
        jax.eval_shape(mapped(op.over("x")["ours"], mesh(4)), xs)


# ---- Half precision: summed in float32, rounded once ---------------------------------------------

# What stepwise rounding loses: each 1 is half a unit in the last place of the first number.
TINY_STEPS = {np.dtype(np.float16): ([2048, 1, 1, 1], 2052), BFLOAT16: ([256, 1, 1, 1], 260)}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "lax"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check_vma"])
def test_half_precision_sums_are_rounded_once(dtype: np.dtype, backend: Any, check_vma: bool):
    terms, total = TINY_STEPS[dtype]
    xs = np.repeat(np.array(terms, dtype)[:, None], 8, axis=1)

    def sums(x: Any) -> Any:
        return (
            jaxcoll.all_reduce(x, "x"),
            jaxcoll.reduce_scatter(x, "x", tiled=True),
            jaxcoll.all_reduce(x, "x", "mean") * jnp.asarray(4, dtype),
            jaxcoll.reduce_scatter(x, "x", op="mean", tiled=True) * jnp.asarray(4, dtype),
        )

    with jaxcoll.using(backend=backend):
        results = jax.jit(mapped(sums, mesh(4), check_vma=check_vma))(xs)
    for result in results:
        assert_same(result, np.full(result.shape, total, dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_sums_over_a_vmapped_axis_are_rounded_once(dtype: np.dtype):
    terms, total = TINY_STEPS[dtype]
    f = jax.vmap(lambda x: jaxcoll.all_reduce(x, "batch"), axis_name="batch")
    assert_same(jax.jit(f)(np.array(terms, dtype)), np.full(4, total, dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_sums_over_mesh_and_vmap_are_rounded_once(dtype: np.dtype):
    terms, total = TINY_STEPS[dtype]

    def f(x: Any) -> Any:
        over_both = lambda x: jaxcoll.all_reduce(x, ("x", "batch"))  # noqa: E731
        return jax.vmap(over_both, axis_name="batch")(x)

    xs = np.array(terms, dtype).reshape(2, 2)
    assert_same(jax.jit(mapped(f, mesh(2), check_vma=False))(xs), np.full((2, 2), total, dtype))


@pytest.mark.parametrize("backend", ["auto", "lax"])
def test_half_precision_means_do_not_overflow(backend: Any):
    xs = np.full((4, 4), 60000, np.float16)

    def means(x: Any) -> Any:
        return (
            jaxcoll.all_reduce(x, "x", "mean"),
            jaxcoll.reduce_scatter(x, "x", op="mean", tiled=True),
        )

    with jaxcoll.using(backend=backend):
        everywhere, scattered = jax.jit(mapped(means, mesh(4)))(xs)
    assert_same((everywhere, scattered), (xs, xs[:, :1]))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "lax"])
def test_half_precision_products_are_rounded_once(dtype: np.dtype, backend: Any):
    terms = np.array([1 + float(jnp.finfo(dtype).eps)] * 4, dtype)
    f = mapped(lambda x: jaxcoll.all_reduce(x, "x", "prod", backend=backend), mesh(4))
    once = np.multiply.reduce(terms.astype(np.float32)).astype(dtype)
    if backend == "auto" and not auto_is_native():
        pytest.skip("the lax path is the other case")
    assert_same(jax.jit(f)(terms), np.full(4, once))


# ---- NaN, infinities, zeros ----------------------------------------------------------------------

SPECIAL = np.array(
    [
        [np.nan, 1.0, np.inf, -np.inf, 0.0, np.nan, np.inf, 1.0],
        [1.0, np.nan, -np.inf, -np.inf, -0.0, np.nan, np.inf, np.inf],
        [2.0, 1.0, 1.0, -np.inf, 0.0, np.nan, np.inf, -np.inf],
    ]
)


@pytest.mark.product(
    op=[op for op in OPS if op.name.startswith("all_reduce") and op.name[11:] not in ("and", "or")],
    dtype=[dtype for dtype in DTYPES if dtype.kind == "f" or dtype == BFLOAT16],
)
def test_special_values_as_in_lax(op: Op, dtype: np.dtype):
    xs = np.tile(SPECIAL, (1, 5)).astype(dtype)  # through whole vectors and their remainder
    assert_conforms(op, lambda f, x: f(x), mesh(3), xs)


@pytest.mark.parametrize("extremum", ["max", "min"])
def test_extrema_of_zeros_are_signed_as_in_lax(extremum: str):
    op = BY_NAME[f"all_reduce_{extremum}"]
    for zeros in ([0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0]):
        xs = np.repeat(np.array(zeros, np.float32)[:, None], 9, axis=1)
        assert_conforms(op, lambda f, x: jnp.signbit(f(x)), mesh(2), xs)


@pytest.mark.product(op=[op for op in OPS if "reduce" not in op.name], backend=("auto", "lax"))
def test_copies_keep_every_bit(op: Op, backend: Any):
    shape = (4, *op.shape(4))
    bits = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    bits[0].flat[:3] = (0x7FC00001, 0xFFC12345, 0x80000000)  # NaNs with payloads, -0.0

    def f(x: Any) -> Any:
        y = op.ours(lax.bitcast_convert_type(x, np.float32), "x", backend=backend)
        return lax.bitcast_convert_type(y, np.uint32)

    assert_same(jax.jit(mapped(f, mesh(4)))(bits), op.reference(bits))


@pytest.mark.parametrize("name", ["ppermute_ring", "all_to_all_0_2", "broadcast_last"])
def test_random_keys_travel(name: str):
    op = BY_NAME[name]
    shape = (2, *op.shape(2), 2)
    xs = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)

    def f(x: Any) -> Any:
        return jax.random.key_data(op.ours(jax.random.wrap_key_data(x), "x"))

    want = np.stack([op.reference(xs[..., i]) for i in range(2)], axis=-1)
    assert_same(jax.jit(mapped(f, mesh(2)))(xs), want)


def test_random_keys_have_no_sum():
    def f(x: Any) -> Any:
        return jaxcoll.all_reduce(jax.random.wrap_key_data(x), "x")

    with pytest.raises(
        TypeError, match=r'all_reduce\(x, "x"\): x: dtype key<fry> is not supported'
    ):
        jax.eval_shape(mapped(f, mesh(2)), np.zeros((2, 2), np.uint32))

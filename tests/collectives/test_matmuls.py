"""The collective matmuls: values, types and derivatives, and how the native ones come about."""

import ctypes
import functools as ft
import pathlib
import platform
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import (
    assert_conforms,
    assert_same,
    auto_is_native,
    counted_calls,
    mapped,
    mesh,
    native_missing,
)
from helpers import SIZES, blocks
from jax import lax
from matmuls import BATCHES, DTYPES, KINDS, function, operands, reference, row
from programs import DERIVATIVES, TRANSFORMATIONS, Function

import jaxcoll
from jaxcoll import _blas, _cpu, _crossovers, _native
from jaxcoll.collectives import _matmul

needs_native = pytest.mark.skipif(native_missing() is not None, reason="about native calls")


@pytest.mark.product(kind=KINDS, batch=BATCHES, dtype=DTYPES, size=SIZES, check_vma=(True, False))
def test_values_are_numpys(kind: str, batch: Any, dtype: np.dtype, size: int, check_vma: bool):
    op = row(kind, batch)
    xs = blocks(op, size, dtype)
    ys = jax.jit(mapped(op.over("x")["ours"], mesh(size), check_vma=check_vma))(xs)
    assert_same(ys, op.reference(xs))


@pytest.mark.product(kind=KINDS, program=list(TRANSFORMATIONS), batch=BATCHES, size=(1, 2, 3, 4))
def test_transformations_are_those_of_two_steps(kind: str, program: str, batch: Any, size: int):
    assert_conforms(row(kind, batch), TRANSFORMATIONS[program], mesh(size))


@pytest.mark.slow
@pytest.mark.product(
    kind=KINDS, program=list(DERIVATIVES), batch=BATCHES, check_vma=(True, False), size=(1, 2, 3, 4)
)
def test_derivatives_are_those_of_two_steps(
    kind: str, program: str, batch: Any, check_vma: bool, size: int
):
    def derivatives(f: Function, x: Any) -> Any:
        return {derivative.__name__: derivative(f, x) for derivative in DERIVATIVES[program]}

    op = row(kind, batch)
    xs = blocks(op, size, np.float64)
    assert_conforms(op, derivatives, mesh(size), xs, check_vma=check_vma, rtol=1e-12)


@pytest.mark.product(kind=KINDS, batch=BATCHES, dtype=DTYPES, size=SIZES)
def test_on_lax_as_a_ring(
    kind: str, batch: Any, dtype: np.dtype, size: int, monkeypatch: pytest.MonkeyPatch
):
    """The form of lax's path where communication runs beside computation."""
    monkeypatch.setattr(_matmul, "_overlaps", lambda ctx, axes: True)
    op = row(kind, batch)
    xs = blocks(op, size, dtype)
    f = jax.jit(mapped(op.over("x", backend="lax")["ours"], mesh(size)))
    assert_same(f(xs), op.reference(xs))
    assert ("collective_permute" in f.lower(xs).as_text()) == (size > 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batched", ["x", "w", "both"])
def test_a_batch_of_either_operand(kind: str, batched: str):
    xs, ws = operands(kind, 2, 3, 4, 5)
    of_x, of_w = batched != "w", batched != "x"
    xs = np.stack([xs, xs + 1], axis=1) if of_x else xs
    ws = np.stack([ws, ws - 1], axis=1) if of_w else ws

    def f(x: Any, w: Any) -> Any:
        call = function(kind)
        in_axes = (0 if of_x else None, 0 if of_w else None)
        return jax.vmap(lambda x, w: call(x, w, "x"), in_axes=in_axes)(x, w)

    ys = jax.jit(mapped(f, mesh(2)))(xs, ws)
    for i in range(2):
        want = reference(kind, xs[:, i] if of_x else xs, ws[:, i] if of_w else ws)
        assert_same(ys[:, i], want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", ["y", ("x", "y")])
def test_a_part_of_the_mesh_and_all_of_it(kind: str, axis: Any):
    op = row(kind)
    ranks = 2 if axis == "y" else 4
    xs = blocks(op, 4, shape=op.shape(ranks))
    ys = jax.jit(mapped(op.over(axis)["ours"], mesh(2, 2)))(xs)
    want = [op.reference(group) for group in (np.split(xs, 2) if ranks == 2 else [xs])]
    assert_same(ys, np.concatenate(want))


@pytest.mark.parametrize("kind", KINDS)
def test_several_panels_on_several_cores(kind: str):
    xs, ws = operands(kind, 3, 515, 130, 70)
    f = mapped(lambda x, w: function(kind)(x, w, "x"), mesh(3))
    want = reference(kind, xs, ws)
    assert_same(jax.jit(f)(xs, ws), want)
    if auto_is_native() and not _native.matmul_is_behind():
        (row,) = jaxcoll.explain(f, xs, ws).rows
        if kind in ("gather_rows", "scatter_rows"):
            assert row.path == "native"
        else:
            assert (row.path, row.reason) == (
                "two-step", "XLA's matmul is faster for this shape and dtype",
            )  # fmt: skip
        with jaxcoll.using(backend="native"):
            assert_same(jax.jit(f)(xs, ws), want)


# Of a rank's block, (rows, inner, columns), and of how many ranks.
Shape = tuple[str, tuple[int, int, int], int, str]
SHAPES: list[Shape] = [
    ("gather_rows", (128, 4096, 256), 2, "native"),  # what travels is most of it
    ("gather_rows", (127, 4096, 256), 2, "two-step"),
    ("gather_rows", (128, 4096, 257), 2, "two-step"),
    ("gather_rows", (2048, 1024, 1024), 2, "native"),  # large, of many rows
    ("gather_rows", (2047, 1024, 1024), 2, "two-step"),
    ("gather_rows", (1024, 1024, 2048), 2, "two-step"),
    ("gather_inner", (2048, 1024, 1024), 2, "two-step"),
    ("gather_inner", (128, 4096, 256), 2, "two-step"),
    ("scatter_rows", (2048, 1024, 1024), 2, "two-step"),
    ("scatter_rows", (512, 256, 1024), 3, "native"),
    ("scatter_rows", (511, 256, 1024), 3, "two-step"),
    ("scatter_rows", (512, 257, 1024), 3, "two-step"),
    ("scatter_columns", (512, 256, 1024), 3, "two-step"),
    ("scatter_rows", (1024, 1024, 4096), 2, "native"),  # in two steps, a large buffer
    ("scatter_rows", (1023, 1024, 4096), 2, "two-step"),
    ("scatter_rows", (1024, 1025, 4096), 2, "two-step"),
]


# The same where the BLAS keeps up with XLA's matmul.
SHAPES_OF_BLAS: list[Shape] = [
    ("gather_rows", (512, 256, 1024), 2, "native"),
    ("gather_rows", (511, 256, 1024), 2, "two-step"),
    ("gather_rows", (512, 255, 1024), 2, "two-step"),
    ("gather_inner", (512, 1024, 1024), 2, "two-step"),
    ("scatter_rows", (512, 1024, 256), 3, "native"),
    ("scatter_rows", (511, 1024, 256), 3, "two-step"),
    ("scatter_rows", (512, 1024, 255), 3, "two-step"),
    ("scatter_columns", (512, 1024, 256), 3, "two-step"),
]


def path_of(kind: str, shape: tuple[int, int, int], ranks: int, dtype: Any = np.float32) -> str:
    """Returns the path that blocks of such a shape take."""
    rows, inner, columns = shape
    x = (ranks, rows * (ranks if kind == "scatter_rows" else 1), inner)
    w = inner * (ranks if kind == "gather_inner" else 1)
    w = (ranks, w, columns * (ranks if kind == "scatter_columns" else 1))
    operands = [jax.ShapeDtypeStruct(of, dtype) for of in (x, w)]
    f = mapped(lambda x, w: function(kind)(x, w, "x"), mesh(ranks))
    (row,) = jaxcoll.explain(f, *operands).rows
    return row.path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the machine be one of so many cores, whose BLAS is not behind XLA's matmul."""
    if not auto_is_native():
        pytest.skip("auto is lax here")

    def be(keeps_up: bool, cores: int = 2) -> None:
        monkeypatch.setattr(_blas, "is_behind", lambda sets: None)
        monkeypatch.setattr(_blas, "keeps_up", lambda sets: keeps_up)
        monkeypatch.setattr(_matmul, "num_cpus", lambda: cores)

    return be


@needs_native
@pytest.mark.parametrize(
    ("keeps_up", "kind", "shape", "ranks", "path"),
    [(False, *shape) for shape in SHAPES] + [(True, *shape) for shape in SHAPES_OF_BLAS],
)
def test_shapes_take_what_is_faster(
    keeps_up: bool, kind: str, shape: tuple[int, int, int], ranks: int, path: str,
    machine: Callable[..., None],
):  # fmt: skip
    machine(keeps_up)
    assert path_of(kind, shape, ranks) == path


@needs_native
def test_a_blas_that_keeps_up_is_not_taken_for_all(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    shape: tuple[str, tuple[int, int, int], int] = ("gather_rows", (512, 1024, 1024), 2)
    machine(keeps_up=True)
    assert path_of(*shape) == path_of(*shape, np.float64) == "native"
    assert path_of(*shape, jnp.bfloat16) == "two-step"
    machine(keeps_up=True, cores=3)
    assert path_of(*shape) == "two-step"  # which takes all cores
    # What was measured on the machine counts for more.
    machine(keeps_up=True)
    monkeypatch.setenv("JAXCOLL_CROSSOVERS", str(tmp_path / "crossovers.json"))
    _crossovers._measured.cache_clear()
    try:
        for lost_at, path in ((512, "two-step"), (511, "native"), (0, "native")):
            one_call = _crossovers.OneCall(4**2 * 128**3, 4**2 * lost_at**3)
            found = {"all_gather_matmul": one_call}
            _crossovers.write_matmuls(found, 4, "one process", 1 << 40)  # and for less ranks
            assert path_of(*shape) == path
        # Small ones alone, all of them best in one call, say nothing of large ones.
        _crossovers.write_matmuls({"all_gather_matmul": one_call}, 4, "one process", 4**2 * 128**3)
        assert path_of(*shape) == "native"
    finally:
        _crossovers._measured.cache_clear()


@needs_native
@pytest.mark.parametrize(
    ("of_x", "of_w", "rows", "path"),
    [
        (jnp.bfloat16, jnp.bfloat16, 64, "native"),
        (jnp.bfloat16, jnp.bfloat16, 65, "two-step"),
        (jnp.float16, jnp.float16, 65, "two-step"),
        (jnp.float32, jnp.bfloat16, 65, "native"),  # multiplied in float32 by both
    ],
)
def test_half_precision_is_left_to_xla_sooner(
    of_x: Any, of_w: Any, rows: int, path: str, machine: Callable[..., None]
):
    machine(keeps_up=False)
    call = ft.partial(jaxcoll.all_gather_matmul, preferred_element_type=np.float32)
    f = mapped(lambda x, w: call(x, w, "x"), mesh(2))
    x = jax.ShapeDtypeStruct((2, rows, 64), of_x)
    w = jax.ShapeDtypeStruct((2, 64, 64), of_w)
    (row,) = jaxcoll.explain(f, x, w).rows
    assert row.path == path


@needs_native
def test_large_blocks_where_cores_are_left_over(machine: Callable[..., None]):
    machine(keeps_up=False, cores=3)
    assert path_of("gather_rows", (2048, 1024, 1024), 2) == "two-step"


@pytest.mark.parametrize("kind", KINDS)
# Without (3, 0, 5): XLA can't compile a map all of whose operands are empty (jax 0.10.2 to 0.12).
@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 4, 0), (1, 1, 1)])
def test_nothing_and_one(kind: str, shape: tuple[int, int, int]):
    xs, ws = operands(kind, 2, *shape)
    ys = jax.jit(mapped(lambda x, w: function(kind)(x, w, "x"), mesh(2)))(xs, ws)
    assert_same(ys, reference(kind, xs, ws))


@pytest.mark.parametrize("kind", ["scatter_rows", "scatter_columns", "gather_inner"])
@pytest.mark.parametrize("path", ["auto", "lax", "ring"])
def test_half_precision_is_rounded_once(kind: str, path: str, monkeypatch: pytest.MonkeyPatch):
    if path == "ring":
        monkeypatch.setattr(_matmul, "_overlaps", lambda ctx, axes: True)
    terms = np.array([256, 1, 1], jnp.bfloat16).reshape(3, 1, 1)  # 256 + 1 in bfloat16 is 256
    ones = np.ones_like(terms)
    if kind == "gather_inner":
        xs, ws = terms, np.concatenate([ones] * 3, axis=1)
    else:
        xs, ws = ones, terms
        if kind == "scatter_rows":
            xs = np.concatenate([xs] * 3, axis=1)
        else:
            ws = np.concatenate([ws] * 3, axis=2)
    for wanted in (None, jnp.float32):
        call = ft.partial(
            function(kind),
            preferred_element_type=wanted,
            backend="auto" if path == "auto" else "lax",
        )
        f = mapped(lambda x, w, call=call: call(x, w, "x"), mesh(3))
        ys = jax.jit(f)(xs, ws)
        assert ys.dtype == (wanted or jnp.bfloat16)
        np.testing.assert_array_equal(ys.astype(np.float32), np.full((3, 1, 1), 258))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["native", "lax"])
@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (np.float32, jnp.bfloat16),
        (np.float32, np.float64),
        (jnp.bfloat16, np.float32),
        (np.float16, jnp.bfloat16),
    ],
)
def test_the_dtype_that_is_preferred(kind: str, backend: str, dtype: Any, wanted: Any):
    if backend == "native" and native_missing():
        backend = "auto"
    call = ft.partial(function(kind), preferred_element_type=wanted, backend=backend)
    xs, ws = operands(kind, 2, 6, 10, 4, dtype)

    def f(x: Any, w: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: call(x, w, "x"), x, w)
        return y, pull(jnp.ones_like(y))

    ys, (dx, dw) = jax.jit(mapped(f, mesh(2)))(xs, ws)
    want = reference(kind, xs.astype(np.float64), ws.astype(np.float64))
    assert_same(ys, want.astype(wanted))
    assert (dx.dtype, dw.dtype) == (dtype, dtype)
    dim = -2 if "rows" in kind else -1
    if "gather" in kind:
        whole = np.concatenate(list(xs), axis=dim).astype(np.float64)
        ones = np.ones_like(want)
        dws = np.stack([whole.T @ one for one in ones])
        total = sum(one @ w.astype(np.float64).T for one, w in zip(ones, ws, strict=True))
        dxs = np.stack(np.split(total, 2, axis=dim))
    else:
        one = np.ones_like(np.concatenate(list(want), axis=dim))
        dxs = np.stack([one @ w.astype(np.float64).T for w in ws])
        dws = np.stack([x.astype(np.float64).T @ one for x in xs])
    assert_same(dx, dxs.astype(dtype))
    assert_same(dw, dws.astype(dtype))


# ---- The native path -----------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_one_call_each_and_transpose_nothing(kind: str):
    xs, ws = operands(kind, 2, 8, 8, 8)

    def f(x: Any, w: Any) -> Any:
        call = function(kind)
        return jax.grad(lambda x, w: (call(x, w, "x", backend="native") ** 2).sum(), (0, 1))(x, w)

    program = jax.jit(mapped(f, mesh(2)))
    text = program.lower(xs, ws).as_text()
    assert len(re.findall("w_is_transposed = 1", text)) == 1  # dx
    assert len(re.findall("x_is_transposed = 1", text)) == 1  # dw
    with counted_calls() as count:
        jax.block_until_ready(program(xs, ws))
    assert count.calls == 3 * 2


@needs_native
def test_explain_names_the_call():
    xs, ws = operands("gather_rows", 2, 8, 8, 8)
    with jaxcoll.using(backend="native"):
        (row,) = jaxcoll.explain(
            mapped(lambda x, w: jaxcoll.all_gather_matmul(x, w, "x"), mesh(2)), xs, ws
        ).rows
    assert (row.op, row.path, row.dtypes) == (
        "all_gather_matmul", "native", ("float32", "float32"),
    )  # fmt: skip


@needs_native
def test_products_leave_the_threads_of_blas_as_they_were():
    blas = _blas.find()
    assert isinstance(blas, _blas.Blas)
    threads = ctypes.CFUNCTYPE(ctypes.c_int)(blas.num_threads)
    before = threads()
    xs, ws = operands("gather_rows", 4, 64, 64, 64)
    f = jax.jit(mapped(lambda x, w: jaxcoll.all_gather_matmul(x, w, "x"), mesh(4)))
    for _ in range(20):
        jax.block_until_ready(f(xs, ws))
    assert threads() == before


@needs_native
def test_without_a_blas_it_is_two_steps(monkeypatch: pytest.MonkeyPatch):
    if not auto_is_native():
        pytest.skip("auto is lax here")
    monkeypatch.setattr(_blas, "find", lambda: "SciPy has no BLAS today")
    _native.matmul_problem.cache_clear()
    xs, ws = operands("scatter_rows", 2, 3, 4, 5)

    def f(x: Any, w: Any) -> Any:
        return jaxcoll.matmul_reduce_scatter(x, w, "x")

    try:
        (row,) = jaxcoll.explain(mapped(f, mesh(2)), xs, ws).rows
        assert (row.path, row.reason) == ("two-step", "SciPy has no BLAS today")
        assert_same(jax.jit(mapped(f, mesh(2)))(xs, ws), reference("scatter_rows", xs, ws))
        with pytest.raises(jaxcoll.NativeUnavailableError, match="SciPy has no BLAS today"):
            jax.jit(
                mapped(
                    lambda x, w: jaxcoll.matmul_reduce_scatter(x, w, "x", backend="native"),
                    mesh(2),
                )
            )(xs, ws)
    finally:
        _native.matmul_problem.cache_clear()


def test_a_blas_with_older_kernels_than_the_processor(monkeypatch: pytest.MonkeyPatch):
    for kernels, sets, is_behind in (
        ("Haswell", ["baseline", "avx2", "avx512"], True),
        ("Haswell", ["baseline", "avx2"], False),
        ("SkylakeX", ["baseline", "avx2", "avx512"], False),
        (None, ["baseline", "avx2", "avx512"], False),
    ):
        monkeypatch.setattr(_blas, "kernels", lambda kernels=kernels: kernels)
        assert (_blas.is_behind(sets) is not None) is is_behind, (kernels, sets)


def test_a_blas_as_fast_as_xlas_matmul(monkeypatch: pytest.MonkeyPatch):
    for kernels, sets, keeps_up in (
        ("Haswell", ["baseline", "avx2"], True),
        ("Zen", ["baseline", "avx2"], True),
        ("Haswell", ["baseline", "avx2", "avx512"], False),
        ("SkylakeX", ["baseline", "avx2", "avx512"], False),
        ("Nehalem", ["baseline", "avx2"], False),
        ("Nehalem", ["baseline"], False),
        (None, ["baseline", "avx2"], False),
        ("Haswell", [], False),  # without the extension
    ):
        monkeypatch.setattr(_blas, "kernels", lambda kernels=kernels: kernels)
        assert _blas.keeps_up(sets) is keeps_up, (kernels, sets)


@pytest.mark.parametrize(
    ("dtype", "flags", "converts"),
    [
        ("bfloat16", {"sse2", "avx2"}, True),
        ("bfloat16", {"sse2", "avx512_bf16"}, False),
        ("bfloat16", {"sse2", "avx512_fp16"}, True),
        ("float16", {"sse2", "avx512_fp16"}, False),
        ("float16", {"sse2", "avx512_bf16"}, True),
        ("float32", {"sse2"}, False),
        ("bfloat16", set(), False),  # not known
    ],
)
def test_where_the_processor_multiplies_in_float32(
    dtype: str, flags: set[str], converts: bool, monkeypatch: pytest.MonkeyPatch
):
    if platform.machine() == "x86_64" and pathlib.Path("/proc/cpuinfo").exists():
        assert "sse2" in _cpu.flags()
    monkeypatch.setattr(_cpu, "flags", lambda: flags)
    assert _cpu.converts(dtype) is converts
    # XLA's products that are wider than their factors are slow where it converts these.
    assert _product(dtype, platforms=("cpu",)) == ("float32" if converts else dtype, "float32")
    assert _product(dtype, platforms=("cuda",)) == (dtype, "float32")
    assert _product(dtype, platforms=("cuda",), rounded=dtype) == (dtype, dtype)
    # Of a platform that is not known, it is taken for this one.
    assert _product(dtype, rounded=dtype) == ("float32" if converts else dtype, "float32")


def _product(dtype: str, **options: Any) -> tuple[str, str]:
    """Returns the dtypes of the factors and of the product, as they are multiplied."""
    x, w = (jax.ShapeDtypeStruct((2, 2), dtype) for _ in range(2))
    traced = jax.make_jaxpr(lambda x, w: _matmul.multiply(x, w, **options))(x, w)
    (product,) = (e for e in traced.eqns if "dot_general" in str(e))
    return product.invars[0].aval.dtype.name, product.outvars[0].aval.dtype.name


def test_values_are_the_same_where_factors_are_converted(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.integers(-3, 4, (2, 8, 4)), jnp.bfloat16)
    w = jnp.asarray(rng.integers(-3, 4, (3, 4, 6)), jnp.bfloat16)

    def loss(x: Any, w: Any) -> Any:
        ys = jax.vmap(lambda w: jaxcoll.all_gather_matmul(x, w, "x", backend="lax"))(w)
        z = jaxcoll.matmul_reduce_scatter(x, w[0], "x", backend="lax")
        total = sum(jnp.sum(y.astype(np.float32) ** 2) for y in (ys, z))
        return jax.lax.psum(total, "x")

    found = []
    for converts in (True, False):
        monkeypatch.setattr(_cpu, "converts", lambda dtype, converts=converts: converts)
        jax.clear_caches()
        f = jax.shard_map(
            jax.value_and_grad(loss, argnums=(0, 1)), mesh=mesh(2),
            in_specs=(jax.P(None, "x"), jax.P()), out_specs=(jax.P(), (jax.P(None, "x"), jax.P())),
        )  # fmt: skip
        found.append(jax.jit(f)(x, w))
    jax.clear_caches()
    assert_same(*found)


@needs_native
def test_with_a_blas_that_is_behind_auto_takes_two_steps(monkeypatch: pytest.MonkeyPatch):
    if not auto_is_native():
        pytest.skip("auto is lax here")
    monkeypatch.setattr(_blas, "is_behind", lambda sets: "SciPy's BLAS is old")
    xs, ws = operands("gather_rows", 2, 3, 4, 5)
    for backend, path in (("auto", "two-step"), ("native", "native")):
        f = mapped(lambda x, w, b=backend: jaxcoll.all_gather_matmul(x, w, "x", backend=b), mesh(2))
        (row,) = jaxcoll.explain(f, xs, ws).rows
        assert row.path == path
        assert (row.reason == "SciPy's BLAS is old") is (path == "two-step")
    assert "SciPy's BLAS is old" in str(jaxcoll.info())


_SGEMM = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)


@needs_native
@pytest.mark.parametrize("late", range(3))
@pytest.mark.parametrize("kind", ["gather_rows", "scatter_rows"])
def test_products_of_others_are_made_before_a_late_rank_comes(
    kind: str, late: int, monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []
    blas = _blas.find()
    assert isinstance(blas, _blas.Blas)
    multiply = _SGEMM(blas.sgemm)

    def multiply_and_note(*arguments: Any) -> None:
        multiply(*arguments)
        events.append("product")

    noting = _SGEMM(multiply_and_note)  # not to be freed before the BLAS is set back
    address = ctypes.cast(noting, ctypes.c_void_p).value or 0
    # Of sums, the terms before the late rank's.
    possible = 4 if kind == "gather_rows" else 2 * late

    def hold(rank: Any, zero: Any) -> Any:
        if rank == late:
            until = time.monotonic() + 20
            while events.count("product") < possible and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(0.05)  # for products that must not be
            events.append("the late rank")
        return zero

    def f(x: Any, w: Any) -> Any:
        zero = jnp.zeros((), x.dtype)
        zero = jax.pure_callback(hold, zero, lax.axis_index("x"), zero)
        return function(kind)(x + zero, w, "x", backend="native")

    xs, ws = operands(kind, 3, 32, 16, 8)
    program = jax.jit(mapped(f, mesh(3), check_vma=False))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(_blas, "find", lambda: blas._replace(sgemm=address))
            _native.matmul_problem.cache_clear()
            ys = jax.block_until_ready(program(xs, ws))
    finally:
        _native.matmul_problem.cache_clear()
        assert _native.matmul_problem() is None
    assert_same(ys, reference(kind, xs, ws))
    assert events == ["product"] * possible + ["the late rank"] + ["product"] * (9 - possible)


def test_in_two_steps_of_lax_no_product_is():
    """Neither of blocks that have nothing to do with the late rank."""
    events: list[str] = []

    def note(what: str, of: int, rank: Any, value: Any) -> Any:
        if rank == of or of < 0:
            time.sleep(0 if of < 0 else 0.2)
            events.append(what)
        return value

    def f(x: Any, w: Any) -> Any:
        rank = lax.axis_index("x")
        x = jax.pure_callback(ft.partial(note, "the late rank", 2), x, rank, x)
        products = [block @ w for block in lax.all_gather(x, "x")]
        seen = ft.partial(note, "product", -1)
        return jnp.concatenate([jax.pure_callback(seen, y, rank, y) for y in products])

    xs, ws = operands("gather_rows", 3, 32, 16, 8)
    ys = jax.block_until_ready(jax.jit(mapped(f, mesh(3), check_vma=False))(xs, ws))
    assert_same(ys, reference("gather_rows", xs, ws))
    assert events == ["the late rank", *["product"] * 9]


# ---- Errors --------------------------------------------------------------------------------------

GATHER, SCATTER = jaxcoll.all_gather_matmul, jaxcoll.matmul_reduce_scatter
MATRIX = np.zeros((6, 5), np.float32)
WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("integers", lambda x: GATHER(x.astype(np.int32), MATRIX, "x"), TypeError,
     'all_gather_matmul(x, w, "x"): x: expected an array of float16, bfloat16, float32, float64, '
     "got int32. For others, call the collective and jnp.matmul one after the other."),
    ("a list", lambda x: GATHER(x, [[1.0]], "x"), TypeError, "w: expected an array of float16"),
    ("w of three dimensions", lambda x: GATHER(x, MATRIX[None], "x"), ValueError,
     'all_gather_matmul(x, w, "x"): w: expected a matrix (k, n), got shape (1, 6, 5).'),
    ("another axis", lambda x: GATHER(x[None], MATRIX, "x", gather_axis=0), ValueError,
     "gather_axis: expected -2 (rows) or -1, one of the last two dimensions of x, got 0 for shape "
     "(1, 4, 6)."),
    ("no axis", lambda x: SCATTER(x, MATRIX, "x", scatter_axis="rows"), TypeError,
     "scatter_axis: expected -2 or -1, got 'rows'."),
    ("a vector", lambda x: GATHER(x[0], MATRIX, "x"), ValueError,
     "x: expected 2 dimensions or more, got (6,)."),
    ("another k", lambda x: GATHER(x, MATRIX[1:], "x"), ValueError,
     "w: expected (k, n) with k = 6 for x of shape (4, 6) and gather_axis=-2, got (5, 5)."),
    ("k of one rank", lambda x: GATHER(x, MATRIX, "x", gather_axis=-1), ValueError,
     "w: expected (k, n) with k = 24, 4 ranks' 6, for x of shape (4, 6) and gather_axis=-1, got "
     "(6, 5)."),
    ("rows that do not divide", lambda x: SCATTER(x[:3], MATRIX, "x"), ValueError,
     "x: expected rows that the 4 ranks divide for scatter_axis=-2, got 3."),
    ("columns that do not divide", lambda x: SCATTER(x, MATRIX, "x", scatter_axis=-1), ValueError,
     "w: expected columns that the 4 ranks divide for scatter_axis=-1, got 5."),
    ("k of a scatter", lambda x: SCATTER(x, MATRIX[1:], "x"), ValueError,
     "w: expected (k, n) with k = 6 for x of shape (4, 6), got (5, 5)."),
    ("an integer result", lambda x: GATHER(x, MATRIX, "x", preferred_element_type=int), TypeError,
     "preferred_element_type: expected one of float16, bfloat16, float32, float64, got int"),
    ("another backend", lambda x: GATHER(x, MATRIX, "x", backend="gpu"), ValueError, "backend"),
    ("an unknown axis", lambda x: GATHER(x, MATRIX, "y"), NameError, "all_gather_matmul"),
]  # fmt: skip


@pytest.mark.parametrize(("f", "error", "text"), [c[1:] for c in WRONG], ids=[c[0] for c in WRONG])
def test_bad_input(f: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=re.escape(text)):
        jax.eval_shape(mapped(f, mesh(4)), np.zeros((4, 4, 6), np.float32))

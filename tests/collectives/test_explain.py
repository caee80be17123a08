"""`explain`: its rows are the collectives of the compiled program, and the calls that run."""

import collections
import functools as ft
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import auto_is_native, counted_calls, mapped, mesh, native_missing
from helpers import EXAMPLES, OPS, Op, blocks
from jax import lax
from programs import DERIVATIVES, TRANSFORMATIONS

import jaxcoll
from jaxcoll import _decisions
from jaxcoll.diagnosis import black_box

needs_native = pytest.mark.skipif(native_missing() is not None, reason="needs the native extension")

COLLECTIVE = r"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute)\b"


def expected_of(row: Any) -> list[str]:
    """Returns what lax makes of a row, in StableHLO."""
    if row.op == "all_to_all" and row.group_size == 1:
        return []
    op = {"broadcast": "all_reduce", "ppermute": "collective_permute"}.get(row.op, row.op)
    if row.reduction in ("prod", "and", "or"):
        op = "all_gather"
    return [op] * len(row.shapes)


def assert_explained(f: Any, *arguments: Any, all_used: bool = True) -> jaxcoll.Report:
    """Asserts that the report and the program agree. XLA drops what is not `all_used`."""
    report = jaxcoll.explain(f, *arguments)
    native = [row for row in report.rows if row.path == "native"]
    lowered = f.lower(*arguments)
    assert len(native) == len(re.findall(r"custom_call @jaxcoll_(?!token)", lowered.as_text()))
    on_lax = [row for row in report.rows if row.path == "lax"]
    found = collections.Counter(re.findall(COLLECTIVE, lowered.as_text()))
    expected = collections.Counter(op for row in on_lax for op in expected_of(row))
    assert found == expected, (found - expected, expected - found)
    compiled = set(re.findall(r"jaxcoll_\w+\".*?site = (\d+)", lowered.compile().as_text()))
    sites = {str(row.site) for row in native}
    assert compiled == sites if all_used else compiled <= sites
    return report


@pytest.mark.alike
@pytest.mark.product(op=OPS, backend=("auto", "lax"), size=(1, 2, 4))
def test_rows_are_the_calls_of_the_program(op: Op, backend: Any, size: int):
    f = jax.jit(mapped(op.over("x", backend=backend)["ours"], mesh(size)))
    xs = blocks(op, size)
    report = assert_explained(f, xs)
    with counted_calls() as count:
        jax.block_until_ready(f(xs))
    native = [row for row in report.rows if row.path == "native"]
    assert len(native) * size == count.calls
    for row in report.rows:
        assert op.name.startswith(row.op)
        assert row.axes == ("x",)
        assert row.called == "jaxcoll"
        assert row.group_size == size
        assert row.bytes == sum(
            int(np.prod(shape)) * jnp.dtype(dtype).itemsize
            for shape, dtype in zip(row.shapes, row.dtypes, strict=True)
        )
        assert (row.reason == "") == (row.path == "native")
        assert "helpers.py" in row.source


@pytest.mark.product(op=EXAMPLES, program=list(TRANSFORMATIONS), accelerated=(True, False))
def test_programs(op: Op, program: str, accelerated: bool):
    function = op.over("x")["twin" if accelerated else "ours"]
    f = jax.jit(mapped(lambda x: TRANSFORMATIONS[program](function, x), mesh(2)))
    with jaxcoll.accelerate_lax(accelerated):
        report = assert_explained(f, blocks(op, 2))
    if auto_is_native():
        called = "jax.lax" if accelerated else "jaxcoll"
        assert any(row.path == "native" and row.called == called for row in report.rows)


@pytest.mark.product(op=[op for op in EXAMPLES if op.differentiable], program=list(DERIVATIVES))
def test_derivatives(op: Op, program: str):
    def derivatives(x: Any) -> Any:
        return [f(op.over("x")["ours"], x) for f in DERIVATIVES[program]]

    f = jax.jit(mapped(derivatives, mesh(2)))
    assert_explained(f, blocks(op, 2, np.float64), all_used=False)


@needs_native
@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_rows_count_once_what_runs_often(op: Op):
    """A scan of 3 steps, and a jitted function that is called twice beside it."""

    @jax.jit
    def inner(x: Any) -> Any:
        return x + op.ours(x, "x", backend="auto").sum(dtype=x.dtype)

    def body(x: Any) -> Any:
        looped, _ = lax.scan(lambda x, _: (inner(x), None), x, length=3)
        return inner(inner(looped))

    f = jax.jit(mapped(body, mesh(2), check_vma=False))
    xs = blocks(op, 2)
    native = [row for row in assert_explained(f, xs, all_used=False).rows if row.path == "native"]
    with counted_calls() as count:
        jax.block_until_ready(f(xs))
    assert len(native) == 1  # JAX lowers equal functions once
    assert count.calls == 2 * (3 + 2)


@pytest.mark.parametrize("how", ["jit", "plain", "pmap"])
def test_any_kind_of_function(how: str):
    def total(x: Any) -> Any:
        return jaxcoll.all_reduce(x, "x")

    f = {
        "jit": lambda: jax.jit(mapped(total, mesh(2))),
        "plain": lambda: mapped(total, mesh(2)),
        "pmap": lambda: jax.pmap(total, axis_name="x", devices=jax.devices()[:2]),
    }[how]()
    (row,) = jaxcoll.explain(f, np.ones((2, 3), np.float32)).rows
    assert (row.op, row.reduction, row.axes, row.group_size) == ("all_reduce", "sum", ("x",), 2)
    assert (row.shapes, row.dtypes, row.bytes) == (((3,),), ("float32",), 12)


def test_static_arguments_and_shapes_without_arrays():
    def f(x: Any, times: int, *, axis: str) -> Any:
        def body(x: Any) -> Any:
            for _ in range(times):
                x = jaxcoll.all_gather(x, axis, tiled=True).sum(keepdims=True) + x
            return x

        return jax.shard_map(body, mesh=mesh(2), in_specs=jax.P("x"), out_specs=jax.P("x"))(x)

    jitted = jax.jit(f, static_argnums=1, static_argnames="axis")
    report = jaxcoll.explain(jitted, jax.ShapeDtypeStruct((4,), "float32"), 3, axis="x")
    assert len(report.rows) == 3


def test_it_says_the_same_twice():
    f = jax.jit(mapped(lambda x: jaxcoll.all_reduce(x, "x"), mesh(2)))
    xs = np.ones((2, 3))
    f(xs)
    assert jaxcoll.explain(f, xs) == jaxcoll.explain(f, xs)
    assert len(jaxcoll.explain(f, xs).rows) == 1


# ---- Reasons -------------------------------------------------------------------------------------


def only_row(f: Any, *arguments: Any) -> Any:
    (row,) = jaxcoll.explain(f, *arguments).rows
    return row


def test_lax_that_was_asked_for():
    f = mapped(lambda x: jaxcoll.all_reduce(x, "x", backend="lax"), mesh(2))
    assert only_row(f, np.ones((2, 3))).reason == 'backend="lax" was asked for'


def test_lax_that_is_not_accelerated():
    f = mapped(lambda x: lax.psum(x, "x"), mesh(2))
    row = only_row(f, np.ones((2, 3)))
    assert row.reason == (native_missing() or "jaxcoll.accelerate_lax() is off")
    assert row.called == "jax.lax"
    assert row.order == "XLA's"


@needs_native
@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu", "METAL"])
def test_other_platforms(op: Op, platform: str):
    over = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    xs = blocks(op, 2)
    shape = jax.ShapeDtypeStruct(xs.shape, xs.dtype)
    f = jax.jit(mapped(op.over("x", backend="native")["ours"], over))
    with pytest.raises(jaxcoll.NativeUnavailableError, match=f"the program is for {platform}"):
        f.trace(shape).lower(lowering_platforms=(platform,))
    g = jax.jit(mapped(op.over("x", backend="auto")["ours"], over))
    with _decisions.recording() as recording:  # what explain reads
        g.trace(shape).lower(lowering_platforms=(platform,))
    assert {row.path for row in recording.decisions} == {"lax"}
    assert f"the program is for {platform}" in recording.decisions[0].reason


@needs_native
def test_errors_name_the_line_of_the_run_alone():
    """Where no line of the user is inside the program: not that which explained it."""
    ours = ft.partial(jaxcoll.all_reduce, axis_name="x", backend="native")
    f = jax.jit(jax.shard_map(ours, mesh=mesh(2), in_specs=jax.P("x"), out_specs=jax.P()))
    x = np.ones((2, 53), np.float32)
    box = black_box.own()
    assert box is not None

    def explains() -> Any:
        return jaxcoll.explain(f, x).rows[0]

    def runs() -> None:
        jax.block_until_ready(f(x))

    row = explains()
    assert row.source.endswith("explains)")
    assert row.site not in box.sites()
    runs()
    (said,) = box.sites()[row.site]
    assert said["source"].endswith("runs)")
    explains()
    assert box.sites()[row.site] == [said]


@needs_native
def test_axes_that_are_left_to_the_compiler():
    over = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    f = jax.shard_map(
        lambda x: jaxcoll.all_reduce(x, "x", backend="auto"),
        mesh=over,
        in_specs=jax.P("x"),
        out_specs=jax.P(),
        axis_names={"x"},
    )
    assert "leaves the mesh axes ['y'] to the compiler" in only_row(f, np.ones((2, 3))).reason


# ---- The table -----------------------------------------------------------------------------------


def test_the_table():
    def step(x: Any) -> Any:
        tree = jaxcoll.all_reduce({"a": x, "b": [x, x]}, "x", op="mean", backend="lax")
        return tree["a"], jaxcoll.ppermute(x, "x", [(0, 1), (1, 0)], backend="lax")

    report = jaxcoll.explain(mapped(step, mesh(2)), np.ones((2, 600), np.float32))
    head, mean, permute = str(report).splitlines()
    assert re.split(r"  +", head) == [
        *("op", "axes", "operand", "bytes", "ranks", "path", "order", "called at"),
        "why not native",
    ]
    assert re.split(r"  +", mean)[:7] == [
        *("all_reduce mean", "x", "float32[600] + 2", "7.0 KiB", "2", "lax", "XLA's"),
    ]
    assert re.split(r"  +", permute)[:6] == ["ppermute", "x", "float32[600]", "2.3 KiB", "2", "lax"]


def test_nothing_to_explain():
    report = jaxcoll.explain(lambda x: x + 1, 2.0)
    assert report.rows == ()
    assert str(report) == "no collectives"


def test_a_replicated_operand_is_a_warning():
    f = jax.shard_map(
        lambda x: jaxcoll.all_reduce(x, "x"), mesh=mesh(2), in_specs=jax.P(), out_specs=jax.P()
    )
    (text,) = jaxcoll.explain(f, np.ones(3)).warnings
    assert 'the operand is replicated over "x"' in text

"""Every op in every kind of program: eager, traced, shared, lowered without devices, under pmap."""

import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, auto_is_native, counted_calls, mapped, mesh
from helpers import OPS, Op, blocks
from jax import lax
from jax.sharding import AbstractMesh, AxisType

import jaxcoll


def eagerly(op: Op) -> None:
    xs = blocks(op, 3)
    assert_same(mapped(op.over("x")["ours"], mesh(3))(xs), op.reference(xs))


def with_jit_switched_off(op: Op) -> None:
    xs = blocks(op, 2)
    with jax.disable_jit():
        ys = mapped(jax.jit(op.over("x")["ours"]), mesh(2), check_vma=False)(xs)
    assert_same(ys, op.reference(xs))


def one_function_on_two_meshes(op: Op) -> None:
    xs = blocks(op, 4)

    @jax.jit
    def f(xs: Any) -> Any:
        def body(x: Any) -> Any:
            return op.ours(x[0], "x")[None]

        return jax.shard_map(body, in_specs=jax.P("x"), out_specs=jax.P("x"))(xs)

    for over in (mesh(4), mesh(4, reverse=True), mesh(4)):
        with jax.set_mesh(over):
            ys = f(jax.device_put(xs, jax.NamedSharding(over, jax.P("x"))))
        assert_same(ys, op.reference(xs))
        assert list(ys.sharding.mesh.devices.flat) == list(over.devices.flat)


def on_an_explicit_mesh(op: Op) -> None:
    xs = blocks(op, 4)
    over = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    sharded = jax.device_put(xs, jax.NamedSharding(over, jax.P("x")))
    ys = jax.jit(mapped(op.over("x")["ours"], over))(sharded)
    assert_same(ys, op.reference(xs))


def under_an_abstract_mesh(op: Op) -> None:
    """One function, lowered without devices, then run on two meshes that fit."""
    xs = blocks(op, 4)
    over = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    f = jax.jit(mapped(op.over("x")["ours"], over))
    lowered = f.trace(jax.typeof(jnp.asarray(xs))).lower(lowering_platforms=("cpu",))
    assert len(re.findall(r"custom_call @jaxcoll_(?!token)", lowered.as_text())) == auto_is_native()
    for concrete in (mesh(4), mesh(4, reverse=True)):
        with counted_calls() as count:
            ys = f(jax.device_put(xs, jax.NamedSharding(concrete, jax.P("x"))))
            assert_same(ys, op.reference(xs))
        assert count.calls == (4 if auto_is_native() else 0)


def donated_operands(op: Op) -> None:
    xs = blocks(op, 4)
    donated = jax.device_put(xs, jax.NamedSharding(mesh(4), jax.P("x")))
    f = jax.jit(mapped(op.over("x")["ours"], mesh(4)), donate_argnums=0)
    ys = f(donated)
    assert_same(ys, op.reference(xs))
    assert ys.shape != xs.shape or donated.is_deleted()


def operands_that_are_used_again_keep_their_values(op: Op) -> None:
    xs = blocks(op, 4)

    def before_and_after(x: Any) -> Any:
        y = op.ours(x, "x")
        return x, y, x + 1, op.ours(x, "x")

    before, y, more, again = jax.jit(mapped(before_and_after, mesh(4)))(xs)
    assert_same((before, more), (xs, xs + 1))
    assert_same((y, again), (op.reference(xs),) * 2)


def results_feed_the_next_collective(op: Op) -> None:
    xs = blocks(op, 4)

    def chain(x: Any) -> Any:
        for _ in range(3):
            x = jaxcoll.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)])
        return op.ours(x, "x")

    assert_same(jax.jit(mapped(chain, mesh(4)))(xs), op.reference(np.roll(xs, 3, axis=0)))


def values_from_other_computations(op: Op) -> None:
    """Operands come out of fusions and results go into them."""
    xs = blocks(op, 4)

    def f(x: Any) -> Any:
        y = op.ours(x + x - x, "x")
        return (y + y - y)[...]

    assert_same(jax.jit(mapped(f, mesh(4)))(xs), op.reference(xs))


def operands_in_another_layout(op: Op) -> None:
    """What is transposed around the call may lie in memory as it lay before."""
    xs = blocks(op, 4)

    def f(x: Any) -> Any:
        y = op.ours(x.swapaxes(-1, -2), "x")
        return y.swapaxes(-1, -2) if y.ndim > 1 else y

    ys = np.asarray(jax.jit(mapped(f, mesh(4)))(xs.swapaxes(-1, -2)))
    assert_same(ys.swapaxes(-1, -2) if ys.ndim > 2 else ys, op.reference(xs))


def results_that_one_rank_reads(op: Op) -> None:
    """The call stands before the branch, and stays there; what nobody reads may go."""
    xs = blocks(op, 4)

    def f(x: Any) -> Any:
        op.ours(x + 1, "x")
        y = lax.pcast(op.ours(x, "x"), "x", to="varying") if op.unvarying else op.ours(x, "x")
        return lax.cond(lax.axis_index("x") == 1, lambda y: y + y, lambda y: 0 * y, y)

    doubled = 2 * op.reference(xs)
    doubled[[0, 2, 3]] = 0
    assert_same(jax.jit(mapped(f, mesh(4)))(xs), doubled)


PROGRAMS = {
    f.__name__: f
    for f in (
        eagerly,
        with_jit_switched_off,
        one_function_on_two_meshes,
        on_an_explicit_mesh,
        under_an_abstract_mesh,
        donated_operands,
        operands_that_are_used_again_keep_their_values,
        results_feed_the_next_collective,
        values_from_other_computations,
        operands_in_another_layout,
        results_that_one_rank_reads,
    )
}


@pytest.mark.alike
@pytest.mark.product(op=OPS, program=list(PROGRAMS))
def test_every_op_in(op: Op, program: str):
    PROGRAMS[program](op)


@pytest.mark.alike
@pytest.mark.product(op=OPS, size=(1, 3, 8))
def test_under_pmap(op: Op, size: int):
    xs = blocks(op, size)
    f = jax.pmap(op.over("ranks")["ours"], axis_name="ranks", devices=jax.devices()[:size])
    with counted_calls() as count:
        assert_same(f(xs), op.reference(xs))
    assert count.calls == (size if size > 1 and auto_is_native() else 0)


def test_lowering_without_devices_may_come_first():
    """Registering with XLA before JAX has its clients would keep JAX from starting."""
    script = """
import jax, jaxcoll
jaxcoll.simulate_cpu_devices(2)
over = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
f = jax.shard_map(lambda x: jaxcoll.all_reduce(x, "x"), mesh=over,
                  in_specs=jax.P("x"), out_specs=jax.P())
jax.jit(f).trace(jax.ShapeDtypeStruct((2,), "int32")).lower(lowering_platforms=("cpu",))
x = jax.device_put(jax.numpy.arange(2), jax.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x")))
assert jax.jit(f)(x) == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)

"""Calls in the wrong place: no map, another axis, the compiler's axis, replicated operands."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from checks import assert_same, mapped, mesh
from helpers import EXAMPLES, Op, blocks
from jax import lax
from jax.sharding import AxisType

import jaxcoll

FUNCTIONS = {op.name: op for op in EXAMPLES}
ONE_PER_FUNCTION = pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)


def function_name(op: Op) -> str:
    """Returns the public function of a row."""
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "broadcast")
    return next(name for name in names if op.name.startswith(name))


def call(op: Op, axis: str) -> Any:
    """Returns the function of a row without asking for the size of the axis."""
    function = getattr(jaxcoll, function_name(op))
    rest = {"all_to_all": (0, 0), "ppermute": ([(0, 1)],)}.get(function_name(op), ())
    return lambda x: function(x, axis, *rest)


@ONE_PER_FUNCTION
def test_an_unknown_axis_suggests_the_nearest(op: Op):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    over = jax.sharding.Mesh(devices, ("data", "model"))
    with pytest.raises(NameError) as info:
        jax.eval_shape(mapped(call(op, "dta"), over), np.zeros((4, 2)))
    assert str(info.value) == (
        f'{function_name(op)}(x, "dta"): axis_name: "dta" is not a mapped axis here; mapped '
        'here: "data", "model". Did you mean "data"?'
    )


def test_an_unknown_axis_in_a_tuple():
    with pytest.raises(NameError, match=r'"yy" is not a mapped axis here.* Did you mean "y"'):
        jax.eval_shape(
            mapped(lambda x: jaxcoll.all_reduce(x, ("x", "yy")), mesh(2, 2)), np.zeros(4)
        )


@ONE_PER_FUNCTION
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_outside_of_a_map(op: Op, jit: bool):
    f = jax.jit(call(op, "data")) if jit else call(op, "data")
    with pytest.raises(NameError) as info:
        f(np.zeros(2))
    assert str(info.value) == (
        f'{function_name(op)}(x, "data"): axis_name: "data" is not a mapped axis: the call is '
        "outside of a mapped context. Call it inside jax.shard_map(f, mesh=mesh, "
        'in_specs=jax.P("data"), out_specs=jax.P()), or under jax.vmap(f, axis_name="data").'
    )


@ONE_PER_FUNCTION
@pytest.mark.parametrize("kind", ["explicit", "set_mesh", "eager"])
def test_under_jit_with_named_sharding(op: Op, kind: str):
    """The compiler owns the axis: the text has the line to write."""
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,)
    over = jax.make_mesh((2,), ("data",), axis_types=types, devices=jax.devices()[:2])
    x = jax.device_put(np.zeros(2), jax.NamedSharding(over, jax.P("data")))
    f = call(op, "data") if kind == "eager" else jax.jit(call(op, "data"))
    around = jax.set_mesh(over) if kind == "set_mesh" else contextlib.nullcontext()
    with around, pytest.raises(NameError) as info:
        f(x)
    assert "is an axis of the mesh that the operand is sharded over" in str(info.value)
    assert 'jax.shard_map(f, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())' in str(
        info.value
    )


def test_under_jit_with_in_shardings():
    """JAX does not tell a traced function what its arguments are sharded over."""
    over = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = jax.NamedSharding(over, jax.P("data"))
    f = jax.jit(lambda x: jaxcoll.all_reduce(x, "data"), in_shardings=sharding)
    with pytest.raises(
        NameError, match=r"jax\.shard_map\(f, mesh=mesh, in_specs=jax\.P\(\"data\"\)"
    ):
        f(np.zeros(2))


@ONE_PER_FUNCTION
def test_pmap_without_axis_name(op: Op):
    f = jax.pmap(call(op, "batch"), devices=jax.devices()[:2])
    with pytest.raises(NameError) as info:
        f(np.zeros((2, 2)))
    assert str(info.value) == (
        f'{function_name(op)}(x, "batch"): axis_name: the jax.pmap (or jax.vmap) around this call '
        'has no axis_name. Write jax.pmap(f, axis_name="batch").'
    )


# ---- Replicated operands -------------------------------------------------------------------------

VARYING = [op for op in EXAMPLES if not op.name.startswith("broadcast")]


def on_replicated(op: Op, size: int = 2) -> Any:
    """Returns a traced-once call on an operand that is the same on every rank, and the operand."""
    x = blocks(op, size)[0]
    return jax.shard_map(
        lambda x: op.ours(x, "x"),
        mesh=mesh(size),
        in_specs=jax.P(),
        out_specs=jax.P() if op.unvarying else jax.P("x"),
    ), x


TEXT = (
    'the operand is replicated over "x": it is the same on every rank',
    'params = jax.lax.pcast(params, "x", to="varying")',
)


@pytest.fixture
def strict() -> Iterator[None]:
    jaxcoll.config.strict = True
    yield
    jaxcoll.config.strict = False


@pytest.mark.parametrize("op", VARYING, ids=lambda op: op.name)
def test_a_replicated_operand_is_logged(op: Op, caplog: pytest.LogCaptureFixture):
    f, x = on_replicated(op)
    with caplog.at_level(logging.WARNING, "jaxcoll"):
        jax.eval_shape(f, x)
    assert all(text in caplog.text for text in TEXT)
    assert f'{function_name(op)}(x, "x"): x: ' in caplog.text


def test_a_replicated_operand_is_counted_once_for_each_rank():
    f, x = on_replicated(FUNCTIONS["all_reduce_sum"])
    assert_same(jax.jit(f)(x), 2 * x)
    assert_same(jax.jit(jax.grad(lambda x: f(x).sum()))(x), np.full_like(x, 2))


@pytest.mark.parametrize("op", VARYING, ids=lambda op: op.name)
@pytest.mark.usefixtures("strict")
def test_a_replicated_operand_is_an_error_where_strict(op: Op):
    f, x = on_replicated(op)
    with pytest.raises(ValueError, match="replicated") as info:
        jax.eval_shape(f, x)
    assert all(text in str(info.value) for text in TEXT)


@pytest.mark.parametrize("op", VARYING, ids=lambda op: op.name)
def test_a_replicated_operand_is_an_error_where_jax_does_not_cast(op: Op):
    f, x = on_replicated(op)
    jax.config.update("jax_auto_pcast", False)
    try:
        with pytest.raises(ValueError, match="replicated") as info:
            jax.eval_shape(f, x)
    finally:
        jax.config.update("jax_auto_pcast", True)
    assert all(text in str(info.value) for text in TEXT)


@pytest.mark.usefixtures("strict")
def test_the_line_in_the_text_mends_it():
    def f(params: Any) -> Any:
        params = lax.pcast(params, "x", to="varying")
        return jaxcoll.all_reduce(params, "x")

    x = np.arange(3.0)
    mended = jax.shard_map(f, mesh=mesh(2), in_specs=jax.P(), out_specs=jax.P())
    assert_same(jax.jit(mended)(x), 2 * x)


@pytest.mark.usefixtures("strict")
def test_a_leaf_that_is_replicated_is_named():
    def f(x: Any) -> Any:
        return jaxcoll.all_reduce({"grads": x, "loss": [lax.psum(x, "x")]}, "x")

    with pytest.raises(ValueError, match=r"x\['loss'\]\[0\]: the operand is replicated"):
        jax.eval_shape(mapped(f, mesh(2)), np.zeros(2))


@pytest.mark.usefixtures("strict")
def test_untyped_axes_are_not_judged():
    f = jax.shard_map(
        lambda x: jaxcoll.all_reduce(x, "x"),
        mesh=mesh(2),
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    assert_same(jax.jit(f)(np.ones(2)), np.full(2, 2.0))

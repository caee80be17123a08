"""Collectives under a predicate that differs between their ranks: a warning, or an error."""

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import mesh
from helpers import EXAMPLES, Op, blocks
from jax import lax

import jaxcoll

HERE = "test_predicates.py"


def in_cond(f: Any, x: Any) -> Any:
    return lax.cond(x.sum() > 0, f, lambda x: f(x + 1), x)


def in_switch(f: Any, x: Any) -> Any:
    return lax.switch(jnp.int32(x.sum()) % 3, [f, f, lambda x: f(x + 1)], x)


def in_while(f: Any, x: Any) -> Any:
    def body(state: Any) -> Any:
        return state[0] + state[0], f(x)

    start = (x.sum().astype(jnp.float32), f(x))
    return lax.while_loop(lambda state: state[0] < 100, body, start)[1]


def in_while_condition(f: Any, x: Any) -> Any:
    def go_on(state: Any) -> Any:
        return (state[0] < 100) & (f(x).sum() > 0) & (x.sum() > 0)

    return lax.while_loop(go_on, lambda state: (state[0] + 1, state[1] + 1), (0, x))[1]


def in_inner_programs(f: Any, x: Any) -> Any:
    def branch(x: Any) -> Any:
        return lax.scan(lambda c, _: (jax.jit(jax.checkpoint(f))(c), None), x, length=2)[0]

    return lax.cond(x.sum() > 0, branch, lambda x: x, x)


PROGRAMS = {
    "lax.cond": in_cond,
    "lax.switch": in_switch,
    "lax.while_loop": in_while,
}


def lowered(body: Any, xs: Any, check_vma: bool = True) -> None:
    f = jax.shard_map(
        lambda x: jax.tree.map(lambda y: y[None], body(x[0])),
        mesh=mesh(len(xs)),
        in_specs=jax.P("x"),
        out_specs=jax.P("x"),
        check_vma=check_vma,
    )
    jax.jit(f).lower(xs)


@pytest.fixture
def strict() -> Iterator[None]:
    jaxcoll.config.strict = True
    yield
    jaxcoll.config.strict = False


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_a_predicate_that_varies_is_logged(op: Op, kind: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "jaxcoll"):
        lowered(lambda x: PROGRAMS[kind](op.over("x")["ours"], x), blocks(op, 2))
    (text, *_) = [r.getMessage() for r in caplog.records if "predicate" in r.getMessage()]
    assert f"stands under the predicate of the {kind} at " in text
    assert 'which varies over "x": ' in text
    assert text.count(HERE) >= 1


def test_both_lines_stand_in_the_text(caplog: pytest.LogCaptureFixture):
    def reduce(x: Any) -> Any:
        return jaxcoll.all_reduce(x, "x")

    with caplog.at_level(logging.WARNING, "jaxcoll"):
        lowered(lambda x: in_cond(reduce, x), np.ones((2, 3)))
    (text, *_) = [r.getMessage() for r in caplog.records]
    assert 'all_reduce over "x", called at ' in text
    assert f"{HERE}:" in text.split("stands under")[0]
    assert ".reduce)" in text.split("stands under")[0]
    assert "(in_cond)" in text.split("stands under")[1]
    assert 'jax.lax.pmax(p, "x")' in text


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("kind", PROGRAMS)
def test_it_is_an_error_where_strict(kind: str):
    with pytest.raises(ValueError, match="stands under the predicate of the " + kind):
        lowered(
            lambda x: PROGRAMS[kind](lambda x: jaxcoll.all_gather(x, "x").sum(0), x),
            np.ones((2, 3)),
        )


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("program", [in_inner_programs, in_while_condition])
def test_inner_programs_are_looked_into(program: Any):
    with pytest.raises(ValueError, match="stands under the predicate"):
        lowered(
            lambda x: program(lambda x: jaxcoll.ppermute(x, "x", [(0, 1), (1, 0)]), x),
            np.ones((2, 3)),
        )


@pytest.mark.usefixtures("strict")
def test_collectives_of_lax_count_too():
    with pytest.raises(ValueError, match='psum over "x", called at'):
        lowered(lambda x: in_cond(lambda x: lax.psum(x, "x"), x), np.ones((2, 3)))


@pytest.mark.usefixtures("strict")
def test_a_predicate_that_is_the_same_on_all_ranks_is_right():
    def agreed(x: Any) -> Any:
        total = lax.pmax(x.sum(), "x")

        def gather(x: Any) -> Any:
            return jaxcoll.all_gather(x, "x").sum(0)

        y = lax.cond(total > 0, gather, lambda x: x, x)
        z = lax.switch(jnp.int32(total), [gather, lambda x: x, gather], x)
        state = (total, y + z)
        return lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 1, gather(s[1])), state)

    lowered(agreed, np.ones((2, 2)))


@pytest.mark.usefixtures("strict")
def test_another_axis_is_right():
    over = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def body(x: Any) -> Any:
        predicate = lax.axis_index("y") == 0
        return lax.cond(predicate, lambda x: jaxcoll.all_gather(x, "x").sum(0), lambda x: x, x)

    f = jax.shard_map(body, mesh=over, in_specs=jax.P("x", "y"), out_specs=jax.P("x", "y"))
    jax.jit(f).lower(np.ones((4, 4)))


@pytest.mark.usefixtures("strict")
def test_untyped_axes_are_not_judged():
    lowered(
        lambda x: in_cond(lambda x: jaxcoll.all_reduce(x, "x"), x),
        np.ones((2, 3)),
        check_vma=False,
    )


def test_explain_reports_instead_of_raising():
    jaxcoll.config.strict = True
    try:
        f = jax.shard_map(
            lambda x: in_cond(lambda x: jaxcoll.all_reduce(x, "x"), x),
            mesh=mesh(2),
            in_specs=jax.P("x"),
            out_specs=jax.P(),
        )
        report = jaxcoll.explain(f, np.ones((2, 3)))
    finally:
        jaxcoll.config.strict = False
    assert any("stands under the predicate of the lax.cond" in text for text in report.warnings)
    assert "warning: all_reduce" in str(report)


def test_strict_counts_for_what_is_compiled_already():
    f = jax.jit(
        jax.shard_map(
            lambda x: in_cond(lambda x: jaxcoll.ppermute(x, "x", [(0, 1), (1, 0)]), x),
            mesh=mesh(2),
            in_specs=jax.P("x"),
            out_specs=jax.P("x"),
        )
    )
    xs = np.ones((2, 3))
    before = jax.block_until_ready(f(xs))
    jaxcoll.config.strict = True
    try:
        with pytest.raises(ValueError, match=r"stands under the predicate of the lax\.cond"):
            f(xs)
    finally:
        jaxcoll.config.strict = False
    np.testing.assert_array_equal(f(xs), before)

"""Where the result takes the memory of an operand: not where XLA would copy that first."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from checks import auto_is_native, mesh

import jaxcoll
from jaxcoll import _order

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")


def total(x: Any) -> Any:
    return jaxcoll.all_reduce(x, "x", backend="native")


def first(x: Any) -> Any:
    return jaxcoll.broadcast(x, "x", root=0, backend="native")


def over(f: Callable[..., Any], *, check_vma: bool = False) -> Callable[..., Any]:
    spec = jax.P("x")
    return jax.shard_map(f, mesh=mesh(2), in_specs=spec, out_specs=spec, check_vma=check_vma)


def operand(factor: int = 1) -> Any:
    return jax.device_put(
        factor * np.arange(8, dtype=np.float32).reshape(2, 4),
        jax.NamedSharding(mesh(2), jax.P("x")),
    )


SUM = np.stack([np.asarray(operand()).sum(axis=0)] * 2)
ROOT = np.stack([np.asarray(operand())[0]] * 2)
summed = over(total)  # one function for several calls
CASES = {
    # what: the program; of each result of a call, whether it is in place; what the program returns
    "an argument": (summed, [False], SUM),
    "an argument, checked": (over(lambda x: total(x) + x * 0, check_vma=True), [False], SUM),
    "an argument, reshaped": (over(lambda x: total(x[0])[None]), [False], SUM),
    "an argument of a function": (over(jax.checkpoint(total)), [False], SUM),
    "an argument, broadcast": (over(first), [False], ROOT),
    "what was computed": (over(lambda x: total(2 * x)), [True], 2 * SUM),
    "what was computed, broadcast": (over(lambda x: first(2 * x)), [True], 2 * ROOT),
    "what was computed outside": (lambda x: summed(2 * x), [True], 2 * SUM),
    "what was computed in a function": (
        lambda x: jax.jit(lambda y: summed(2 * y))(x), [True], 2 * SUM,
    ),
    "a result": (over(lambda x: total(total(x))), [False, True], 2 * SUM),
    "of a tree": (over(lambda x: sum(total((x, 2 * x)))), [False, True], 3 * SUM),
    "in a loop": (over(lambda x: jax.lax.fori_loop(0, 1, lambda _, y: total(y), x)), [True], SUM),
}  # fmt: skip


@pytest.fixture(params=[False, True], ids=["beside a token", "alone"])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether single results stand alone, as large ones do."""
    monkeypatch.setattr(_order, "gives_token", lambda n, _: n != 1 or not request.param)
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


@pytest.mark.parametrize("what", CASES)
def test_what_is_in_place(what: str, alone: bool):
    program, expected, result = CASES[what]
    f = jax.jit(program)
    x = operand()
    assert in_place(f, x, alone=alone) == expected
    np.testing.assert_array_equal(np.asarray(f(x)), result)
    np.testing.assert_array_equal(np.asarray(x), np.asarray(operand()))


@pytest.mark.parametrize("what", ["an argument", "an argument, reshaped", "an argument, broadcast"])
def test_an_argument_is_not_copied(what: str):
    program, _, _ = CASES[what]
    assert copies(jax.jit(program), operand()) == 0


def test_what_is_donated():
    """As it is it is summed in place, and not copied. Reshaped it would be, so it is read."""
    x, y = operand(), operand()
    f = jax.jit(summed, donate_argnums=0)
    assert in_place(f, x) == [True]
    assert copies(f, x) == 0
    reshaped = jax.jit(over(lambda x: total(x[0])[None]), donate_argnums=0)
    assert in_place(reshaped, y) == [False]
    np.testing.assert_array_equal(np.asarray(f(x)), SUM)
    np.testing.assert_array_equal(np.asarray(reshaped(y)), SUM)
    assert x.is_deleted()


def in_place(f: Any, x: Any, *, alone: bool = False) -> list[bool]:
    """Returns of each result of each call, in the program's order, whether it is in place."""
    found = []
    for line in f.lower(x).as_text().splitlines():
        if "@jaxcoll_" in line and "@jaxcoll_token" not in line:
            results = line.rsplit("->", 1)[1]
            count = results.count("tensor<")
            assert ("token" in results) != (alone and count == 1)
            places = [""] if alone and count == 1 else [str(i + 1) for i in range(count)]
            found += [f"output_tuple_indices = [{place}]" in line for place in places]
    return found


def copies(f: Any, x: Any) -> int:
    """Returns how many copies of a rank's operand the compiled program makes."""
    return len(re.findall(r"= f32\[[14,]+\]\S* copy\(", f.lower(x).compile().as_text()))

"""Where the result of a sum takes the memory of its operand: not where XLA would copy that first."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from checks import auto_is_native, mesh

import jaxcoll

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")


def total(x: Any) -> Any:
    return jaxcoll.all_reduce(x, "x", backend="native")


def over(f: Callable[..., Any]) -> Callable[..., Any]:
    spec = jax.P("x")
    return jax.shard_map(f, mesh=mesh(2), in_specs=spec, out_specs=spec, check_vma=False)


def operand(factor: int = 1) -> Any:
    return jax.device_put(
        factor * np.arange(8, dtype=np.float32).reshape(2, 4),
        jax.NamedSharding(mesh(2), jax.P("x")),
    )


CASES = {
    # what: the program, of one or two operands; of each leaf, whether it is summed in place; what
    # the program multiplies the operands' sums with
    "an argument": (over(total), [False], 1),
    "an argument, reshaped": (over(lambda x: total(x[0])[None]), [False], 1),
    "an argument of a function": (over(jax.checkpoint(total)), [False], 1),
    "what was computed": (over(lambda x: total(2 * x)), [True], 2),
    "what was computed outside": (lambda x: over(total)(2 * x), [True], 2),
    "a result": (over(lambda x: total(total(x))), [False, True], 2),
    "of a tree": (over(lambda x, y: sum(total((x, 2 * y)))), [False, True], None),
    "in a loop": (
        over(lambda x: jax.lax.fori_loop(0, 1, lambda _, y: total(y), x)), [True], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_what_is_summed_in_place(what: str):
    program, expected, factor = CASES[what]
    operands = [operand(), operand(3)][: 2 if factor is None else 1]
    f = jax.jit(program)
    assert in_place(f, operands) == expected
    both = np.asarray(operand()).sum(axis=0)
    found = np.asarray(f(*operands))
    np.testing.assert_array_equal(found, np.stack([both * (factor or 7)] * 2))


def test_what_is_donated():
    """As it is it is summed in place: nothing is copied. Reshaped, XLA would copy it."""
    x = operand()
    both = np.asarray(x).sum(axis=0)
    f = jax.jit(over(total), donate_argnums=0)
    assert in_place(f, [x]) == [True]
    reshaped = jax.jit(over(lambda x: total(x[0])[None]), donate_argnums=0)
    assert in_place(reshaped, [x]) == [False]
    np.testing.assert_array_equal(np.asarray(f(x)), np.stack([both, both]))
    assert x.is_deleted()


def in_place(f: Any, operands: list[Any]) -> list[bool]:
    """Returns of each leaf of each call, in the program's order, whether its result is in place."""
    found = []
    for line in f.lower(*operands).as_text().splitlines():
        if "@jaxcoll_all_reduce" in line:
            count = line.rsplit("->", 1)[1].count("tensor<")
            taken = [f"output_tuple_indices = [{i + 1}]" in line for i in range(count)]
            found += taken
    return found

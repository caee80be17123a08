"""Every op inside JAX's transformations and control flow, against its twin."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checks import assert_conforms, mesh
from helpers import OPS, Op
from jax import lax

Function = Callable[[Any], Any]


def twice_by_one_jit(f: Function, x: Any) -> Any:
    inner = jax.jit(f)  # XLA clones its body: two native calls with one call site
    return inner(x), inner(x + 1)


def scan(f: Function, x: Any) -> Any:
    def step(total: Any, x: Any) -> Any:
        y = f(x)
        return total + y, y

    return lax.scan(step, f(x), jnp.stack([x, x + 1, x + 2]))


def while_loop(f: Function, x: Any) -> Any:
    def step(state: Any) -> Any:
        i, total = state
        return i + 1, total + f(x + i.astype(x.dtype))

    return lax.while_loop(lambda state: state[0] < 3, step, (jnp.int32(0), f(x)))


def cond(f: Function, x: Any) -> Any:
    total = lax.pmax(x.sum(), "x")  # known at run time only, the same on every rank
    return (
        lax.cond(total < 1000, f, lambda x: f(x + 1), x),
        lax.cond(total > 1000, f, lambda x: f(x + 1), x),
    )


def custom_vjp(f: Function, x: Any) -> Any:
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda x: (f(x), None), lambda _, y: (y,))
    return wrapped(x)


def wrapped(f: Function, x: Any) -> Any:
    return jax.jit(f)(x), jax.checkpoint(f)(x + 1), custom_vjp(f, x + 2)


TRANSFORMATIONS = {f.__name__: f for f in (wrapped, twice_by_one_jit, scan, while_loop, cond)}


@pytest.mark.product(
    op=OPS, transformation=list(TRANSFORMATIONS), check_vma=(True, False), size=(1, 2, 3, 4)
)
def test_values_and_types_are_those_of_lax(op: Op, transformation: str, check_vma: bool, size: int):
    assert_conforms(op, TRANSFORMATIONS[transformation], mesh(size), check_vma=check_vma)

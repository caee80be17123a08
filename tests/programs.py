"""What JAX can do to a collective: every entry of the tables is a function of (f, x).

`f` is a collective as a function of its operand, `x` a rank's operand, inside a map over "x".
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Function = Callable[[Any], Any]

# ---- Transformations and control flow ------------------------------------------------------------


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


# ---- Derivatives ---------------------------------------------------------------------------------


def weights(y: Any, rank: Any = 0) -> Any:
    """Returns another small number for every element of a result, and for every rank."""
    small = jnp.arange(y.size).reshape(y.shape) % 7 + 1
    return small.astype(y.dtype) + jnp.asarray(rank, y.dtype)


def loss(f: Function) -> Function:
    """Returns a scalar of each rank that is quadratic in `f`."""

    def compute(x: Any) -> Any:
        y = f(x)
        return (y * y * weights(y, lax.axis_index("x"))).sum()

    return compute


def grad(f: Function, x: Any) -> Any:
    return jax.value_and_grad(loss(f))(x)


def vjp(f: Function, x: Any) -> Any:
    y, pull = jax.vjp(f, x)
    return y, pull(y)


def jvp(f: Function, x: Any) -> Any:
    return jax.jvp(f, (x,), (x + 1,))


def grad_of_grad(f: Function, x: Any) -> Any:
    def slope(x: Any) -> Any:
        return (jax.grad(loss(f))(x) * weights(x)).sum()

    return jax.grad(slope)(x)


def jvp_of_grad(f: Function, x: Any) -> Any:
    return jax.jvp(jax.grad(loss(f)), (x,), (x + 1,))


def grad_of_checkpoint(f: Function, x: Any) -> Any:
    return jax.grad(loss(jax.checkpoint(f)))(x)


def grad_of_jit(f: Function, x: Any) -> Any:
    return jax.grad(loss(jax.jit(f)))(x)


def grad_of_scan(f: Function, x: Any) -> Any:
    def total(x: Any) -> Any:
        def step(total: Any, scale: Any) -> Any:
            return total + loss(f)(x * scale), None

        return lax.scan(step, 0 * x.sum(), jnp.arange(1, 4).astype(x.dtype))[0]

    return jax.grad(total)(x)


def grad_of_cond(f: Function, x: Any) -> Any:
    taken = lax.pmax(lax.stop_gradient(x).sum(), "x") < 1000
    return jax.grad(lambda x: lax.cond(taken, loss(f), lambda x: 2 * loss(f)(x), x))(x)


def grad_inside_custom_vjp(f: Function, x: Any) -> Any:
    wrapped = jax.custom_vjp(f)
    wrapped.defvjp(lambda x: jax.vjp(f, x), lambda pull, y: pull(2 * y))
    return jax.grad(loss(wrapped))(x)


def vmap_of_grad(f: Function, x: Any) -> Any:
    return jax.vmap(jax.grad(loss(f)))(jnp.stack([x, x + 1]))


def grad_of_vmap(f: Function, x: Any) -> Any:
    return jax.grad(loss(jax.vmap(f)))(jnp.stack([x, x + 1]))


DERIVATIVES = {
    "first_order": (grad, vjp, jvp),
    "second_order": (grad_of_grad, jvp_of_grad),
    "control_flow": (
        grad_of_jit,
        grad_of_checkpoint,
        grad_of_scan,
        grad_of_cond,
        grad_inside_custom_vjp,
    ),
    "batched": (vmap_of_grad, grad_of_vmap),
}

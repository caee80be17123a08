"""What is computed only where a predicate holds, if no rank has to wait for another there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxcoll import _compat, _predicates


def gated(
    is_on: jax.Array,
    compute: Callable[..., Any],
    otherwise: Any,
    operands: tuple[Any, ...] = (),
    spare: tuple[Any, ...] = (),
) -> Any:
    """Returns what is computed where the predicate holds, and else what is given.

    Where the computation communicates, all ranks do it, and those where it does not hold throw its
    results away: a collective may not stand in a branch that some ranks do not take. So it is where
    it reads a value from outside that these ranks share, whose gradient they sum on the way back.

    Args:
        is_on: a boolean scalar.
        compute: `(*operands) -> results`.
        otherwise: arrays like its results.
        operands: trees of arrays.
        spare: the like, with which it computes what is thrown away; the operands without.

    Differentiable: yes; where results are thrown away, a derivative with respect to a value from
        outside that is infinite at `spare` makes its gradient NaN. That of an operand does not.
    """
    closed, shapes = jax.make_jaxpr(compute, return_shape=True)(*operands)
    others = map(typed_like, jax.tree.leaves(otherwise), jax.tree.leaves(shapes))
    others = [typed_like(leaf, is_on) for leaf in others]

    def run(operands: Any) -> list[jax.Array]:
        results = core.jaxpr_as_fun(closed)(*jax.tree.leaves(operands))
        return list(map(typed_like, results, others))

    def chosen(one: jax.Array, other: jax.Array) -> jax.Array:
        return lax.select(is_on, typed_like(one, is_on), typed_like(other, is_on))

    shared = any(_is_shared(value, is_on) for value in closed.consts)
    if shared or any(_predicates.collectives(closed.jaxpr)):
        unmoved = jax.tree.map(lax.stop_gradient, spare or operands)
        found = list(map(chosen, run(jax.tree.map(chosen, operands, unmoved)), others))
    else:
        found = lax.cond(is_on, lambda: run(operands), lambda: others)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _is_shared(value: Any, is_on: jax.Array) -> bool:
    """Tells whether ranks of which the predicate holds on some alone sum a value's gradient."""
    if not isinstance(value, jax.core.Tracer) or not jnp.issubdtype(value.dtype, jnp.inexact):
        return False
    varies = _compat.varying_axes(jax.typeof(value))
    return any(axis not in varies for axis in _compat.varying_axes(jax.typeof(is_on)))


def typed_like(x: jax.Array, other: Any) -> jax.Array:
    """Returns x, typed as varying over the axes over which another, or a shape, varies."""
    if not _compat.tracks_varying_axes():
        return x
    known = _compat.varying_axes(jax.typeof(x))
    is_typed = isinstance(other, jax.ShapeDtypeStruct)
    wanted = _compat.varying_axes(other if is_typed else jax.typeof(other))
    missing = tuple(axis for axis in wanted if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x

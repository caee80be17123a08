"""What traced programs hold: their equations, and which of them another one needs."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jaxcoll import _compat

SUMS = ("all_reduce", "psum", "psum_invariant")
GATHERS = ("all_gather", "all_gather_invariant")


def equations(jaxpr: Any, *names: str) -> list[Any]:
    """Returns a program's equations, of some primitives or all, also of programs in it."""
    found = [each for each in jaxpr.eqns if not names or each.primitive.name in names]
    for inner in _inner(jaxpr):
        found += equations(inner, *names)
    return found


def _inner(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: _compat.open_jaxpr(v) is not None
        ):
            inner = _compat.open_jaxpr(value)
            if inner is not None:
                yield inner


def on_a_rank(step: Any, *arguments: Any) -> Any:
    """Returns the one program that a function maps over a mesh, whose shapes are a rank's.

    Without equations whose results nothing needs: the compiler drops them.
    """
    (mapped,) = equations(jax.make_jaxpr(step)(*arguments).jaxpr, "shard_map")
    program = _compat.open_jaxpr(mapped.params["jaxpr"])
    return program.replace(eqns=needed_for(program, program.outvars))


def needed_for(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the program's own equations whose results go into some values, directly or not."""
    makers = {v: each for each in jaxpr.eqns for v in each.outvars}
    found, waiting = set(), list(values)
    while waiting:
        v = waiting.pop()
        maker = None if isinstance(v, Literal) else makers.get(v)
        if maker is not None and id(maker) not in found:
            found.add(id(maker))
            waiting += maker.invars
    return [each for each in jaxpr.eqns if id(each) in found]

"""Warnings about collectives that not every rank may reach.

A branch of `lax.cond` or `lax.switch`, or the body of a `lax.while_loop`, runs where a predicate
says so. If the predicate differs between the ranks of a collective inside, some of them wait for
others that never come. Types that track varying axes show where it may differ.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxcoll import _compat
from jaxcoll._decisions import warn
from jaxcoll._errors import listed


def _warn_about(ctx: Any, what: str, predicate: Any, bodies: Sequence[Any]) -> None:
    varying = _compat.varying_axes(predicate)
    if not varying:
        return
    for body in bodies:
        for equation, axes in collectives(_compat.open_jaxpr(body)):
            if shared := [axis for axis in axes if axis in varying]:
                warn(
                    f"{_compat.op_name(equation)} over {listed(axes)}, called at "
                    f"{_compat.equation_line(equation)}, stands under the predicate of the {what} "
                    f"at {_compat.source_line(ctx)}, which varies over {listed(shared)}: ranks "
                    "that take another way never come, and the others wait. Make the predicate "
                    f'the same on all ranks, for instance with jax.lax.pmax(p, "{shared[0]}"), or '
                    "move the collective out."
                )


def collectives(jaxpr: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yields all equations that communicate, those of inner programs too, with their axes."""
    for equation in jaxpr.eqns:
        if _compat.communicates(equation):
            yield equation, _compat.equation_axes(equation)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if (inner := _compat.open_jaxpr(inner)) is not None:
                    yield from collectives(inner)


def _watch(primitive: Primitive, rule: Any) -> None:
    lax_rule = _compat.lax_rule(primitive, None)

    def watching(ctx: Any, *operands: Any, **params: Any) -> Any:
        rule(ctx, params)
        return lax_rule(ctx, *operands, **params)

    # Where JAX lowers equal equations once, it forgets their lines.
    mlir.register_lowering(primitive, watching, cacheable=False)


def _cond(ctx: Any, params: dict[str, Any]) -> None:
    branches = params["branches"]
    name = "lax.cond" if len(branches) == 2 else "lax.switch"
    _warn_about(ctx, name, ctx.avals_in[0], branches)


def _while(ctx: Any, params: dict[str, Any]) -> None:
    condition = params["cond_jaxpr"]
    predicate = condition.out_avals[0]
    _warn_about(ctx, "lax.while_loop", predicate, (condition, params["body_jaxpr"]))


if _compat.problem() is None:
    _cond_p, _while_p = _compat.branching_primitives()
    _watch(_cond_p, _cond)
    _watch(_while_p, _while)

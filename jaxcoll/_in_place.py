"""Which operands a call that works in place would have to be copied for.

XLA copies an argument of a program before a call whose result takes its memory, unless the argument
is donated as it is. A call that reads it and writes elsewhere moves a third less.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir

from jaxcoll import _compat

# How main's arguments say that they are donated.
_DONATED = ("tf.aliasing_output", "jax.buffer_donor")


def kept(ctx: Any, operands: Sequence[ir.Value]) -> list[bool]:
    """Returns of each operand whether XLA would copy it before a call that works in place.

    It would copy arguments of a `shard_map`, also reshaped ones, where the program has computed
    nothing before: then they are the program's own. Where JAX lowers a function once for several
    places, as the body of a `scan`, they may be others; then a call moves a third more than needed.
    All else may be a value that nobody needs any more.
    """
    arguments = [_argument(operand) for operand in operands]
    if not any(arguments) or not _compat.has_computed_nothing(ctx):
        return [False] * len(operands)
    # Of a reshaped argument XLA makes a copy, donated or not.
    is_donating = any(name in of for of in _compat.arguments_of_main(ctx) for name in _DONATED)
    return [
        argument is not None and (argument != operand or not is_donating)
        for argument, operand in zip(arguments, operands, strict=True)
    ]


def _argument(operand: ir.Value) -> ir.Value | None:
    """Returns the argument of a `shard_map` that an operand is, but for its shape; or None."""
    while not isinstance(operand.owner, ir.Block):
        if operand.owner.name != "stablehlo.reshape":  # which moves nothing
            return None
        operand = operand.owner.operands[0]
    return operand if operand.owner.owner.name == "sdy.manual_computation" else None

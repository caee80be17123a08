"""Which operands a call that works in place would have to be copied for.

XLA copies an argument of a program before a call whose result takes its memory, unless the argument
is donated as it is. A call that reads it and writes elsewhere moves a third less.
"""

from typing import Any

from jax.extend.mlir import ir

from jaxcoll import _compat

# How main's arguments say that they are donated.
_DONATED = ("tf.aliasing_output", "jax.buffer_donor")


def is_kept(ctx: Any, operand: ir.Value) -> bool:
    """Tells whether XLA would copy an operand, for sure, before a call that works in place.

    That is so of an argument of a `shard_map`, also reshaped, where the program has computed
    nothing before that: then it is one of the program's. All else may be a value that nobody needs
    any more.
    """
    argument = _unreshaped(operand)
    holder = argument.owner
    if not isinstance(holder, ir.Block) or holder.owner.name != "sdy.manual_computation":
        return False
    main = _compat.main_function(ctx)
    if main is None or len(main.regions[0].blocks[0].operations):
        return False
    # Of a reshaped argument XLA makes a copy, donated or not.
    return argument != operand or not _has_donated_arguments(main)


def _unreshaped(operand: ir.Value) -> ir.Value:
    while not isinstance(operand.owner, ir.Block) and operand.owner.name == "stablehlo.reshape":
        operand = operand.owner.operands[0]
    return operand


def _has_donated_arguments(main: Any) -> bool:
    if "arg_attrs" not in main.attributes:
        return False
    return any(name in of for of in main.attributes["arg_attrs"] for name in _DONATED)

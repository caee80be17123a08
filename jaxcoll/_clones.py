"""One place in the program for each native call, in jobs of several processes.

Between processes a call is identified by its place and by how often that was reached. JAX lowers a
function under `jax.jit` or `jax.checkpoint` once, however often it is called, and XLA makes copies
of it, which it may run in any order: so there, a function that holds native calls is lowered anew
each time.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxcoll import _compat


def _lower_each_time(primitive: Primitive) -> None:
    lax_rule = _compat.lax_rule(primitive, None)

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        calls = _compat.module_memory(ctx).get("calls", 0)
        functions = _compat.remembered_functions(ctx)
        known = set(functions)
        results = lax_rule(ctx, *operands, **params)
        if _compat.module_memory(ctx).get("calls", 0) > calls and jax.process_count() > 1:
            for key in set(functions) - known:
                del functions[key]
        return results

    mlir.register_lowering(primitive, rule, cacheable=False)


if _compat.problem() is None:
    for _primitive in _compat.repeating_primitives():
        _lower_each_time(_primitive)

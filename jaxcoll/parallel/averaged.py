"""Which gradients an optimizer averages by `synchronize`, and what it does with them before."""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.extend.core.primitives import jit_p

from jaxcoll import _compat
from jaxcoll._sharding import leaf_name
from jaxcoll.parallel.optimizer_state import updated
from jaxcoll.parallel.synchronize import jaxcoll_average, without_synchronization

# Linear in all operands: of means they give the mean of what they give on each rank.
_LINEAR = (
    *("add", "add_any", "sub", "neg", "convert_element_type", "reduce_precision", "copy", "real"),
    *("imag", "reshape", "broadcast_in_dim", "squeeze", "transpose", "concatenate", "slice"),
    *("split", "pad", "rev", "reduce_sum"),
)

_Leaves = frozenset[int]  # the numbers of gradients


def averaged_leaves(
    call: str, optimizer: optax.GradientTransformation, params: Any, opt_state: Any
) -> list[bool]:
    """Tells of each parameter whether the optimizer averages its gradient itself.

    Args:
        call: the public function's name, for texts.
        optimizer: with a `synchronize`, not under `MultiSteps`.
        params: or their shapes and dtypes.
        opt_state: likewise.

    Raises:
        ValueError: before, it does with such a gradient what is wrong on each rank's own, such as a
            norm, or keeps it.
    """

    def update(grads: Any, state: Any, params: Any) -> Any:
        return updated(call, optimizer, grads, state, params)

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)

    with without_synchronization():
        closed = jax.make_jaxpr(update)(shapes(params), shapes(opt_state), shapes(params))
    jaxpr = _compat.open_jaxpr(closed)
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    first = [frozenset({i} if i < len(names) else ()) for i in range(len(jaxpr.invars))]
    flow = _Flow()
    kept = frozenset().union(*flow.through(jaxpr, first)[len(names) :])
    for i in sorted(flow.averaged):
        if i in flow.read or i in kept:
            equation = flow.read.get(i)
            does = (
                f"{equation.primitive.name} in {_compat.equation_line(equation)} reads"
                if equation
                else "the state keeps"
            )
            raise ValueError(
                f"{call}: optimizer: optax.synchronize averages the gradient of params{names[i]}, "
                f"but before that {does} each rank's own, which differ. Put it first: "
                "optax.chain(jaxcoll.optax.synchronize(...), ...)."
            )
    return [i in flow.averaged for i in range(len(names))]


class _Flow:
    """Where gradients of each rank's own go in an update.

    Attributes:
        averaged: those that `synchronize` gets.
        read: those that something else than a linear function reads, with the first such equation.
    """

    def __init__(self) -> None:
        self.averaged: set[int] = set()
        self.read: dict[int, Any] = {}

    def through(self, jaxpr: Any, inputs: Sequence[_Leaves]) -> list[_Leaves]:
        """Returns of which gradients each result is made, given that of each input."""
        made_of = dict(zip(jaxpr.invars, inputs, strict=True))

        def of(atom: Any) -> _Leaves:
            return frozenset() if hasattr(atom, "val") else made_of.get(atom, frozenset())

        for equation in jaxpr.eqns:
            reads = [of(atom) for atom in equation.invars]
            every = frozenset().union(*reads)
            results = [every] * len(equation.outvars)
            if equation.params.get("name") == jaxcoll_average.__name__:
                self.averaged |= every
                results = [frozenset()] * len(equation.outvars)
            elif equation.primitive is jit_p:
                results = self.through(_compat.open_jaxpr(equation.params["jaxpr"]), reads)
            elif not _is_linear(equation.primitive.name, reads):
                self.read = {**dict.fromkeys(every, equation), **self.read}
            made_of.update(zip(equation.outvars, results, strict=True))
        return [of(atom) for atom in jaxpr.outvars]


def _is_linear(name: str, reads: Sequence[_Leaves]) -> bool:
    """Tells whether a primitive is linear in the operands that are made of gradients."""
    if name == "mul":
        return not all(reads)
    if name == "div":
        return not reads[1]
    if name == "select_n":
        return not reads[0]
    return name in _LINEAR or not any(reads)

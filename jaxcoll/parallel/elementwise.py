"""Which optimizers may update parts of parameters: those that work element by element."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core.primitives import jit_p

from jaxcoll import _compat
from jaxcoll._sharding import leaf_name
from jaxcoll.parallel.clipping import jaxcoll_whole_norm
from jaxcoll.parallel.optimizer_state import updated
from jaxcoll.parallel.synchronize import without_synchronization

# Primitives that bring values of several places of an array together, or depend on its shape.
_MIXING = (
    *("reduce", "dot_general", "conv_general", "cum", "arg", "sort", "top_k", "fft", "random"),
    *("cholesky", "qr", "svd", "eig", "lu", "triangular_solve", "householder_product", "schur"),
    *("slice", "dynamic_slice", "gather", "scatter", "concatenate", "rev", "threefry", "rng"),
)


def check_elementwise(
    call: str, optimizer: optax.GradientTransformation, whole: Any, parts: Any, specs: Any
) -> None:
    """Raises ValueError where an optimizer's update of a value depends on others of its parameter.

    On a part of a parameter its norms, for one, would be those of the part: silently wrong.

    Args:
        call: the public function's name, for texts.
        optimizer: which.
        whole: shapes and dtypes of the parameters.
        parts: of what a rank holds of them.
        specs: how they are split.
    """
    split = _first_split(whole, parts, specs)
    steps, constants = _steps(call, optimizer, whole)
    for equation, touches in steps:
        name = equation.primitive.name
        makes = name.startswith(("random", "threefry", "rng"))
        if (touches or makes) and name.startswith(_MIXING) and name != "reduce_precision":
            raise ValueError(_refusal(call, f"{name} in {_compat.equation_line(equation)}", split))
    by_shape = "what it does with a parameter depends on its shape, and"
    try:
        of_parts, constants_of_parts = _steps(call, optimizer, parts)
    except (TypeError, ValueError) as error:
        raise ValueError(_refusal(call, by_shape, split)) from error
    if [_signature(e) for e, _ in steps] != [_signature(e) for e, _ in of_parts]:
        raise ValueError(_refusal(call, by_shape, split))
    for (equation, _), (of_part, _) in zip(steps, of_parts, strict=True):
        # In a schedule, or along a dimension that is not split, it counts as far on parts.
        if equation.primitive.name == "iota" and _count(equation) != _count(of_part):
            what = f"iota in {_compat.equation_line(equation)}, which counts positions,"
            raise ValueError(_refusal(call, what, split))
    for constant, of_part in zip(constants, constants_of_parts, strict=False):
        # NumPy's counts, or masks, which have one value for each position.
        if np.shape(constant) != np.shape(of_part) and np.unique(constant).size > 1:
            raise ValueError(_refusal(call, by_shape, split))


def _first_split(whole: Any, parts: Any, specs: Any) -> str:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(whole)
    each = zip(leaves, jax.tree.leaves(parts), treedef.flatten_up_to(specs), strict=True)
    return next(
        f"params{leaf_name(path)}, {leaf.dtype}{list(leaf.shape)}, of which {spec} leaves a rank "
        f"{list(part.shape)}"
        for (path, leaf), part, spec in each
        if part.shape != leaf.shape
    )


def _refusal(call: str, what: str, split: str) -> str:
    return (
        f"{call}: optimizer: its update is not element by element: {what} would be wrong on parts "
        f"of parameters, such as {split}. Use an optimizer that is, such as optax.adamw, with "
        "jaxcoll.clip_by_global_norm for optax.clip_by_global_norm, or parameters that are not "
        "split."
    )


def _steps(
    call: str, optimizer: optax.GradientTransformation, params: Any
) -> tuple[list[tuple[Any, bool]], list[Any]]:
    """Returns the equations of making the optimizer's state and of an update, and their constants.

    Each equation with whether it reads what comes from the values of a parameter, of its gradient
    or of an array of the state.
    """

    def update(grads: Any, state: Any, params: Any) -> Any:
        return updated(call, optimizer, grads, state, params)

    with without_synchronization():
        made = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
        of_update = jax.make_jaxpr(update)(params, made[1], params)
    both = (made[0], of_update)
    steps = [
        step
        for closed in both
        for step in _equations(
            _compat.open_jaxpr(closed), [bool(aval.shape) for aval in closed.in_avals]
        )
    ]
    return steps, [constant for closed in both for constant in closed.consts]


def _signature(equation: Any) -> tuple[Any, ...]:
    """Returns what must be the same for a parameter and for a part of it."""
    values = [str(v.val) for v in equation.invars if hasattr(v, "val") and not jnp.ndim(v.val)]
    return equation.primitive.name, *values


def _count(iota: Any) -> int:
    return iota.params["shape"][iota.params["dimension"]]


def _equations(jaxpr: Any, of_values: Sequence[bool]) -> Iterator[tuple[Any, bool]]:
    """Goes through the equations of a jaxpr; `of_values` says it of its operands."""
    known = {v for v, flag in zip(jaxpr.invars, of_values, strict=True) if flag}
    for equation in jaxpr.eqns:
        if equation.params.get("name") == jaxcoll_whole_norm.__name__:
            continue  # right on parts
        reads = [not hasattr(v, "val") and v in known for v in equation.invars]
        yield equation, any(reads)
        if any(reads):
            known.update(equation.outvars)
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: _compat.open_jaxpr(v) is not None
        ):
            inner = _compat.open_jaxpr(value)
            if inner is None:
                continue
            # Of loops and branches every array may be one, sooner or later.
            is_call = equation.primitive is jit_p
            arrays = [any(reads) and bool(v.aval.shape) for v in inner.invars]
            yield from _equations(inner, reads if is_call else arrays)

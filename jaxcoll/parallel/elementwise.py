"""Which optimizers may update parts of parameters: those that work element by element."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcoll import _compat
from jaxcoll.parallel.clipping import jaxcoll_whole_norm
from jaxcoll.parallel.synchronize import without_synchronization

# Primitives that bring values of several places of an array together, or depend on its shape.
_MIXING = (
    *("reduce", "dot_general", "conv_general", "cum", "arg", "sort", "top_k", "fft", "random"),
    *("cholesky", "qr", "svd", "eig", "lu", "triangular_solve", "householder_product", "schur"),
    *("slice", "dynamic_slice", "gather", "scatter", "concatenate", "rev", "threefry", "rng"),
)


def check_elementwise(
    call: str, optimizer: optax.GradientTransformation, whole: Any, parts: Any
) -> None:
    """Raises ValueError where an optimizer's update of a value depends on others of its parameter.

    On a part of a parameter its norms, for one, would be those of the part: silently wrong.

    Args:
        call: the public function's name, for texts.
        optimizer: which.
        whole: shapes and dtypes of the parameters.
        parts: of what a rank holds of them.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(whole) if leaf.shape}
    steps = _steps(optimizer, whole)
    for equation in steps:
        name = equation.primitive.name
        touches = any(getattr(v.aval, "shape", ()) in shapes for v in equation.invars)
        makes = name.startswith(("random", "threefry", "rng"))
        if (touches or makes) and name.startswith(_MIXING) and name != "reduce_precision":
            raise ValueError(_refusal(call, f"{name} in {_compat.equation_line(equation)}"))
    if [_signature(e) for e in steps] != [_signature(e) for e in _steps(optimizer, parts)]:
        raise ValueError(_refusal(call, "what it does with a parameter depends on its shape, and"))


def _refusal(call: str, what: str) -> str:
    return (
        f"{call}: optimizer: its update is not element by element: {what} would be wrong on parts "
        "of parameters. Use an optimizer that is, such as optax.adamw, or parameters that are not "
        "split."
    )


def _steps(optimizer: optax.GradientTransformation, params: Any) -> list[Any]:
    """Returns the equations of making the optimizer's state and of an update."""

    def update(params: Any) -> Any:
        return optimizer.update(params, optimizer.init(params), params)

    with without_synchronization():
        return list(_equations(_compat.open_jaxpr(jax.make_jaxpr(update)(params))))


def _signature(equation: Any) -> tuple[Any, ...]:
    """Returns what must be the same for a parameter and for a part of it."""
    values = [str(v.val) for v in equation.invars if hasattr(v, "val") and not jnp.ndim(v.val)]
    return equation.primitive.name, *values


def _equations(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        if equation.params.get("name") == jaxcoll_whole_norm.__name__:
            continue  # right on parts
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: _compat.open_jaxpr(v) is not None
        ):
            inner = _compat.open_jaxpr(value)
            if inner is not None:
                yield from _equations(inner)

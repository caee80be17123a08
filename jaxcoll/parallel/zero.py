"""Where a training state is split over the data-parallel ranks, and the communication that needs.

Source: the stages of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (2020).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat
from jaxcoll._sharding import divisible_dimension
from jaxcoll.collectives.all_gather import all_gather, all_gather_invariant
from jaxcoll.collectives.reduce_scatter import reduce_scatter
from jaxcoll.parallel.clipping import jaxcoll_whole_norm

Stage = Literal[1, 2, 3]
# For each parameter, in the order of its tree, the dimension that is split, or None.
Split = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Zero:
    """What of a training state each rank of an axis keeps only a part of.

    Attributes:
        axis_name: the axis.
        stage: 1 the optimizer's state, 2 the gradients too, 3 the parameters too.
        min_weight_size: values from which on a parameter is split.
    """

    axis_name: str
    stage: Stage
    min_weight_size: int

    def split(self, shapes: Sequence[Any], specs: Sequence[P], size: int) -> Split:
        """Returns how parameters of global shapes are split beside what their specs say."""
        return tuple(map(lambda leaf, spec: self._dimension(leaf, spec, size), shapes, specs))

    def _dimension(self, leaf: Any, spec: P, size: int) -> int | None:
        if leaf.size < self.min_weight_size:
            return None
        taken = [i for i, axis in enumerate(spec) if axis is not None]
        return divisible_dimension(leaf.shape, size, taken=taken)

    def spec(self, spec: P, ndim: int, dimension: int | None) -> P:
        """Returns a spec with the dimension split over the axis."""
        if dimension is None:
            return spec
        entries = [*spec, *[None] * (ndim - len(spec))]
        entries[dimension] = self.axis_name
        return P(*entries)

    # ---- On a rank, inside a map over the axis ---------------------------------------------------

    def whole(self, params: Any, split: Split) -> Any:
        """Returns the parameters to compute with; their gradients come back summed, in parts."""
        if self.stage < 3:
            return params
        return _each(
            lambda leaf, dim: all_gather(leaf, self.axis_name, axis=dim, tiled=True), params, split
        )

    def summed(self, grads: Any, split: Split) -> Any:
        """Returns this rank's part of the sum over the axis, of gradients that are split."""
        if self.stage == 3:
            return grads
        return _each(
            lambda leaf, dim: reduce_scatter(
                leaf, self.axis_name, scatter_dimension=dim, tiled=True
            ),
            grads,
            split,
        )

    def part(self, tree: Any, split: Split) -> Any:
        """Returns this rank's part of whole parameters, or of gradients that are sums already."""

        def slice_of(leaf: jax.Array, dim: int) -> jax.Array:
            count = leaf.shape[dim] // lax.axis_size(self.axis_name)
            start = lax.axis_index(self.axis_name) * count
            return lax.dynamic_slice_in_dim(leaf, start, count, dim)

        return _each(slice_of, tree, split)

    def rejoined(self, parts: Any, split: Split) -> Any:
        """Returns whole parameters, typed as the same on all ranks."""
        return _each(
            lambda leaf, dim: all_gather_invariant(leaf, self.axis_name, axis=dim), parts, split
        )


def _each(f: Callable[[jax.Array, int], jax.Array], tree: Any, split: Split) -> Any:
    """Applies `f` to the leaves that are split, with their dimension."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, split, strict=True)
    return treedef.unflatten(leaf if dim is None else f(leaf, dim) for leaf, dim in pairs)


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

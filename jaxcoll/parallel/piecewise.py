"""Gradients of a function whose large parameters are whole only where it computes with them.

The function is cut into pieces (`pieces.py`). Each piece's parameters are gathered before it runs,
and dropped after; going back they are gathered again, and their gradients scattered at once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxcoll.parallel.after import after
from jaxcoll.parallel.gathered_scan import Stacked, as_part, gathered_scan
from jaxcoll.parallel.pieces import Piece, Program, cut
from jaxcoll.parallel.splits import Split, SplitDim


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a rank holds of parameters, and how the whole is had.

    Attributes:
        split: for each parameter the dimension of which ranks hold parts, or None.
        gather: `(part, dimension) -> whole`.
        scatter: `(gradient, dimension) -> part` of the sum of all ranks' gradients.
    """

    split: Split
    gather: Callable[[jax.Array, SplitDim], jax.Array]
    scatter: Callable[[jax.Array, SplitDim], jax.Array]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When parameters are gathered, and for how long they stay.

    Attributes:
        bucket_bytes: of parameters that are gathered, and dropped, together.
        prefetch: how many pieces ahead they may be gathered, and whether in scans a layer is; None:
            one piece, and not in scans.
        reshard_after_forward: they are dropped after the forward pass, and gathered again.
    """

    bucket_bytes: int
    prefetch: int | None
    reshard_after_forward: bool


def value_and_grad(
    function: Callable[[Any], tuple[jax.Array, Any]], params: Any, parts: Parts, schedule: Schedule
) -> tuple[tuple[jax.Array, Any], Any]:
    """Returns a function's value and gradients, as `jax.value_and_grad(has_aux=True)`.

    Args:
        function: `(whole parameters) -> (loss, others)`.
        params: this rank's, a tree.
        parts: what they are parts of.
        schedule: when they are whole.

    Returns:
        The value, and for each parameter its gradient: of a part as `parts.scatter` gives it, of
        others this rank's own.
    """
    leaves, treedef = jax.tree.flatten(params)
    whole = [
        leaf if dim is None else jax.eval_shape(lambda part, dim=dim: parts.gather(part, dim), leaf)
        for leaf, dim in zip(leaves, parts.split, strict=True)
    ]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(treedef.unflatten(whole))

    def scan(equation: Any, stacked: dict[int, int]) -> Any:
        layers = {i: _layer(parts, number) for i, number in stacked.items()}
        keeps, prefetches = not schedule.reshard_after_forward, bool(schedule.prefetch)
        return gathered_scan(equation, layers, keeps, prefetches)

    split = [dim and dim.index for dim in parts.split]
    program = cut(closed, split, schedule.bucket_bytes, scan)
    run = _Run(program, leaves, parts, schedule)
    loss, *others = run.forward()
    others = jax.tree.unflatten(jax.tree.structure(shapes[1]), others)
    return (loss, others), treedef.unflatten(run.backward(loss))


def _layer(parts: Parts, number: int) -> Stacked:
    dimension = parts.split[number]
    assert dimension is not None
    dimension = dataclasses.replace(dimension, index=dimension.index - 1)
    return Stacked(
        gather=lambda part: parts.gather(part, dimension),
        scatter=lambda gradient: parts.scatter(gradient, dimension),
    )


class _Pullback:
    """The way back through a piece, which does not keep what it is given again."""

    def __init__(self, pullback: Any, prepared: Sequence[jax.Array]) -> None:
        numbers = {id(value): number for number, value in enumerate(prepared)}
        leaves, self._treedef = jax.tree.flatten(pullback)
        # For each leaf which of the prepared values it is, or None and the leaf itself.
        self._origins = [numbers.get(id(leaf)) for leaf in leaves]
        self._own = [x for x, i in zip(leaves, self._origins, strict=True) if i is None]

    def __call__(self, prepared: Sequence[jax.Array], cotangents: Any) -> Any:
        own = iter(self._own)
        leaves = (next(own) if i is None else prepared[i] for i in self._origins)
        return self._treedef.unflatten(leaves)(cotangents)


class _Run:
    def __init__(
        self, program: Program, params: Sequence[jax.Array], parts: Parts, schedule: Schedule
    ) -> None:
        self._program, self._params, self._parts = program, params, parts
        self._prefetch = 1 if schedule.prefetch is None else schedule.prefetch
        self._keeps = not schedule.reshard_after_forward
        self._values = {**program.constants, **dict(zip(program.operands, params, strict=True))}
        # Of each piece its way back and, where they stay, its parameters.
        self._ways_back: list[tuple[_Pullback, list[jax.Array] | None]] = []
        self._cotangents: dict[Any, jax.Array] = {}

    def _is_differentiable(self, v: Any) -> bool:
        return v in self._program.differentiable

    def _gathered(self, piece: Piece, markers: Sequence[Any]) -> list[jax.Array]:
        """Returns a piece's parameters, once the piece has begun that is `prefetch` ones away."""
        marker = markers[max(0, len(markers) - 1 - self._prefetch)]
        whole = []
        for i in piece.parameters:
            part = self._params[i] if marker is None else after(self._params[i], marker)
            whole.append(self._parts.gather(part, self._dim(i)))
        return whole

    def _dim(self, i: int) -> SplitDim:
        dim = self._parts.split[i]
        assert dim is not None
        return dim

    # ---- Forward ---------------------------------------------------------------------------------

    def forward(self) -> list[jax.Array]:
        markers: list[Any] = [None]  # the last value before each piece
        for piece in self._program.pieces:
            results = self._through(piece, self._gathered(piece, markers))
            self._values.update(results)
            markers.append(_last([markers[-1], *results.values()]))
        atoms = self._program.results
        return [a.val if isinstance(a, Literal) else self._values[a] for a in atoms]

    def _through(self, piece: Piece, whole: list[jax.Array]) -> dict[Any, jax.Array]:
        """Returns the piece's results by name, and keeps its way back."""
        moving = [v for v in piece.reads if self._is_differentiable(v)]

        def compute(prepared: Any, active: Any) -> tuple[list[Any], list[Any]]:
            values = {**self._values, **dict(zip(moving, active, strict=True))}
            results = piece.compute(*prepared, *(values[v] for v in piece.reads))
            named = list(zip(piece.makes, results, strict=True))
            return (
                [x for v, x in named if self._is_differentiable(v)],
                [x for v, x in named if not self._is_differentiable(v)],
            )

        prepared = piece.prepare(*whole)
        results, pullback, others = jax.vjp(
            compute, prepared, [self._values[v] for v in moving], has_aux=True
        )
        stays = self._keeps or piece is self._program.pieces[-1]
        self._ways_back.append((_Pullback(pullback, prepared), whole if stays else None))
        found, rest = iter(results), iter(others)
        return {v: next(found if self._is_differentiable(v) else rest) for v in piece.makes}

    # ---- Backward --------------------------------------------------------------------------------

    def backward(self, loss: jax.Array) -> list[jax.Array]:
        name, operands = self._program.results[0], self._program.operands
        if not isinstance(name, Literal):
            self._cotangents[name] = jnp.ones_like(loss)
        markers: list[Any] = [loss]
        for piece in reversed(self._program.pieces):
            pullback, whole = self._ways_back.pop()
            made = [v for v in piece.makes if self._is_differentiable(v)]
            if whole is None:
                whole = self._gathered(piece, markers)
            prepared, unprepare = jax.vjp(piece.prepare, *whole)
            of_prepared, of_moving = pullback(prepared, [self._cotangent(v) for v in made])
            grads = [
                as_part(self._parts.scatter(gradient, self._dim(i)), self._params[i])
                for i, gradient in zip(piece.parameters, unprepare(of_prepared), strict=True)
            ]
            for i, grad in zip(piece.parameters, grads, strict=True):
                self._add(operands[i], grad)
            moving = [v for v in piece.reads if self._is_differentiable(v)]
            for v, cotangent in zip(moving, of_moving, strict=True):
                self._add(v, cotangent)
            markers.append(_last([markers[-1], *grads, *of_moving]))
        return [self._cotangent(v) for v in operands]

    def _add(self, v: Any, cotangent: jax.Array) -> None:
        known = self._cotangents.get(v)
        self._cotangents[v] = cotangent if known is None else known + cotangent

    def _cotangent(self, v: Any) -> jax.Array:
        known = self._cotangents.get(v)
        return jnp.zeros_like(self._values[v]) if known is None else known


def _last(values: Sequence[Any]) -> Any:
    """Returns the last value that has bits to look at, or None."""
    usable = (
        value
        for value in reversed(values)
        if value is not None and value.size and jnp.issubdtype(value.dtype, jnp.inexact)
    )
    return next(usable, None)

"""`jax.lax.scan` over layers of which each rank keeps a part: one layer at a time is whole.

Differentiated as it stands, a scan would keep the whole of all layers for the way back.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxcoll import _compat


@dataclasses.dataclass(frozen=True)
class Stacked:
    """How slices of an operand that is stacked, and of which a rank holds a part, are made whole.

    Attributes:
        gather: `part -> whole`, of one slice.
        scatter: `gradient -> part`, of one slice.
    """

    gather: Callable[[jax.Array], jax.Array]
    scatter: Callable[[jax.Array], jax.Array]


def gathered_scan(
    equation: Any, stacked: Mapping[int, Stacked], keeps: bool, prefetches: bool
) -> Callable[..., list[jax.Array]]:
    """Returns a scan as a function of its operands, some of which are parts.

    Args:
        equation: the scan, of whole operands.
        stacked: the numbers of those operands that are parts.
        keeps: the whole layers stay for the way back.
        prefetches: the next layer is gathered beside what a layer computes, forward and back; two
            are whole at a time.

    Differentiable: in reverse; the gradient of a part is a part of the sum of all ranks' gradients.
    """
    scan = _Scan(equation, stacked, keeps, prefetches)
    function = jax.custom_vjp(lambda *operands: scan.forward(operands)[0])
    function.defvjp(lambda *operands: scan.forward(operands), scan.backward)
    return function


class _Scan:
    def __init__(
        self, equation: Any, stacked: Mapping[int, Stacked], keeps: bool, prefetches: bool
    ) -> None:
        params = equation.params
        self._body = core.jaxpr_as_fun(params["jaxpr"])
        self._num_consts, self._num_carry = _compat.scan_counts(equation)
        self._reverse, self._unroll = params["reverse"], params["unroll"]
        self._length = params["length"]
        self._stacked, self._keeps, self._prefetches = stacked, keeps, prefetches
        # Of a step's operands: which have derivatives.
        self._moves = [_is_inexact(v.aval) for v in equation.invars]
        self._layout: Any = None  # of what a step keeps, known once it was traced

    def forward(self, operands: Sequence[jax.Array]) -> tuple[list[jax.Array], Any]:
        """Returns the results, and what the way back needs."""
        consts, first, xs = self._split(operands)

        def step(carry: Any, slices: Any, whole: dict[int, jax.Array]) -> Any:
            values = [*consts, *carry, *slices]
            for i, layer in whole.items():
                values[i] = layer
            outs, pullback = self._step(values)
            kept, self._layout = self._kept(pullback, values)
            return outs[: self._num_carry], (outs[self._num_carry :], kept)

        last, (ys, kept) = self._scan(step, first, xs, self._parts(xs), self._reverse)
        return [*last, *ys], (operands, kept)

    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the operands' cotangents; None of those that have none."""
        operands, kept = residuals
        consts, _, xs = self._split(operands)
        parts = {} if self._keeps else self._parts(xs)
        n = self._num_carry
        carry_moves = self._moves[self._num_consts :][:n]
        of_last, of_ys = cotangents[:n], cotangents[n:]
        of_last = [c for c, moves in zip(of_last, carry_moves, strict=True) if moves]
        of_ys = [y for y in of_ys if _is_inexact(y)]
        const_moves = self._moves[: self._num_consts]
        sums = [jnp.zeros_like(c) for c, moves in zip(consts, const_moves, strict=True) if moves]

        def step(carry: Any, slices: Any, whole: dict[int, jax.Array]) -> Any:
            of_carry, sums = carry
            kept, of_ys = slices
            pullback = self._restored(kept, whole, consts)
            of_values = iter(pullback([*of_carry, *of_ys]))
            of_operands: list[Any] = [next(of_values) if moves else None for moves in self._moves]
            for i in self._stacked:
                of_operands[i] = self._stacked[i].scatter(of_operands[i])
            of_consts, of_carry, of_xs = self._split(of_operands)
            found = [c for c in of_consts if c is not None]
            sums = [total + c for total, c in zip(sums, found, strict=True)]
            return ([c for c in of_carry if c is not None], sums), of_xs

        (of_first, sums), of_xs = self._scan(
            step, (of_last, sums), (kept, of_ys), parts, not self._reverse
        )
        of_xs = [g if g is None else as_part(g, x) for g, x in zip(of_xs, xs, strict=True)]
        rest = iter([*sums, *of_first])
        fixed = self._moves[: self._num_consts + n]
        return (*(next(rest) if moves else None for moves in fixed), *of_xs)

    # ---- One step --------------------------------------------------------------------------------

    def _step(self, values: list[jax.Array]) -> tuple[list[jax.Array], Any]:
        def compute(*moving: jax.Array) -> tuple[list[Any], list[Any]]:
            given = iter(moving)
            operands = [
                next(given) if moves else value
                for value, moves in zip(values, self._moves, strict=True)
            ]
            outs = self._body(*operands)
            return [y for y in outs if _is_inexact(y)], outs

        moving = [value for value, moves in zip(values, self._moves, strict=True) if moves]
        results, pullback, outs = jax.vjp(compute, *moving, has_aux=True)
        found = iter(results)
        return [next(found) if _is_inexact(y) else y for y in outs], pullback

    def _kept(self, pullback: Any, values: list[jax.Array]) -> tuple[list[jax.Array], Any]:
        """Returns what a step must keep of its way back, and how to put it together again."""
        again = [*range(self._num_consts), *([] if self._keeps else self._stacked)]
        known = {id(values[i]): i for i in again}
        leaves, treedef = jax.tree.flatten(pullback)
        origins = [known.get(id(leaf)) for leaf in leaves]
        return [x for x, i in zip(leaves, origins, strict=True) if i is None], (origins, treedef)

    def _restored(self, kept: list[Any], whole: dict[int, Any], consts: Sequence[Any]) -> Any:
        origins, treedef = self._layout
        known, own = {**dict(enumerate(consts)), **whole}, iter(kept)
        return treedef.unflatten(next(own) if i is None else known[i] for i in origins)

    # ---- Operands --------------------------------------------------------------------------------

    def _at_x(self, i: int) -> int:
        return self._num_consts + self._num_carry + i

    def _split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        first, xs = self._num_consts, self._num_consts + self._num_carry
        operands = list(operands)
        return operands[:first], operands[first:xs], operands[xs:]

    def _parts(self, xs: Sequence[jax.Array]) -> dict[int, jax.Array]:
        """Returns the operands that are parts, by number."""
        return {i: xs[i - self._at_x(0)] for i in self._stacked}

    def _gathered(self, parts: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """Returns one slice of each, whole."""
        return {i: self._stacked[i].gather(part) for i, part in parts.items()}

    def _scan(
        self, step: Any, carry: Any, xs: Any, parts: dict[int, jax.Array], reverse: bool
    ) -> Any:
        """Scans with `step(carry, slices, whole layers)`, whose parts are gathered as it goes."""
        if not (self._prefetches and parts and self._length > 1):

            def gathering(carry: Any, slices: Any) -> Any:
                slices, own = slices
                return step(carry, slices, self._gathered(own))

            return lax.scan(gathering, carry, (xs, parts), self._length, reverse, self._unroll)

        def layer(at: Any) -> dict[int, jax.Array]:
            own = {i: lax.dynamic_index_in_dim(x, at, keepdims=False) for i, x in parts.items()}
            return self._gathered(own)

        def ahead(carry: Any, slices: Any) -> Any:
            carry, whole = carry
            slices, at = slices
            following = at - 1 if reverse else at + 1
            # The same on all ranks.
            is_there = (following >= 0) & (following < self._length)
            next_whole = lax.cond(is_there, layer, lambda at: whole, following)
            carry, ys = step(carry, slices, whole)
            return (carry, next_whole), ys

        first = layer(self._length - 1 if reverse else 0)
        (carry, _), ys = lax.scan(
            ahead,
            (carry, first),
            (xs, jnp.arange(self._length)),
            self._length,
            reverse,
            self._unroll,
        )
        return carry, ys


def as_part(gradient: jax.Array, part: jax.Array) -> jax.Array:
    """Returns a gradient, which may have travelled in fewer bits, to be added to others."""
    return gradient.astype(jnp.promote_types(gradient.dtype, part.dtype))


def _is_inexact(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)

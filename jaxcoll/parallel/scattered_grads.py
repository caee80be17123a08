"""Gradients of whole parameters of which a rank keeps its part: summed where they are made.

Of layers in a `jax.lax.scan` one gradient is whole at a time. Differentiated as it stands, a scan
makes those of all layers, beside all that it kept for the way back.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxcoll import _compat
from jaxcoll.parallel.pieces import cut
from jaxcoll.parallel.piecewise import Parts

# `(whole, this rank's part) -> whole`, whose gradient is that of the part.
_Attach = Callable[[jax.Array, jax.Array], jax.Array]


def value_and_grad(
    function: Callable[[Any], tuple[jax.Array, Any]], params: Any, own: Any, parts: Parts
) -> tuple[tuple[jax.Array, Any], Any]:
    """Returns a function's value and gradients, as `jax.value_and_grad(has_aux=True)`.

    Args:
        function: `(whole parameters) -> (loss, others)`.
        params: whole, a tree.
        own: this rank's parts of them, and those that are not split; of dtypes to add gradients in.
        parts: what they are parts of.

    Returns:
        The value, and for each parameter its gradient, like `own`: of a part as `parts.scatter`
        gives it, of others this rank's own.
    """
    leaves = jax.tree.leaves(params)
    dtypes = [part.dtype for part in jax.tree.leaves(own)]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(params)

    def attach(number: int, is_layer: bool) -> _Attach:
        dim = parts.split[number]
        assert dim is not None
        dim, dtype = dataclasses.replace(dim, index=dim.index - is_layer), dtypes[number]
        # It may travel in another one.
        return _attach(lambda gradient: parts.scatter(gradient.astype(dtype), dim).astype(dtype))

    def scan(equation: Any, stacked: dict[int, int]) -> Any:
        return _attaching(equation, {i: attach(number, True) for i, number in stacked.items()})

    # Cut as finely as can be: the way back goes by the order in which parameters were attached.
    program = cut(closed, [dim and dim.index for dim in parts.split], 1, scan)

    def compute(own: Any) -> tuple[jax.Array, Any]:
        values, attached = dict(program.constants), {}
        pairs = list(zip(leaves, jax.tree.leaves(own), strict=True))
        for v, dim, (whole, part) in zip(program.operands, parts.split, pairs, strict=True):
            # Scans alone read such pairs.
            values[v] = part.astype(whole.dtype) if dim is None else (whole, part)
        for piece in program.pieces:
            for i in piece.parameters:
                if i not in attached:
                    attached[i] = attach(i, False)(*pairs[i])
            prepared = piece.prepare(*(attached[i] for i in piece.parameters))
            results = piece.compute(*prepared, *(values[v] for v in piece.reads))
            values.update(zip(piece.makes, results, strict=True))
        atoms = program.results
        loss, *others = (a.val if isinstance(a, core.Literal) else values[a] for a in atoms)
        return loss, jax.tree.unflatten(jax.tree.structure(shapes[1]), others)

    return jax.value_and_grad(compute, has_aux=True)(own)


def _attach(scatter: Callable[[jax.Array], jax.Array]) -> _Attach:
    attached = jax.custom_vjp(lambda whole, part: whole)
    attached.defvjp(
        lambda whole, part: (whole, None), lambda _, gradient: (None, scatter(gradient))
    )
    return attached


def _attaching(equation: Any, attach: Mapping[int, _Attach]) -> Callable[..., list[Any]]:
    """Returns a scan as a function of its operands, some of which are pairs."""
    body, params = core.jaxpr_as_fun(equation.params["jaxpr"]), equation.params
    num_consts, num_carry = _compat.scan_counts(equation)
    num_fixed = num_consts + num_carry

    def compute(*operands: Any) -> list[Any]:
        consts, first = operands[:num_consts], operands[num_consts:num_fixed]

        def step(carry: Any, slices: Any) -> tuple[list[Any], list[Any]]:
            layer = [attach[i](*x) if i in attach else x for i, x in enumerate(slices, num_fixed)]
            results = body(*consts, *carry, *layer)
            return results[:num_carry], results[num_carry:]

        last, ys = lax.scan(
            step,
            list(first),
            list(operands[num_fixed:]),
            params["length"],
            params["reverse"],
            params["unroll"],
        )
        return [*last, *ys]

    return compute

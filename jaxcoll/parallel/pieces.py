"""A program cut into pieces, each of which reads few of its large parameters.

What a parameter alone leads to, such as its transpose or itself in another dtype, is computed anew
in each piece that reads it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core.primitives import jit_p, remat_p, scan_p

from jaxcoll import _compat

# Of what a parameter alone leads to: cheaper to do again than to keep.
_CHEAP = frozenset(
    (
        *("add", "sub", "mul", "div", "neg", "sqrt", "rsqrt", "integer_pow", "exp", "tanh"),
        *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "expand_dims", "pad"),
        *("reduce_precision", "reshape", "rev", "slice", "split", "squeeze", "transpose"),
    )
)
# `(equation, {operand: parameter}) -> function of the operands`.
MakeScan = Callable[[Any, dict[int, int]], Callable[..., list[Any]]]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some equations of a program.

    Attributes:
        parameters: which of the large ones it reads, by their numbers.
        prepare: `(*parameters) -> prepared`.
        compute: `(*prepared, *values) -> results`.
        reads: the names of the values, which other pieces made or which are operands.
        makes: the names of the results.
    """

    parameters: tuple[int, ...]
    prepare: Callable[..., list[Any]]
    compute: Callable[..., list[Any]]
    reads: tuple[Any, ...]
    makes: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program in pieces, to be run in their order.

    Attributes:
        pieces: all of it.
        operands: the names of the program's operands.
        constants: what the program knows beside its operands, by name.
        results: the names of the program's results, or literals.
        differentiable: names of values through which derivatives by the parameters flow.
    """

    pieces: tuple[Piece, ...]
    operands: tuple[Any, ...]
    constants: dict[Any, Any]
    results: tuple[Any, ...]
    differentiable: frozenset[Any]


def cut(closed: Any, split: Sequence[int | None], most_bytes: int, scan: MakeScan) -> Program:
    """Cuts a program of parameters.

    Args:
        closed: a closed jaxpr, all of whose operands are parameters.
        split: for each the dimension of which ranks hold parts; None: it is not large.
        most_bytes: of the large parameters that a piece reads, unless one equation reads more.
        scan: makes a function of a scan whose layers are large parameters; it reads these as they
            are held, and is a piece of its own.
    """
    closed = _inlined(closed, split)
    jaxpr = closed.jaxpr
    return Program(
        pieces=tuple(_Cutter(jaxpr, split, most_bytes, scan).pieces()),
        operands=tuple(jaxpr.invars),
        constants=dict(zip(jaxpr.constvars, closed.consts, strict=True)),
        results=tuple(jaxpr.outvars),
        differentiable=_differentiable(jaxpr),
    )


def scanned(jaxpr: Any) -> frozenset[int]:
    """Returns the numbers of a jaxpr's operands that a scan of it goes over."""
    number = {v: i for i, v in enumerate(jaxpr.invars)}
    over: list[Any] = []
    for equation in jaxpr.eqns:
        if equation.primitive is scan_p:
            over += equation.invars[_num_fixed(equation) :]
        elif equation.primitive in (jit_p, remat_p):
            inner = _compat.open_jaxpr(equation.params["jaxpr"])
            over += (equation.invars[i] for i in scanned(inner))
    return frozenset(number[v] for v in _variables(over) if v in number)


def _num_fixed(scan: Any) -> int:
    """Returns how many operands of a scan are the same, or carried, in all its steps."""
    return sum(_compat.scan_counts(scan))


def _differentiable(jaxpr: Any) -> frozenset[Any]:
    found = {v for v in jaxpr.invars if _is_inexact(v)}
    for equation in jaxpr.eqns:
        if any(v in found for v in _variables(equation.invars)):
            found.update(v for v in equation.outvars if _is_inexact(v))
    return frozenset(found)


def _is_inexact(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _inlined(closed: Any, split: Sequence[int | None]) -> Any:
    """Returns the program without those functions under `jax.jit` that read large parameters."""
    is_large = [dim is not None for dim in split]

    def function(*operands: Any) -> list[Any]:
        return _evaluated(closed.jaxpr, closed.consts, is_large, operands)[0]

    return jax.make_jaxpr(function)(*(v.aval for v in closed.jaxpr.invars))


def _evaluated(
    jaxpr: Any, consts: Sequence[Any], is_large: Sequence[bool], operands: Sequence[Any]
) -> tuple[list[Any], list[bool]]:
    """Returns a jaxpr's results, and whether they are made of large parameters alone."""
    names, values = [*jaxpr.constvars, *jaxpr.invars], [*consts, *operands]
    known: dict[Any, Any] = dict(zip(names, values, strict=True))
    large = {v for v, flag in zip(jaxpr.invars, is_large, strict=True) if flag}

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    def is_known_large(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in large

    for equation in jaxpr.eqns:
        reads = [is_known_large(atom) for atom in equation.invars]
        if any(reads) and equation.primitive is jit_p:
            inner = equation.params["jaxpr"]
            given = [value(atom) for atom in equation.invars]
            results, flags = _evaluated(inner.jaxpr, inner.consts, reads, given)
        else:
            variables = list(dict.fromkeys(_variables(equation.invars)))
            made = list(equation.outvars)
            results = _function(jaxpr, [equation], variables, made)(*map(value, variables))
            flags = [any(reads) and equation.primitive.name in _CHEAP] * len(made)
        known.update(zip(equation.outvars, results, strict=True))
        large.update(v for v, flag in zip(equation.outvars, flags, strict=True) if flag)
    return [value(atom) for atom in jaxpr.outvars], [is_known_large(a) for a in jaxpr.outvars]


def _function(
    jaxpr: Any, equations: list[Any], reads: list[Any], makes: list[Any]
) -> Callable[..., list[Any]]:
    """Returns some equations of a jaxpr as a function of the variables that they read."""
    effects = frozenset().union(*(equation.effects for equation in equations))
    jaxpr = jaxpr.replace(
        constvars=[], invars=reads, outvars=makes, eqns=equations, effects=effects
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))


class _Cutter:
    """Goes through the equations once."""

    def __init__(
        self, jaxpr: Any, split: Sequence[int | None], most_bytes: int, scan: MakeScan
    ) -> None:
        self._jaxpr, self._split, self._most_bytes, self._scan = jaxpr, split, most_bytes, scan
        self._number = {v: i for i, v in enumerate(jaxpr.invars) if split[i] is not None}
        # Variable -> the large parameters that it is made of, and nothing else.
        self._made_of = {v: frozenset([i]) for v, i in self._number.items()}
        self._preparing: list[Any] = []

    def pieces(self) -> list[Piece]:
        parts = self._parts()
        needed = set(_variables(self._jaxpr.outvars))
        found = []
        for position, (equations, stacked) in reversed(list(enumerate(parts))):
            results = self._jaxpr.outvars if position == len(parts) - 1 else []
            piece = self._piece(equations, stacked, needed, _variables(results))
            needed.update(piece.reads)
            found.append(piece)
        return found[::-1]

    def _parts(self) -> list[tuple[list[Any], dict[int, int]]]:
        """Returns the equations of each piece; of a scan over large parameters, which."""
        parts: list[tuple[list[Any], dict[int, int]]] = []
        equations: list[Any] = []
        parameters: frozenset[int] = frozenset()
        for equation in self._jaxpr.eqns:
            reads = self._made_from(equation.invars)
            if self._is_preparing(equation):
                self._preparing.append(equation)
                self._made_of.update(dict.fromkeys(equation.outvars, reads))
                continue
            stacked = self._stacked(equation)
            if stacked:
                parts += [*([(equations, {})] if equations else []), ([equation], stacked)]
                equations, parameters = [], frozenset()
                continue
            if parameters and reads - parameters and self._are_many(reads | parameters):
                parts.append((equations, {}))
                equations, parameters = [], frozenset()
            equations.append(equation)
            parameters |= reads
        return [*parts, (equations, {})]

    def _made_from(self, atoms: Iterable[Any]) -> frozenset[int]:
        nothing: frozenset[int] = frozenset()
        return nothing.union(*(self._made_of.get(v, nothing) for v in _variables(atoms)))

    def _is_preparing(self, equation: Any) -> bool:
        operands = _variables(equation.invars)
        return (
            equation.primitive.name in _CHEAP
            and bool(operands)
            and all(v in self._made_of for v in operands)
            and all(_is_inexact(v) for v in equation.outvars)
        )

    def _stacked(self, equation: Any) -> dict[int, int]:
        """Returns which operands of a scan are layers that ranks hold parts of."""
        if equation.primitive is not scan_p:
            return {}
        first = _num_fixed(equation)
        layers = enumerate(equation.invars[first:], first)
        # What all steps read whole as well is gathered before.
        fixed = set(_variables(equation.invars[:first]))
        numbers = {i: self._number[v] for i, v in layers if v in self._number and v not in fixed}
        return {i: number for i, number in numbers.items() if self._split[number]}

    def _are_many(self, parameters: frozenset[int]) -> bool:
        types = (self._jaxpr.invars[i].aval for i in parameters)
        return sum(aval.size * aval.dtype.itemsize for aval in types) > self._most_bytes

    def _piece(
        self, equations: list[Any], stacked: dict[int, int], needed: set[Any], results: list[Any]
    ) -> Piece:
        # Not a set: the processes of a job must make the same program of it.
        made = dict.fromkeys(v for equation in equations for v in equation.outvars)
        layers = {equations[0].invars[i] for i in stacked}
        atoms = [atom for equation in equations for atom in equation.invars]
        read = dict.fromkeys(v for v in _variables([*atoms, *results]) if v not in made)
        prepared = [v for v in read if v in self._made_of and v not in layers]
        values = [v for v in read if v not in self._made_of or v in layers]
        makes = [v for v in [*made, *prepared] if v in (needed if v in made else results)]
        parameters = sorted(self._made_from(prepared))
        inputs = [self._jaxpr.invars[i] for i in parameters]
        compute = _function(self._jaxpr, equations, [*prepared, *values], makes)
        if stacked:
            compute = self._scanning(equations[0], stacked, [*prepared, *values], makes)
        return Piece(
            parameters=tuple(parameters),
            prepare=_function(self._jaxpr, self._preparing_for(prepared), inputs, prepared),
            compute=compute,
            reads=tuple(values),
            makes=tuple(makes),
        )

    def _preparing_for(self, prepared: Iterable[Any]) -> list[Any]:
        wanted = set(prepared)
        equations = []
        for equation in reversed(self._preparing):
            if wanted & set(equation.outvars):
                wanted.update(_variables(equation.invars))
                equations.append(equation)
        return equations[::-1]

    def _scanning(
        self, equation: Any, stacked: dict[int, int], reads: list[Any], makes: list[Any]
    ) -> Any:
        scan = self._scan(equation, stacked)

        def compute(*values: Any) -> list[Any]:
            known = dict(zip(reads, values, strict=True))
            operands = [a.val if isinstance(a, core.Literal) else known[a] for a in equation.invars]
            known.update(zip(equation.outvars, scan(*operands), strict=True))
            return [known[v] for v in makes]

        return compute

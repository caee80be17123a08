"""A model's loss in three parts: what comes before its layers, some of them, and what comes after.

The model is traced three times, each time with another function in the place of its pipeline, and
of each program is left what its results need. So a part may read what the model reads outside of
its layers: a batch's labels, tied weights, and after the layers values from before them.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxcoll import _predicates
from jaxcoll.parallel.gated import gated, typed_like

Function = Callable[..., Any]
# `(parameters, micro-batch, key, pipeline) -> metrics`: sums with their weights.
LossOf = Callable[[list[Any], Any, Any, Function], Any]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The three parts; `rest` are the parameters outside of the layers, x is a list of arrays.

    Attributes:
        before: `(rest, micro-batch, key) -> x`.
        stage: `(rest, micro-batch, key, chunk, numbers, x) -> x`, see `run_layers`.
        after: `(rest, micro-batch, key, x) -> metrics`.
        x: what passes between stages, as arrays.
        communicates: whether any part does.
    """

    before: Function
    stage: Function
    after: Function
    x: list[jax.Array]
    communicates: bool


def run_layers(
    call: str,
    layer: Function,
    chunk: Any,
    numbers: jax.Array | None,
    x: Any,
    rng: Any,
    *,
    some_lack: bool = False,
) -> Any:
    """Returns x after some layers, one after the other.

    Args:
        call: the public function, for texts.
        layer: `(params, x) -> x`, or with a key `(params, x, key) -> x`.
        chunk: parameters `(count, ...)`.
        numbers: of these layers in the model; 0, 1, ... without.
        x: a tree of arrays.
        rng: a key, into which each layer's number is folded, or None.
        some_lack: a number of -1, but for the first, stands for no layer.

    Raises:
        ValueError: a layer returns something else than it takes.
    """
    count = num_layers(call, named_layers(chunk))

    def one(x: Any, number: Any, params: Any) -> Any:
        keys = () if rng is None else (jax.random.fold_in(rng, number),)
        y = layer(params, x, *keys)
        _check_same(call, x, y)
        return y

    xs = (jnp.arange(count) if numbers is None else numbers, chunk)
    first = jax.tree.map(lambda leaf: leaf[0], xs)

    def step(given: Any, x: Any, numbered: Any) -> tuple[Any, None]:
        if not some_lack:
            return one(x, *numbered), None
        # The first one is there, and computed with what is given: what a layer makes of zeros, or
        # of what another one is to see, may have no derivative.
        return gated(numbered[0] >= 0, one, x, (x, *numbered), (given, *first)), None

    result = jax.eval_shape(lambda x, first: step(x, x, first)[0], x, first)
    x = jax.tree.map(typed_like, x, result)
    return lax.scan(ft.partial(step, x), x, xs)[0]


def named_layers(stacked: Any) -> dict[str, Any]:
    """Returns the leaves of what a model gives to its pipeline, by their names for texts."""
    leaves = jax.tree_util.tree_leaves_with_path(stacked)
    return {f"stacked{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}


def counted(name: str, leaf: Any) -> str:
    """Says where layers are counted."""
    return f"dimension 0 of {name} of shape {leaf.shape}"


def num_layers(call: str, layers: Mapping[str, Any]) -> int:
    """Returns the first dimension of stacked parameters, which are given by name.

    Raises:
        ValueError: they have several.
    """
    examples: dict[tuple[int, ...], str] = {}
    for name, leaf in layers.items():
        examples.setdefault(leaf.shape[:1], f"{name} of shape {leaf.shape}")
    if len(examples) != 1 or () in examples:
        raise ValueError(
            f"{call}: model: the parameters that it gives to pipeline= must have the same first "
            f"dimension, 0, which counts layers, got {' and '.join(examples.values()) or 'none'}."
        )
    return next(iter(examples))[0]


def _check_same(call: str, x: Any, y: Any) -> None:
    structures = tuple(map(jax.tree.structure, (x, y)))
    if structures[0] != structures[1]:
        raise ValueError(
            f"{call}: model: a layer must return what it takes, a tree {structures[0]}, but it "
            f"returns {structures[1]}. Let it return what it does not change, too."
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(y), strict=True)
    for (path, taken), returned in pairs:
        texts = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in (taken, returned)]
        if texts[0] != texts[1]:
            raise ValueError(
                f"{call}: model: a layer must return what it takes, {texts[0]}, but it returns "
                f"{texts[1]} (x{jax.tree_util.keystr(path)}). Cast at the layer's end to what came "
                "in; change shapes before or after pipeline=."
            )


def cut(
    call: str,
    loss_of: LossOf,
    params: Sequence[jax.Array],
    names: Sequence[str],
    spread: Sequence[int],
    example: tuple[Any, Any],
    chunk: Sequence[jax.Array],
    numbers: jax.Array,
    *,
    some_lack: bool,
) -> Cut:
    """Cuts a model.

    Args:
        call: the public function, for texts.
        loss_of: the model and its loss.
        params: all of them; those of the layers, in the shapes that the model expects, are not
            read.
        names: of them, for texts.
        spread: the numbers of those that hold the layers.
        example: a micro-batch and a key.
        chunk: layers of a stage, for each of `spread`.
        numbers: which layers of the model these are, -1 where there is none.
        some_lack: some stages have fewer layers, see `run_layers`.

    Raises:
        ValueError: the model can't be cut; the text says why.
    """
    holders = [params[i] for i in spread]
    rest = [leaf for i, leaf in enumerate(params) if i not in spread]

    def run(layers: Any, rest: Any, micro: Any, key: Any, pipeline: Function) -> Any:
        calls = []

        def once(layer: Function, stacked: Any, x: Any, rng: Any = None) -> Any:
            calls.append(None)
            _check_given(call, stacked, layers, [names[i] for i in spread])
            return pipeline(layer, stacked, x, rng)

        of_layers, of_rest = iter(layers), iter(rest)
        leaves = [next(of_layers if i in spread else of_rest) for i in range(len(params))]
        metrics = loss_of(leaves, micro, key, once)
        if len(calls) != 1:
            raise ValueError(
                f"{call}: model: expected it to call pipeline= once, got {len(calls)} times."
            )
        return metrics

    def before(layers: Any, rest: Any, micro: Any, key: Any) -> Any:
        found = []

        def capture(layer: Function, stacked: Any, x: Any, rng: Any) -> Any:
            del layer, stacked, rng
            found.append(jax.tree.leaves(x))
            return x

        run(layers, rest, micro, key, capture)
        return found[0]

    def stage(
        layers: Any, rest: Any, micro: Any, key: Any, chunk: Any, numbers: Any, x: Any
    ) -> Any:
        found = []

        def through(layer: Function, stacked: Any, given: Any, rng: Any) -> Any:
            mine = {id(leaf): part for leaf, part in zip(layers, chunk, strict=True)}
            mine = jax.tree.map(lambda leaf: mine[id(leaf)], stacked)
            y = _like(given, x)
            y = run_layers(call, layer, mine, numbers, y, rng, some_lack=some_lack)
            found.append(jax.tree.leaves(y))
            return given  # what comes after is not looked at

        run(layers, rest, micro, key, through)
        return found[0]

    def after(layers: Any, rest: Any, micro: Any, key: Any, x: Any) -> Any:
        return run(layers, rest, micro, key, lambda layer, stacked, given, rng: _like(given, x))

    def traced(function: Function, *arguments: Any) -> tuple[Function, Any, bool]:
        where = [names[i] for i in spread]
        return _pruned(call, function, holders, where, (rest, *example, *arguments))

    run_before, x, *communicate = traced(before)
    zeros = [typed_like(jnp.zeros(leaf.shape, leaf.dtype), leaf) for leaf in x]
    # Even what depends on nothing is another value on each rank, once it has been passed on.
    zeros = [typed_like(leaf, example[1]) for leaf in zeros]
    # A stage's result may vary over more axes than what it is given at first.
    shapes = traced(stage, list(chunk), numbers, zeros)[1]
    zeros = [typed_like(leaf, shape) for leaf, shape in zip(zeros, shapes, strict=True)]
    run_stage, _, *more = traced(stage, list(chunk), numbers, zeros)
    run_after, _, *most = traced(after, zeros)
    return Cut(run_before, run_stage, run_after, zeros, any([*communicate, *more, *most]))


def given_layers(call: str, loss_of: LossOf, params: list[Any], micro: Any, key: Any) -> list[int]:
    """Returns the numbers of the parameters that a model gives to its pipeline.

    Raises:
        ValueError: it gives something else, or gives it nothing.
    """
    found: list[int] = []

    def program(params: list[Any], micro: Any, key: Any) -> None:
        numbers = {id(leaf): i for i, leaf in enumerate(params)}

        def pipeline(layer: Function, stacked: Any, x: Any, rng: Any = None) -> Any:
            del layer, rng
            _check_own(call, stacked, numbers)
            found.extend(numbers[id(leaf)] for leaf in jax.tree.leaves(stacked))
            return x

        loss_of(params, micro, key, pipeline)

    jax.eval_shape(program, params, micro, key)
    if not found:
        raise ValueError(f"{call}: model: it takes pipeline=, but does not call it.")
    return sorted(found)


def _like(tree: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _check_own(call: str, stacked: Any, known: Container[int]) -> None:
    """Raises ValueError where what a model gives to its pipeline is not known by its id."""
    named = named_layers(stacked)
    wrong = [
        f"{name}, {jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        for name, leaf in named.items()
        if id(leaf) not in known
    ]
    if wrong or not named:
        got = wrong[0] if wrong else "none"
        raise ValueError(
            f"{call}: model: the layers that it gives to pipeline= must be parameters of its own, "
            f"as they are, got {got}. Cast or slice them in the layer, and put jax.jit or "
            "jax.checkpoint around the layer."
        )


def _check_given(call: str, stacked: Any, layers: Sequence[Any], names: Sequence[str]) -> None:
    known = {id(leaf): name for leaf, name in zip(layers, names, strict=True)}
    _check_own(call, stacked, known)
    given = {id(leaf) for leaf in jax.tree.leaves(stacked)}
    if lacking := [name for number, name in known.items() if number not in given]:
        raise ValueError(
            f"{call}: model: the layers that it gives to pipeline= must be the same parameters in "
            f"each call, but {lacking[0]} is not given."
        )


def _pruned(
    call: str, function: Function, holders: list[Any], names: Sequence[str], arguments: tuple
) -> tuple[Function, Any, bool]:
    """Returns a function without the holders, its results' shapes, and whether it communicates.

    Of the program are left the equations that its results need. It may not read the holders.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(holders, *arguments)
    results = set(_variables(closed.jaxpr.outvars))
    constants = zip(closed.jaxpr.constvars, closed.consts, strict=True)
    if any(
        isinstance(value, jax.core.Tracer) for variable, value in constants if variable in results
    ):
        raise ValueError(  # what another trace has made
            f"{call}: model: it calls pipeline= inside of a jax.jit, jax.checkpoint or loop of its "
            "own. Call it in the model itself, and put these around the layer."
        )
    jaxpr, needed, equations = closed.jaxpr, results, []
    for equation in reversed(jaxpr.eqns):
        if needed & set(equation.outvars):
            needed.update(_variables(equation.invars))
            equations.append(equation)
    for name, variable in zip(names, jaxpr.invars, strict=False):
        if variable in needed:
            raise ValueError(
                f"{call}: model: {name} holds layers of the pipeline, but the model reads it "
                "outside of them, too. Give it to pipeline= alone."
            )
    effects = frozenset().union(*(equation.effects for equation in equations))
    jaxpr = jaxpr.replace(
        invars=jaxpr.invars[len(holders) :], eqns=equations[::-1], effects=effects
    )
    evaluate = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, closed.consts))
    treedef = jax.tree.structure(shapes)

    def run(*arguments: Any) -> Any:
        return treedef.unflatten(evaluate(*jax.tree.leaves(arguments)))

    return run, shapes, any(_predicates.collectives(jaxpr))


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]

"""Steps of plans: no collective stands where some of its ranks may not come.

A walk over whole programs, as JAX traces them, where types say over which axes a value may differ.
"""

import dataclasses
import functools as ft
from collections.abc import Iterator
from typing import Any

import jax
import optax
import pytest
from jax import lax
from plans import batch, loss_fn, of_linen
from training import mesh_of

import jaxcoll
from jaxcoll import ParallelPlan

# Equations that name axes, and for which no rank waits.
LOCAL = ("axis_index", "pcast", "pvary")


@dataclasses.dataclass
class Found:
    """What is in a program.

    Attributes:
        collectives: how many.
        branches: those of them and of loops that some ranks may not take.
        wrong: collectives there, whose other ranks would wait.
    """

    collectives: int = 0
    branches: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


def look(jaxpr: Any, found: Found, varying: frozenset[str] = frozenset()) -> Found:
    """Adds what is in a program that runs where a predicate says so.

    Args:
        jaxpr: which.
        found: what there is elsewhere.
        varying: the axes over which that predicate may differ.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        axes = axes_of(equation) if name not in LOCAL else []
        found.collectives += bool(axes)
        if both := varying.intersection(axes):
            found.wrong.append(f"{name} over {axes}, under a predicate that varies over {both}")
        more = frozenset[str]()
        if name in ("cond", "while"):
            more = predicate_of(equation).manual_axis_type.varying
            found.branches += bool(more)
        for inner in programs_in(equation):
            look(inner, found, varying | more)
    return found


def axes_of(equation: Any) -> list[str]:
    found = (equation.params.get(name, ()) for name in ("axes", "axis_name"))
    return [axis for axes in found for axis in jax.tree.leaves(axes) if isinstance(axis, str)]


def predicate_of(equation: Any) -> Any:
    """Returns the type of what a `cond`, `switch` or `while` goes by."""
    if equation.primitive.name == "cond":
        return equation.invars[0].aval
    return equation.params["cond_jaxpr"].out_avals[0]


def programs_in(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


@pytest.mark.slow
@pytest.mark.product(
    schedule=("gpipe", "1f1b", "interleaved"), axes=(("fsdp",), ("fsdp", "tensor"))
)
def test_of_a_plan(schedule: Any, axes: tuple[str, ...]):
    """With 5 layers on 2 stages, of which one has room for a layer that it lacks."""
    sizes = dict.fromkeys(("pipe", *axes), 2)
    plan = ParallelPlan(
        sizes,
        devices=jax.devices()[: 2 ** len(sizes)],
        fsdp={"min_weight_size": 16},
        schedule=schedule,
    )
    axis = "tensor" if "tensor" in axes else None
    optimizer = optax.chain(jaxcoll.clip_by_global_norm(1.0), optax.adamw(0.02))
    model, data = of_linen(axis, plan.mesh if axis else None), batch()
    with jax.enable_x64(True):
        state = plan.init(model, optimizer, jax.random.key(0), data)
        step = plan.build_train_step(ft.partial(loss_fn, axis))
        found = look(jax.make_jaxpr(step)(state, data).jaxpr, Found())
    assert not found.wrong
    assert found.collectives > 10
    # A stage that communicates is computed by all ranks at all times.
    assert (found.branches > 0) == (axis is None)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", ["cond", "while", "nested"])
def test_the_walk_finds_what_would_wait(kind: str, waits: bool):
    """A collective over "x" where what decides differs over "x", or over "y" alone."""

    def body(x: Any) -> Any:
        rank = lax.axis_index("x" if waits else "y")

        def summed(x: Any) -> Any:
            return lax.pcast(jaxcoll.all_reduce(x, "x"), "x", to="varying")

        if kind == "while":
            step = lambda state: (state[0] + 1, summed(state[1]))  # noqa: E731
            return lax.while_loop(lambda state: state[0] < 1, step, (rank, x))[1]
        if kind == "nested":
            inner = jax.jit(jax.checkpoint(summed))
            same = lax.pmax(x.sum(), ("x", "y")) > 0
            return lax.cond(rank == 0, lambda x: lax.cond(same, inner, lambda x: x, x), inner, x)
        return lax.cond(rank == 0, summed, lambda x: x, x)

    mapped = jax.shard_map(
        body, mesh=mesh_of(x=2, y=2), in_specs=jax.P(("x", "y")), out_specs=jax.P(("x", "y"))
    )
    found = look(jax.make_jaxpr(mapped)(jax.numpy.ones(4)).jaxpr, Found())
    assert bool(found.wrong) == waits
    assert found.branches

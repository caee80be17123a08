"""What a model's `init` makes: traced once, and apart from the arrays that it only hands on."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh


class FirstValues(NamedTuple):
    """A model's `init` as a program.

    Attributes:
        shapes: of what it makes.
        given: the arrays that it reads beside its arguments, such as the parameters of an NNX
            module, or pretrained ones. In a program of `jax.jit` they would be its constants, which
            take many times their size to compile.
        make: `make(given, rng, inputs)` makes it.
    """

    shapes: Any
    given: list[Any]
    make: Callable[[Sequence[Any], jax.Array, Any], Any]


def first_values(init: Callable[..., Any], rng: jax.Array, inputs: Any) -> FirstValues:
    """Returns what `init(rng, inputs)` makes, without running it."""
    closed, shapes = jax.make_jaxpr(init, return_shape=True)(rng, inputs)
    jaxpr = closed.jaxpr.replace(
        constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars]
    )
    evaluate = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
    treedef = jax.tree.structure(shapes)

    def make(given: Sequence[Any], rng: jax.Array, inputs: Any) -> Any:
        return treedef.unflatten(evaluate(*given, *jax.tree.leaves((rng, inputs))))

    return FirstValues(shapes, list(closed.consts), make)


def movable(array: Any, mesh: Mesh | None) -> Any:
    """Returns an array as a program on the mesh can take it: there already, or bound nowhere."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return array
    if not array.committed or (mesh and array.sharding.device_set == set(mesh.devices.flat)):
        return array
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(array)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return np.asarray(array)

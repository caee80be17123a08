"""What a model's `init` makes, as a program that can be run with other programs: traced once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding


class FirstValues(NamedTuple):
    """A function without arguments, as a program.

    Attributes:
        shapes: of what it makes.
        given: the arrays that it reads, such as a key, the parameters of an NNX module, or
            pretrained ones. In a program of `jax.jit` they would be its constants, which take many
            times their size to compile.
        made: `made(given)` makes it.
    """

    shapes: Any
    given: list[Any]
    made: Callable[[Sequence[Any]], Any]


def first_values(init: Callable[[], Any]) -> FirstValues:
    """Returns what `init` makes, without computing it; what `init` reads has its values."""
    closed, shapes = jax.make_jaxpr(init, return_shape=True)()
    jaxpr = closed.jaxpr.replace(constvars=[], invars=closed.jaxpr.constvars)
    evaluate = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
    treedef = jax.tree.structure(shapes)
    return FirstValues(
        shapes, list(closed.consts), lambda given: treedef.unflatten(evaluate(*given))
    )


def as_operand(call: str, array: Any, mesh: Mesh | None) -> Any:
    """Returns an array as a program on the mesh takes it, wherever it lies.

    That is on the mesh's devices in their order, or bound to none.

    Raises:
        ValueError: other processes have parts of it, on other devices than the mesh's.
    """
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return array
    if not array.committed:
        return array
    with jax.ensure_compile_time_eval():  # under another trace, too
        sharding = array.sharding
        devices = list(mesh.devices.flat) if mesh else []
        if isinstance(sharding, NamedSharding) and sharding.device_set == set(devices):
            grid = np.asarray(sharding.mesh.devices)
            if list(grid.flat) == devices:
                return array
            there = Mesh(np.array(devices).reshape(grid.shape), sharding.mesh.axis_names)
            return jax.device_put(array, NamedSharding(there, sharding.spec))
        if not array.is_fully_addressable and not array.is_fully_replicated:
            raise ValueError(
                f"{call}: model: it brings along {array.dtype}{list(array.shape)} with parts in "
                f"other processes, on {len(sharding.device_set)} devices that are not the mesh's "
                f"{len(devices)}. Put it on those of the mesh first, with jax.device_put(array, "
                "NamedSharding(mesh, spec)), or create the state on its mesh."
            )
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = jnp.asarray(np.asarray(jax.random.key_data(array)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        return np.asarray(array)

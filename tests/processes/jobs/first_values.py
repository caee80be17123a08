"""Begins with values that are there before: of each process alone, and of all of them together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from world import say

from jaxcoll import create_train_state, fully_shard

VALUES = np.arange(64, dtype=np.float32).reshape(8, 8)
DATA = (jnp.ones((8, 8)), jnp.zeros((8, 8)))


class Module(nnx.Module):
    def __init__(self, kernel: jax.Array) -> None:
        self.kernel = nnx.Param(kernel)

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel


def pair(kernel: jax.Array) -> Any:
    return lambda rng, x: {"kernel": kernel}, lambda params, x: x @ params["kernel"]


def main() -> None:
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    places = (
        None,
        jax.local_devices()[0],
        jax.NamedSharding(mesh, jax.P()),
        jax.NamedSharding(mesh, jax.P("data")),
        jax.NamedSharding(jax.sharding.Mesh(jax.devices()[::-1], ("data",)), jax.P("data")),
    )
    rng = jax.device_put(jax.random.key(0), jax.local_devices()[0])
    for place in places:
        kernel = jax.device_put(VALUES, place) if place else jnp.asarray(VALUES)
        for model in (Module(kernel), pair(kernel), fully_shard(pair(kernel), "data")):
            state = create_train_state(model, optax.adam(0.1), rng, DATA, mesh)
            (leaf,) = jax.tree.leaves(state.params)
            assert leaf.sharding.device_set == set(jax.devices()), (place, leaf.sharding)
            for part in leaf.addressable_shards:
                np.testing.assert_array_equal(part.data, VALUES[part.index], err_msg=str(place))
    split = jax.device_put(VALUES, places[-1])
    some = jax.sharding.Mesh(jax.devices()[::2], ("data",))
    try:
        create_train_state(pair(split), optax.adam(0.1), rng, DATA, some)
    except ValueError as error:
        say(error)
    say("all first values are right")


main()

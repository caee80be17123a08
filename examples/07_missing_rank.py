"""A device that never comes: an error that names it, and the next program runs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcoll

jaxcoll.simulate_cpu_devices(4)  # before anything else uses JAX
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
if reason := jaxcoll.info().off.get("native path"):  # jax.lax would wait for ever
    raise SystemExit(f"not run: {reason}")
jaxcoll.config.timeout_s = 2  # 300 if you don't say


def on_all(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data")))


def step(x: jax.Array) -> jax.Array:
    # Device 2 has nothing, and goes on alone.
    return jax.lax.cond(
        jnp.any(x != 0), lambda x: x / jaxcoll.all_reduce(x, "data"), lambda x: x, x
    )


x = jnp.ones(8).at[4:6].set(0)
try:
    jax.block_until_ready(on_all(step)(x))
except RuntimeError as error:
    print(error)
print("and on:", on_all(lambda x: x + jaxcoll.all_reduce(x, "data"))(x))

"""Which path each collective takes and why, and a hang that is found before it happens."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcoll

jaxcoll.simulate_cpu_devices(4)  # before anything else uses JAX
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def step(x: jax.Array) -> jax.Array:
    total = jaxcoll.all_reduce(x, "data")
    here = jaxcoll.all_reduce(x, "data", op="max", backend="lax")

    # Each device decides for itself, by its own block, whether it takes part: where they disagree,
    # those that came wait for those that never will.
    def clipped(x: jax.Array) -> jax.Array:
        return x / jaxcoll.all_reduce(jnp.abs(x), "data", op="max")

    return jax.lax.cond(x.sum() > 0, clipped, lambda x: x, x) + total + here


f = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
x = jnp.arange(8.0)
print(jaxcoll.explain(f, x))

jaxcoll.config.strict = True  # what explain warns about is an error now
try:
    f(x)
except ValueError as error:
    print("strict:", str(error).split(":")[0])

"""`ppermute`: heat flows along a rod that lies in eight pieces on eight devices."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcoll

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
DEVICES, STEPS = 8, 400
mesh = jax.make_mesh((DEVICES,), ("rod",), axis_types=(AxisType.Auto,))
RIGHT = [(i, i + 1) for i in range(DEVICES - 1)]
LEFT = [(i + 1, i) for i in range(DEVICES - 1)]


def diffuse(heat: jax.Array) -> jax.Array:
    """Returns the heat of each cell after STEPS; outside of the rod it is 0."""

    def step(_: int, heat: jax.Array) -> jax.Array:
        # A rank that nobody sends to gets zeros: just what the two ends of the rod need.
        from_left = jaxcoll.ppermute(heat[-1:], "rod", RIGHT)
        from_right = jaxcoll.ppermute(heat[:1], "rod", LEFT)
        padded = jnp.concatenate([from_left, heat, from_right])
        return heat + 0.25 * (padded[:-2] - 2 * heat + padded[2:])

    return jax.lax.fori_loop(0, STEPS, step, heat)


def diffuse_whole(heat: jax.Array) -> jax.Array:
    """The same on one device."""

    def step(_: int, heat: jax.Array) -> jax.Array:
        padded = jnp.pad(heat, 1)
        return heat + 0.25 * (padded[:-2] - 2 * heat + padded[2:])

    return jax.lax.fori_loop(0, STEPS, step, heat)


split = jax.jit(jax.shard_map(diffuse, mesh=mesh, in_specs=P("rod"), out_specs=P("rod")))
heat = jnp.zeros(64).at[20].set(100.0)
after = split(heat)
for device in range(DEVICES):
    cells = after[8 * device : 8 * device + 8]
    print(f"device {device}  {'#' * round(float(cells.sum()))} {cells.sum():.1f}")
print("equal to the rod in one piece:", bool(jnp.allclose(after, jax.jit(diffuse_whole)(heat))))


# Derivatives travel back along the reversed edges.
sensitivity = jax.jit(jax.grad(lambda heat: split(heat)[60]))(heat)
print(f"cell 60 feels cell {jnp.argmax(sensitivity)} most, cell 20 {sensitivity[20]:.1e} as much")

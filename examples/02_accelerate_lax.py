"""A program that knows only `jax.lax`, and Flax's BatchNorm, run natively with one line."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcoll

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(32)(x)
        # Flax calls lax.pmean for the statistics of the whole batch.
        x = nn.BatchNorm(use_running_average=False, axis_name="data")(x)
        return nn.Dense(1)(nn.relu(x))[:, 0]


model = Network()


def train_step(variables: dict, x: jax.Array, y: jax.Array) -> tuple:
    def loss_fn(params: dict) -> tuple:
        predictions, updated = model.apply(
            {**variables, "params": params}, x, mutable=["batch_stats"]
        )
        return jnp.mean((predictions - y) ** 2), updated["batch_stats"]

    params = jax.lax.pcast(variables["params"], "data", to="varying")
    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    loss, grads = jax.lax.pmean((loss, grads), "data")
    params = jax.tree.map(lambda p, g: p - 0.05 * g, variables["params"], grads)
    return {"params": params, "batch_stats": batch_stats}, loss


step = jax.jit(
    jax.shard_map(train_step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
)
x = jax.random.normal(jax.random.key(0), (256, 4))
y = jnp.sin(x).sum(axis=1)
variables = model.init(jax.random.key(1), x)


def train(steps: int) -> tuple:
    state = variables
    for _ in range(steps):
        state, loss = step(state, x, y)
    return state, loss


on_lax = train(100)
print(f"on lax:    loss {on_lax[1]:.4f}")

jaxcoll.accelerate_lax()  # the one line

native = train(100)
print(f"natively:  loss {native[1]:.4f}")
difference = max(
    jnp.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (on_lax, native)), strict=True)
)
print(f"the largest difference of any parameter is below 1e-5: {difference < 1e-5}")
paths = [row.path for row in jaxcoll.explain(step, variables, x, y).rows]
print(f"{len(paths)} calls of lax.psum, by Flax and by this file, {paths.count('native')} native")

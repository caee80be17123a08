"""`reduce_scatter`, `all_gather`: each device keeps an eighth of Adam's state (ZeRO, stage 1)."""

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcoll

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
optimizer = optax.adam(0.01)
keys = jax.random.split(jax.random.key(0), 3)
params = {
    "hidden": 0.3 * jax.random.normal(keys[0], (16, 63)),
    "out": 0.1 * jax.random.normal(keys[1], (63, 16)),
}
flat_params, unravel = ravel_pytree(params)  # 2016 numbers: 252 for each device
x = jax.random.normal(keys[2], (512, 16))
y = jnp.tanh(x[:, ::-1])


def loss_fn(flat_params: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    params = unravel(flat_params)
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2)


def sharded_step(mine: jax.Array, opt_state: tuple, x: jax.Array, y: jax.Array) -> tuple:
    """Takes and returns this device's eighth of the parameters and of Adam's two moments."""
    whole = jaxcoll.all_gather(mine, "data", tiled=True)
    loss, grads = jax.value_and_grad(loss_fn)(whole, x, y)
    my_grads = jaxcoll.reduce_scatter(grads, "data", tiled=True, op="mean")
    updates, opt_state = optimizer.update(my_grads, opt_state)
    return (
        optax.apply_updates(mine, updates),
        opt_state,
        jaxcoll.all_reduce(loss, "data", op="mean"),
    )


@jax.jit
def whole_step(params: jax.Array, opt_state: tuple, x: jax.Array, y: jax.Array) -> tuple:
    """The same on one device."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


opt_state = optimizer.init(flat_params)
state_specs = jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), opt_state)
step = jax.jit(
    jax.shard_map(
        sharded_step,
        mesh=mesh,
        in_specs=(P("data"), state_specs, P("data"), P("data")),
        out_specs=(P("data"), state_specs, P()),
    )
)
sharded, whole = (flat_params, opt_state), (flat_params, opt_state)
for i in range(101):
    *sharded, loss = step(*sharded, x, y)
    *whole, expected = whole_step(*whole, x, y)
    if i % 50 == 0:
        print(f"step {i:3d}  loss {loss:.3f}  (one device: {expected:.3f})")
moments = sharded[1][0].mu
print(f"Adam's first moment: {moments.size} numbers,", end=" ")
print(f"{moments.addressable_shards[0].data.size} on each device")

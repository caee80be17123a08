"""Data-parallel training in forty lines: one `shard_map` step, one `jaxcoll.all_reduce`, Optax."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcoll

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
inputs = jax.random.normal(jax.random.key(0), (1024, 3))
targets = inputs @ jnp.array([2.0, -3.0, 0.5]) + 1.0
params = {"weights": jnp.zeros(3), "bias": jnp.zeros(())}
optimizer = optax.adam(0.1)


def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["weights"] + params["bias"] - y) ** 2)


def train_step(params: dict, opt_state: tuple, x: jax.Array, y: jax.Array) -> tuple:
    # Each device differentiates its own copy, on its own 1024 / 8 rows...
    local_params = jax.lax.pcast(params, "data", to="varying")
    loss, grads = jax.value_and_grad(loss_fn)(local_params, x, y)
    # ...and one call averages the loss and all gradients over the devices.
    loss, grads = jaxcoll.all_reduce((loss, grads), "data", op="mean")
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


in_specs = (P(), P(), P("data"), P("data"))
step = jax.jit(jax.shard_map(train_step, mesh=mesh, in_specs=in_specs, out_specs=P()))
opt_state = optimizer.init(params)
for i in range(201):
    params, opt_state, loss = step(params, opt_state, inputs, targets)
    if i % 50 == 0:
        print(f"step {i:3d}  loss {loss:.3f}  (mean over 8 devices)")
weights = [round(float(weight), 3) for weight in params["weights"]]
print(f"weights {weights}, expected [2.0, -3.0, 0.5]")
print(f"bias {params['bias']:.1f}, expected 1.0")

"""xlstm-jax's way, in linen: `shard_module_params` gathers each layer's parameters when it runs."""

import functools as ft
from typing import Any

import flax.linen as nn
import jax
import optax
from jax.sharding import PartitionSpec as P
from support import digits

import jaxcoll

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
mesh = jaxcoll.make_mesh({"data": -1})
batches, (test_images, _) = digits.load()
optimizer = optax.sgd(0.5)


class Classifier(nn.Module):
    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(10, name="output")(nn.relu(self.dense(128, name="hidden")(x)))


shard = ft.partial(jaxcoll.shard_module_params, axis_name="data", min_weight_size=1024)
plain, model = Classifier(), Classifier(shard(nn.Dense))


def init(x: jax.Array) -> Any:
    return model.init(jax.random.key(0), x)["params"]


def train_step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        logits = model.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    grads = jaxcoll.sync_gradients(grads, ("data",))
    updates, _ = optimizer.update(grads, optimizer.init(params))
    return optax.apply_updates(params, updates), jaxcoll.all_reduce(loss, "data", op="mean")


map_over = ft.partial(jax.shard_map, mesh=mesh, in_specs=P("data"))
boxes = jax.eval_shape(map_over(init, out_specs=P(), check_vma=False), batches[0][0])
specs = nn.get_partition_spec(boxes)
print("specs of the hidden layer:", specs["hidden"])
params = jax.jit(map_over(init, out_specs=specs))(batches[0][0])
first = nn.unbox(params)
step = jax.jit(
    jax.shard_map(
        train_step, mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=(specs, P())
    )
)
losses = []
for x, y in batches:
    params, loss = step(params, x, y)
    losses.append(float(loss))

alone = digits.train_alone(lambda p, x: plain.apply({"params": p}, x), first, optimizer)
digits.report(__file__, losses, alone, plain.apply({"params": nn.unbox(params)}, test_images))

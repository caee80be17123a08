"""`fully_shard` (ZeRO-3): each device keeps an eighth of weights, gradients and AdamW's state."""

import jax
import optax
from jax.sharding import PartitionSpec as P
from support import digits

import jaxcoll
from jaxcoll.models import SimpleClassifier

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
mesh = jaxcoll.make_mesh({"data": -1})
batches, (test_images, _) = digits.load()
plain, optimizer = SimpleClassifier(num_classes=10), optax.adamw(3e-3)
model = jaxcoll.fully_shard(plain, stage=3)  # the only line that differs, besides the specs

state = jaxcoll.create_train_state(model, optimizer, jax.random.key(0), batches[0], mesh)
first = state.params
kernel = first["hidden_layer"]["kernel"]
print(f"hidden kernel {kernel.shape}, {kernel.addressable_shards[0].data.shape} on each device")
step = jax.jit(
    jax.shard_map(
        jaxcoll.data_parallel_train_step(model),
        mesh=mesh,
        in_specs=(state.specs, P("data")),
        out_specs=(state.specs, P()),
    )
)
losses = []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))

alone = digits.train_alone(lambda p, x: plain.apply({"params": p}, x), first, optimizer)
params = jaxcoll.reshard(state.params, P())  # whole again, on every device
digits.report(__file__, losses, alone, plain.apply({"params": params}, test_images))

"""Tensor parallelism: every layer's weight is split over two devices, beside four of data."""

import jax
import optax
from jax.sharding import PartitionSpec as P
from support import digits

import jaxcoll
from jaxcoll.models import SimpleClassifier, TPClassifier

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
mesh = jaxcoll.make_mesh({"data": -1, "tensor": 2})
batches, (test_images, _) = digits.load()
# overlap: communication in a ring, beside the matmuls. The weights are the same either way, and
# those of SimpleClassifier.
model = TPClassifier(num_classes=10, mesh=mesh, overlap=True)
plain, optimizer = SimpleClassifier(num_classes=10), optax.sgd(0.5)

state = jaxcoll.create_train_state(model, optimizer, jax.random.key(0), batches[0], mesh)
first = state.params
for name, layer in first.items():
    kernel = layer["kernel"]
    print(f"{name}: {kernel.shape}, {kernel.addressable_shards[0].data.shape} on each device")
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
logits = plain.apply({"params": state.params}, test_images)
digits.report(__file__, losses, alone, logits)

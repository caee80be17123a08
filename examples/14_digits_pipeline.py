"""Pipeline parallelism (GPipe): eight layers on four stages, four micro-batches passing through."""

import jax
import optax
from jax.sharding import PartitionSpec as P
from support import digits

import jaxcoll
from jaxcoll.models import PPClassifier

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
mesh = jaxcoll.make_mesh({"data": -1, "pipe": 4})
batches, (test_images, _) = digits.load()
model, optimizer = PPClassifier(num_classes=10, num_layers=8), optax.adam(1e-3)

state = jaxcoll.create_train_state(model, optimizer, jax.random.key(0), batches[0], mesh)
first = state.params
print(f"layers {first['kernel'].shape}, {first['kernel'].addressable_shards[0].data.shape} a stage")
step = jax.jit(
    jax.shard_map(
        jaxcoll.pipeline_parallel_train_step(model, num_micro_batches=4),
        mesh=mesh,
        in_specs=(state.specs, P("data")),
        out_specs=(state.specs, P()),
    )
)
losses = []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))

alone = digits.train_alone(lambda p, x: model.apply({"params": p}, x), first, optimizer)
logits = model.apply({"params": state.params}, test_images)
digits.report(__file__, losses, alone, logits)

"""Pipeline parallelism (1F1B): eight layers on four stages, eight micro-batches passing through."""

import jax
import optax
from jax.sharding import PartitionSpec as P
from support import digits

import jaxcoll
from jaxcoll.models import PPClassifier

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
mesh = jaxcoll.make_mesh({"data": -1, "pipe": 4})
batches, (test_images, _) = digits.load()
plain, optimizer = PPClassifier(num_classes=10, num_layers=8), optax.adam(1e-3)
model = jaxcoll.pipelined(plain, num_micro_batches=8, schedule="1f1b")
schedule = jaxcoll.PipelineSchedule("1f1b", num_stages=4)
print(schedule.text(8))
print(
    f"bubble {schedule.bubble(8):.0%}, at most {schedule.peak_inflight(8)} inputs held by a stage"
)

state = jaxcoll.create_train_state(model, optimizer, jax.random.key(0), batches[0], mesh)
first = state.unpadded().params
print(f"layers {first['kernel'].shape}, {first['kernel'].addressable_shards[0].data.shape} a stage")
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
logits = plain.apply({"params": state.unpadded().params}, test_images)
digits.report(__file__, losses, alone, logits)

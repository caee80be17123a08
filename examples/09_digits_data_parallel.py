"""Mesh, model, step: data-parallel training on handwritten digits, with the shared train step."""

import jax
import optax
from jax.sharding import PartitionSpec as P
from support import digits

import jaxcoll
from jaxcoll.models import SimpleClassifier

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
mesh = jaxcoll.make_mesh({"data": -1})  # -1: as many as there are
batches, (test_images, _) = digits.load()
model, optimizer = SimpleClassifier(num_classes=10), optax.sgd(0.5)

state = jaxcoll.create_train_state(model, optimizer, jax.random.key(0), batches[0], mesh)
first = state.params
step = jax.jit(
    jax.shard_map(
        jaxcoll.data_parallel_train_step(model),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
)
losses = []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))

alone = digits.train_alone(lambda p, x: model.apply({"params": p}, x), first, optimizer)
logits = model.apply({"params": state.params}, test_images)
digits.report(__file__, losses, alone, logits)

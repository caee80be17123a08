"""Artifex's way, in NNX: a mesh of data x model, `DataParallel`, and a layer in two parts."""

from typing import Any

import jax
import optax
from flax import nnx
from support import digits

import jaxcoll

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
manager, dp = jaxcoll.DeviceMeshManager(), jaxcoll.DataParallel()
mesh = manager.create_hybrid_mesh(data_parallel_size=4, model_parallel_size=2)
print(manager.get_mesh_info(mesh))
batches, (test_images, _) = digits.load()


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = jaxcoll.ShardedLinear(64, 128, rngs=rngs, mesh=mesh)
        self.output = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.output(nnx.relu(self.hidden(x)))


def apply(params: Any, x: jax.Array) -> jax.Array:
    """The same on one device, with nothing of jaxcoll."""
    hidden = nnx.relu(x @ params["hidden"]["weight"] + params["hidden"]["bias"])
    return hidden @ params["output"]["kernel"] + params["output"]["bias"]


model = Classifier(nnx.Rngs(0))
nnx.update(model.output, dp.shard_model_state(nnx.state(model.output), mesh))
optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
sharding = dp.create_data_parallel_sharding(mesh)
first = nnx.to_pure_dict(nnx.state(model, nnx.Param))


@nnx.jit
def train_step(model: Classifier, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    def loss_fn(model: Classifier) -> jax.Array:
        logits = model(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


alone = digits.train_alone(apply, first, optax.sgd(0.5))
losses = [float(train_step(model, optimizer, dp.shard_batch(b, sharding))) for b in batches]
digits.report(__file__, losses, alone, model(test_images))

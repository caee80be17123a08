"""Any product of axes: one language model on three plans, with the same losses."""

from typing import Any

import jax
import numpy as np
import optax

import jaxcoll
from jaxcoll.models import TransformerLM

jaxcoll.simulate_cpu_devices(8)  # before anything else uses JAX
tokens = np.random.default_rng(0).integers(0, 64, (16, 17))
batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def of_parts(logits: jax.Array, batch: Any) -> jax.Array:
    # A rank of "tensor" has a part of each position's logits.
    return jaxcoll.vocab_parallel_cross_entropy(logits, batch["labels"]).mean()


def train(plan: jaxcoll.ParallelPlan) -> tuple[jaxcoll.TrainState, list[float]]:
    is_split = "tensor" in plan.mesh.shape
    split: dict[str, Any] = {"axis_name": "tensor", "mesh": plan.mesh} if is_split else {}
    model = TransformerLM(vocab_size=64, num_layers=4, width=32, num_heads=2, **split)
    state = plan.init(model, optax.adamw(3e-3), jax.random.key(0), batch)
    step = plan.build_train_step(of_parts if is_split else None)
    losses = []
    for _ in range(10):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    print(f"{plan}: loss {losses[0]:.3f}, {losses[-1]:.3f}")
    return state, losses


_, expected = train(jaxcoll.ParallelPlan({"data": 8}))
for plan in (
    jaxcoll.ParallelPlan({"data": 2, "fsdp": 2, "tensor": 2}),
    jaxcoll.ParallelPlan({"pipe": 2, "data": 2, "tensor": 2}, num_micro_batches=4),
):
    state, losses = train(plan)
    print("the same to 5e-6:", np.allclose(losses, expected, rtol=0, atol=5e-6))
print(plan.describe(state.params["blocks"]["mlp"]))

"""Pipelines of two processes, each on a core of its own, beside what one of them can do alone.

The ideal is the time in which a process sends all micro-batches through its half of the layers,
forward, and then, with the layers computed once more, backward: as a first stage does. It
communicates with nobody, and has the input layer and the head as well, which are small. Both
processes do so at the same time, and the slower one counts.
"""

import functools as ft
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

RANKS = 2
MICRO_BATCHES = (2, 4, 8, 16)
SCHEDULES: tuple[Literal["gpipe", "1f1b", "interleaved"], ...] = ("gpipe", "1f1b", "interleaved")
LAYERS, WIDTH, INPUTS, CLASSES = 8, 512, 16, 10
EXAMPLES = 256  # of a micro-batch: milliseconds for a tick
LEARNING_RATE = 0.1


def limit(schedule: str, micro_batches: int) -> float:
    """Returns the least time of a step over the ideal: the bubble's share."""
    chunks = 2 if schedule == "interleaved" else 1
    return (chunks * micro_batches + RANKS - 1) / (chunks * micro_batches)


def batch_of(micro_batches: int) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    count = micro_batches * EXAMPLES
    inputs = rng.standard_normal((count, INPUTS), dtype=np.float32)
    return inputs, rng.integers(0, CLASSES, count, dtype=np.int32)


def piped(schedule: Any, micro_batches: int) -> tuple[Any, Any, Any]:
    """Returns a compiled step of a pipeline, its state and its batch."""
    import jax
    import optax

    import jaxcoll
    from jaxcoll.models import PPClassifier

    plan = jaxcoll.ParallelPlan({"pipe": RANKS}, num_micro_batches=micro_batches, schedule=schedule)
    batch = plan.shard_batch(batch_of(micro_batches), batch_is_global=True)
    model = PPClassifier(CLASSES, LAYERS, WIDTH, split=False)
    state = plan.init(model, optax.sgd(LEARNING_RATE), jax.random.key(0), batch)
    step = jax.jit(plan.build_train_step(), donate_argnums=0)
    return step.lower(state, batch).compile(), state, batch


def ideal(micro_batches: int) -> tuple[Any, Any, Any]:
    """Returns a compiled step of half of the layers on this process alone, with its operands."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    from jaxcoll import sequential
    from jaxcoll.models import PPClassifier

    model = PPClassifier(CLASSES, LAYERS // RANKS, WIDTH, split=False)

    def recomputed(layer: Any, stacked: Any, x: Any) -> Any:
        return jax.checkpoint(ft.partial(sequential, layer))(stacked, x)

    def loss(params: Any, micro: Any) -> Any:
        logits = model.apply({"params": params}, micro[0], pipeline=recomputed)
        return optax.softmax_cross_entropy_with_integer_labels(logits, micro[1]).sum()

    def step(params: Any, batch: Any) -> Any:
        def add(sums: Any, micro: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, micro)), None

        micro = jax.tree.map(lambda x: x.reshape(-1, EXAMPLES, *x.shape[1:]), batch)
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (total, grads), _ = jax.lax.scan(add, zeros, micro)
        rate = LEARNING_RATE / batch[1].size
        new = jax.tree.map(lambda leaf, grad: leaf - rate * grad, params, grads)
        return new, {"loss": total / batch[1].size}

    batch = jax.device_put(batch_of(micro_batches), jax.local_devices()[0])
    params = nn.unbox(model.init(jax.random.key(0), batch[0][:1]))["params"]
    return jax.jit(step, donate_argnums=0).lower(params, batch).compile(), params, batch


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each number of micro-batches and schedule, the same in both processes."""
    import numpy as np
    from jax.experimental import multihost_utils

    for micro_batches in MICRO_BATCHES:
        makers: dict[str, Callable[[], Any]] = {"ideal": lambda m=micro_batches: ideal(m)}
        makers |= {name: ft.partial(piped, name, micro_batches) for name in SCHEDULES}
        steps = {name: make() for name, make in makers.items()}
        temporary = {
            name: step.memory_analysis().temp_size_in_bytes for name, (step, *_) in steps.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        losses = {}
        for number in range(rounds + 2):
            for name in list(steps)[:: 1 if number % 2 else -1]:
                multihost_utils.sync_global_devices(name)
                took, losses[name] = timed(steps, name)
                if number > 1:  # warm
                    seconds[name].append(took)
        slowest = {
            name: np.max(multihost_utils.process_allgather(np.array(times)).reshape(RANKS, -1), 0)
            for name, times in seconds.items()
        }
        best = slowest["ideal"]
        for name in SCHEDULES:
            yield {
                "micro-batches": micro_batches,
                "schedule": name,
                "ms": 1e3 * float(np.median(slowest[name])),
                "ideal ms": 1e3 * float(np.median(best)),
                "limit": limit(name, micro_batches),
                "ratio": float(np.median(slowest[name] / best)) / limit(name, micro_batches),
                "temporary bytes": temporary[name],
                "equal": abs(losses[name] - losses[SCHEDULES[0]]) < 2e-3,
            }


def timed(steps: dict[str, Any], name: str) -> tuple[float, float]:
    """Makes a step; returns its seconds and its loss."""
    import jax

    step, state, batch = steps[name]
    begin = time.perf_counter()
    state, metrics = jax.block_until_ready(step(state, batch))
    took = time.perf_counter() - begin
    steps[name] = step, state, batch
    return took, float(metrics["loss"])

"""Train a byte-level Transformer on Python's own source, in parallel over simulated devices.

    python examples/train_lm.py           # three to four minutes on two cores
    python examples/train_lm.py --help
    python examples/train_lm.py --mesh data=2,fsdp=2,tensor=2
    python examples/train_lm.py --mesh pipe=2,data=2,tensor=2 --num-layers 4
    jaxcoll run -n 2 --devices-per-process 4 examples/train_lm.py --mesh data=4,tensor=2 --async-tp

It needs `pip install 'jaxcoll[demo]'`. The part to copy is `main`: a `jaxcoll.ParallelPlan`, the
state that it makes and the step that it builds. What isn't training is in `support/`.
"""

import dataclasses
import functools as ft
import math
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import bigram, data, evaluation, generate, meshes, report, timing
from support.checkpoints import Checkpoints
from support.options import option, parse
from support.steps import train
from support.timing import Step
from support.together import say

import jaxcoll
from jaxcoll.models import TransformerLM

REQUIRED_MARGIN = 0.2  # nats per byte below the bigram model


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained: kept in the checkpoint, from which --resume takes it."""

    steps: int = option(800, "training steps, over which the learning rate rises and falls")
    batch: int = option(16, "windows per step, all devices together")
    context: int = option(128, "bytes per window")
    num_layers: int = option(3, "Transformer blocks")
    width: int = option(160, "features per byte")
    num_heads: int = option(4, "attention heads per block")
    learning_rate: float = option(3e-3, "AdamW's highest; cosine decay to a twentieth of it")
    warmup_steps: int = option(50, "steps of linear warmup, at most a quarter of --steps")
    weight_decay: float = option(0.1, "AdamW's, as a multiple of the learning rate per step")
    seed: int = option(0, "of the first weights, the batches and the sample")


@dataclasses.dataclass(frozen=True)
class Run:
    """How it is run."""

    out: str = option("out/train_lm", "folder for the checkpoints and the picture")
    devices: int = option(8, "simulated CPU devices, a divisor of --batch and --eval-windows")
    mesh: str = option("data=-1", "axes pipe, data, fsdp and tensor, such as data=2,tensor=2")
    schedule: str = option("1f1b", "of a pipeline: gpipe, 1f1b or interleaved")
    micro_batches: int = option(4, "of a pipeline, of each device's windows")
    async_tp: bool = option(False, "tensor parallelism in collective matmuls, sequence split")
    minutes: float = option(3.0, "limit of the training; a slow machine does fewer steps in it")
    checkpoint_every: int = option(200, "steps between checkpoints, 1 or more; also at the end")
    resume: bool = option(False, "go on from the checkpoint in --out (else it is replaced)")
    stop_after: int = option(0, "step after which to stop as if interrupted, 0 for none")
    eval_windows: int = option(512, "held-out windows to measure the loss on")
    sample_bytes: int = option(400, "bytes to generate at the end")
    compare_seconds: float = option(30.0, "seconds of timing native against lax, 0 for none")


def learning_rate(config: Config, step: int, position: float) -> float:
    """Return the rate after a warmup by steps and a cosine decay by `position`."""
    warmup_steps = max(1, min(config.warmup_steps, config.steps // 4))
    decay = 0.525 + 0.475 * np.cos(np.pi * min(position / config.steps, 1.0))
    return config.learning_rate * min(step / warmup_steps, 1.0) * float(decay)


def next_byte_loss(axis_name: str | None, logits: jax.Array, batch: Any) -> Any:
    """Return the sum of the losses in nats, and how many they are."""
    losses = jaxcoll.vocab_parallel_cross_entropy(logits, batch[1], axis_name)
    return losses.sum(), losses.size


def window_losses(model: TransformerLM, variables: Any, windows: jax.Array) -> jax.Array:
    """Return the mean loss of each window in nats per byte: (B, T + 1) bytes to (B,)."""
    tokens = windows.astype(np.int32)
    logits = model.apply(variables, tokens[:, :-1])  # (B, T, 256)
    return jaxcoll.vocab_parallel_cross_entropy(logits, tokens[:, 1:], None).mean(axis=1)


def with_rates(step: Any, config: Config) -> Step:
    """Return a step that sets its learning rate, by its number and its position in the run."""

    def step_at(state: Any, batch: Any, number: int, position: float) -> tuple[Any, jax.Array]:
        rate = np.float32(learning_rate(config, number, position))
        inner = state.opt_state
        inner = inner._replace(hyperparams={**inner.hyperparams, "learning_rate": rate})
        state, metrics = step(dataclasses.replace(state, opt_state=inner), batch)
        return state, metrics["loss"]

    return step_at


def main() -> int:
    config, run = parse("Train a byte-level Transformer on Python's own source.", Config, Run)
    sizes = meshes.parse(run.mesh)
    # Before anything else uses JAX.
    jaxcoll.simulate_cpu_devices(meshes.num_devices(sizes, run.devices))
    jaxcoll.initialize()  # does nothing in a process that is alone
    checkpoints, losses = Checkpoints(pathlib.Path(run.out, "checkpoints"), keep=run.resume), []
    if resume := run.resume or checkpoints.are_of_this_job():
        saved, losses = checkpoints.latest_record()
        config = Config(**saved)
    full_length = config.steps >= Config.steps and run.minutes >= Run.minutes
    corpus = data.load_corpus()

    plan = jaxcoll.ParallelPlan(sizes, num_micro_batches=run.micro_batches, schedule=run.schedule)
    parts = math.prod(plan.mesh.shape[axis] for axis in plan.batch_axes)
    meshes.check_windows(parts, {"--batch": config.batch, "--eval-windows": run.eval_windows})
    whole = TransformerLM(256, config.num_layers, config.width, config.num_heads)
    axis = "tensor" if plan.mesh.shape.get("tensor", 1) > 1 else None
    # The same model, and the same parameters, with its layers split over the axis.
    model = whole.clone(
        axis_name=axis, mesh=plan.mesh, sequence_parallel=run.async_tp, overlap=run.async_tp
    )
    adamw = optax.inject_hyperparams(optax.adamw, static_args=("b2", "weight_decay"))
    optimizer = adamw(learning_rate=0.0, b2=0.98, weight_decay=config.weight_decay)

    def batch_of(step: int) -> tuple[jax.Array, jax.Array]:  # (B, T) each: inputs, labels
        shape = (config.batch, config.context + 1)
        windows = ft.partial(data.random_windows, corpus.training, shape, (config.seed, step))
        # Of a process that is one of several, its part alone is read.
        sharding = NamedSharding(plan.mesh, P(plan.batch_axes))
        make = ft.partial(jax.make_array_from_callback, (config.batch, config.context), sharding)
        parts = (slice(None, -1), slice(1, None))
        return tuple(make(lambda i, p=p: windows(i)[:, p].astype(np.int32)) for p in parts)

    state = plan.init(model, optimizer, jax.random.key(config.seed), batch_of(0))
    about = report.describe(state.params, config.batch, config.context, plan.mesh)
    say(corpus.describe(), about, sep="\n", flush=True)
    if resume:
        state = checkpoints.restore(len(losses), like=state)
    loss_fn = ft.partial(next_byte_loss, axis)
    step = with_rates(plan.build_train_step(loss_fn), config)
    state = train(step, state, losses, batch_of, config, run, checkpoints)
    if len(losses) == run.stop_after:
        say(f"stopped after step {len(losses)}; --resume goes on from there")
        return 0

    if len(losses) < config.steps:
        say(f"the limit of {run.minutes} minutes: {len(losses)} of {config.steps} steps")
    windows = data.even_windows(corpus.held_out, (run.eval_windows, config.context + 1))
    alone = None
    if set(sizes) == {"data"}:
        alone = with_rates(timing.without_sync(plan.mesh, model, loss_fn), config)
    inputs = (batch_of(0), len(losses), float(config.steps))
    # Of `whole`, on all devices.
    variables = {"params": jaxcoll.reshard(state.unpadded().params, P(), mesh=plan.mesh)}
    passed = report.finish(
        report.Result(
            losses=losses,
            held_out=evaluation.losses(
                ft.partial(window_losses, whole), variables, windows, plan.mesh, plan.batch_axes
            ),
            bigram=bigram.losses(bigram.fit(corpus.training), windows),
            sample=generate.generate(whole, variables, config.context, run.sample_bytes),
            comparison=timing.compare(step, alone, state, inputs, run.compare_seconds),
            tokens_per_step=config.batch * config.context,
            about=about,
        ),
        required_margin=REQUIRED_MARGIN,
        path=pathlib.Path(run.out, "train_lm.png"),
    )
    return 0 if passed or not full_length else 1


if __name__ == "__main__":
    sys.exit(main())

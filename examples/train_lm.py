"""Train a byte-level Transformer on Python's own source, in parallel over simulated devices.

    python examples/train_lm.py           # three to four minutes on two cores
    python examples/train_lm.py --help
    python examples/train_lm.py --mesh data=2,tensor=2 --async-tp
    jaxcoll run -n 2 --devices-per-process 4 examples/train_lm.py --mesh data=4,tensor=2

It needs `pip install 'jaxcoll[demo]'`. The part to copy is `make_train_step`: one `jax.shard_map`
whose gradients go through one `jaxcoll.all_reduce`; with a tensor axis, the model's layers
communicate as well. What isn't training is in `support/`.
"""

import dataclasses
import functools as ft
import pathlib
import sys
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
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
    mesh: str = option("data=-1", "axes data and tensor with their sizes, such as data=2,tensor=2")
    async_tp: bool = option(False, "tensor parallelism in collective matmuls, sequence split")
    minutes: float = option(3.0, "limit of the training; a slow machine does fewer steps in it")
    checkpoint_every: int = option(200, "steps between checkpoints, 1 or more; also at the end")
    resume: bool = option(False, "go on from the checkpoint in --out (else it is replaced)")
    stop_after: int = option(0, "step after which to stop as if interrupted, 0 for none")
    eval_windows: int = option(512, "held-out windows to measure the loss on")
    sample_bytes: int = option(400, "bytes to generate at the end")
    compare_seconds: float = option(30.0, "seconds of timing native against lax, 0 for none")


class TrainState(NamedTuple):
    params: Any
    opt_state: Any


def make_optimizer(config: Config, position: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Return AdamW with a warmup by steps and a cosine decay by `position`, 0 to `config.steps`."""
    warmup_steps = max(1, min(config.warmup_steps, config.steps // 4))
    warmup = optax.linear_schedule(0.0, 1.0, warmup_steps)
    decay = optax.cosine_decay_schedule(config.learning_rate, config.steps, alpha=0.05)
    adamw = optax.adamw(jnp.asarray(decay(position)), b2=0.98, weight_decay=config.weight_decay)
    return optax.chain(adamw, optax.scale_by_schedule(warmup))


def window_losses(model: TransformerLM, params: Any, windows: jax.Array) -> jax.Array:
    """Return the mean loss of each window in nats per byte: (B, T + 1) bytes to (B,)."""
    tokens = windows.astype(jnp.int32)
    logits = model.apply(params, tokens[:, :-1])  # (B, T, 256), or a rank's part of the 256
    losses = jaxcoll.vocab_parallel_cross_entropy(logits, tokens[:, 1:], model.axis_name)
    return losses.mean(axis=1)


def make_train_step(
    model: TransformerLM, config: Config, mesh: Mesh, specs: Any, *, sync: bool = True
) -> Step:
    """Return the jitted step; with `sync=False` each device trains alone, to time the rest."""

    def mean_loss(params: Any, windows: jax.Array) -> jax.Array:
        return window_losses(model, params, windows).mean()

    def train_step(state: TrainState, windows: jax.Array, position: jax.Array) -> tuple[Any, Any]:
        # Differentiate with respect to a per-device copy: for parameters that are typed as the
        # same on all devices JAX would sum the gradients by itself, and not through jaxcoll.
        params = jax.lax.pcast(state.params, "data", to="varying")
        loss, grads = jax.value_and_grad(mean_loss)(params, windows)
        if sync:
            loss, grads = jaxcoll.all_reduce((loss, grads), "data", op="mean")
        optimizer = make_optimizer(config, position)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss

    in_specs, out_specs = (specs, P("data"), P()), (specs, P())
    # Without the sync the results differ between devices, which check_vma would rightly refuse.
    mapped = jax.shard_map(
        train_step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=sync
    )
    return jax.jit(mapped, donate_argnums=0)


def main() -> int:
    config, run = parse("Train a byte-level Transformer on Python's own source.", Config, Run)
    sizes = meshes.parse(run.mesh)
    # Before anything else uses JAX.
    jaxcoll.simulate_cpu_devices(meshes.num_devices(sizes, run.devices))
    jaxcoll.initialize()  # does nothing in a process that is alone
    mesh = jaxcoll.make_mesh(sizes)
    checkpoints, losses = Checkpoints(pathlib.Path(run.out, "checkpoints"), keep=run.resume), []
    if resume := run.resume or checkpoints.are_of_this_job():
        saved, losses = checkpoints.latest_record()
        config = Config(**saved)
    full_length = config.steps >= Config.steps and run.minutes >= Run.minutes

    corpus = data.load_corpus()
    whole = TransformerLM(256, config.num_layers, config.width, config.num_heads)
    splits = mesh.shape["tensor"] > 1
    # The same model, and the same parameters, with its layers split over the axis.
    model = whole.clone(
        axis_name="tensor" if splits else None,
        mesh=mesh,
        sequence_parallel=run.async_tp,
        overlap=run.async_tp,
    )

    def init(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, config.context), jnp.int32))
        return TrainState(params, make_optimizer(config, 0).init(params))

    key = jax.random.key(config.seed)
    specs = nn.get_partition_spec(jax.eval_shape(init, key))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    state = jax.jit(lambda key: nn.unbox(init(key)), out_shardings=shardings)(key)
    about = report.describe(state.params, config.batch, config.context, mesh)
    say(corpus.describe(), about, sep="\n", flush=True)

    def batch_of(step: int) -> jax.Array:  # (B, T + 1)
        shape = (config.batch, config.context + 1)
        windows = ft.partial(data.random_windows, corpus.training, shape, (config.seed, step))
        # Of a process that is one of several, its part alone is read.
        return jax.make_array_from_callback(shape, NamedSharding(mesh, P("data")), windows)

    if resume:
        state = checkpoints.restore(len(losses), like=state)
    step = make_train_step(model, config, mesh, specs)
    state = train(step, state, losses, batch_of, config, run, checkpoints)
    if len(losses) == run.stop_after:
        say(f"stopped after step {len(losses)}; --resume goes on from there")
        return 0

    if len(losses) < config.steps:
        say(f"the limit of {run.minutes} minutes: {len(losses)} of {config.steps} steps")
    windows = data.even_windows(corpus.held_out, (run.eval_windows, config.context + 1))
    alone = None if splits else make_train_step(model, config, mesh, specs, sync=False)
    inputs = (batch_of(0), float(config.steps))
    params = jaxcoll.reshard(state.params, P(), mesh=mesh)  # of `whole`, on all devices
    passed = report.finish(
        report.Result(
            losses=losses,
            held_out=evaluation.losses(ft.partial(window_losses, whole), params, windows, mesh),
            bigram=bigram.losses(bigram.fit(corpus.training), windows),
            sample=generate.generate(whole, params, config.context, run.sample_bytes),
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

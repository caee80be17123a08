"""Products of data, fully sharded, tensor and pipeline parallelism; and pipelines alone.

    python benchmarks/plan_step.py [--rounds 7] [--processes 1,2] [--only plans,pipelines]

For each layout of devices, each product of axes of two ranks and a Transformer or two, in turn and
in one run: the step of a `ParallelPlan`, the same on lax, and `jax.jit` of the plain step on arrays
with the same shardings. AdamW, float32. Losses are compared. For pipelines see `pipelines.py`.
"""

import argparse
import itertools as it
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pipelines
import plan_report
from environment import environment
from shared import command, job, peak_bytes, save

AXES = ("pipe", "data", "fsdp", "tensor")
# Width, heads, layers, windows of a step, bytes of a window.
SMALL, LARGE = (160, 4, 4, 16, 128), (256, 4, 8, 16, 32)
# Processes, devices of each; models. To compile takes most of the time.
LAYOUTS = {(1, 4): (SMALL, LARGE), (1, 8): (SMALL,), (2, 1): (SMALL,), (2, 2): (SMALL,)}
WAYS = tuple(plan_report.WAYS)


def products(devices: int) -> list[dict[str, int]]:
    """Returns all products of axes of two ranks on so many devices."""
    count = devices.bit_length() - 1
    return [dict.fromkeys(names, 2) for names in it.combinations(AXES, count)]


def windows(of: Any) -> tuple[Any, Any]:
    import numpy as np

    *_, count, length = of
    tokens = np.random.default_rng(0).integers(0, 256, (count, length + 1), dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def planned(of: Any, axes: dict[str, int]) -> tuple[Any, Any, Any, Any]:
    """Returns a plan, its loss function, the state that all ways start from, and a batch."""
    import jax
    import optax

    import jaxcoll
    from jaxcoll.models import TransformerLM

    width, heads, layers, *_ = of
    plan = jaxcoll.ParallelPlan(axes)
    axis = "tensor" if "tensor" in axes else None
    model = TransformerLM(256, layers, width, num_heads=heads, axis_name=axis, mesh=plan.mesh)
    batch = plan.shard_batch(windows(of), batch_is_global=True)
    state = plan.init(model, optax.adamw(1e-3), jax.random.key(0), batch)

    def loss(logits: Any, batch: Any) -> Any:
        losses = jaxcoll.vocab_parallel_cross_entropy(logits, batch[1], axis)
        return losses.sum(), losses.size

    return plan, loss, state, batch


def by_gspmd(of: Any, mesh: Any, like: Any) -> tuple[Any, Any, Any]:
    """Returns the plain step on arrays with the shardings of a state, its state and its batch.

    The batch is split over stages, too: without that, each would compute all layers of it.
    """
    import jax
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxcoll.models import TransformerLM

    width, heads, layers, *_ = of
    like = like.unpadded()
    optimizer = like.optimizer
    model = TransformerLM(256, layers, width, num_heads=heads)
    shardings = jax.tree.map(
        lambda leaf: NamedSharding(mesh, leaf.sharding.spec), (like.params, like.opt_state)
    )
    of_batch = NamedSharding(mesh, P(tuple(axis for axis in mesh.axis_names if axis != "tensor")))
    batch = jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, of_batch, x.__getitem__), windows(of)
    )

    def train_step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def loss(params: Any) -> Any:
            logits = model.apply({"params": params}, batch[0])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    step = jax.jit(
        train_step,
        in_shardings=(shardings, of_batch),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return step, (like.params, like.opt_state), batch


def measure(of: Any, axes: dict[str, int], rounds: int) -> dict[str, Any]:
    """Measures all ways of a plan on all devices of this job."""
    import jax

    import jaxcoll

    plan, loss, first, batch = planned(of, axes)
    steps, peaks = {}, {}
    for way in WAYS:
        state = jax.tree.map(lambda leaf: leaf.copy(), first)  # which a step is given for good
        step = plan.build_train_step(loss)
        if way == "GSPMD":
            step, state, batch = by_gspmd(of, plan.mesh, state)
        with jaxcoll.using(backend="lax" if way == "lax" else "auto"):
            compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        peaks[way], steps[way] = peak_bytes(compiled), (compiled, state, batch)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses = {}
    for number in range(rounds + 2):
        for way in WAYS[:: 1 if number % 2 else -1]:
            step, state, batch = steps[way]
            begin = time.perf_counter()
            state, metrics = jax.block_until_ready(step(state, batch))
            if number > 1:  # warm
                seconds[way].append(time.perf_counter() - begin)
            steps[way], losses[way] = (step, state, batch), float(metrics["loss"])
    better = [min(pair) for pair in zip(seconds["lax"], seconds["GSPMD"], strict=True)]

    def over_ours(times: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(times, seconds["auto"], strict=True))

    return {
        "axes": axes,
        "model": list(of),
        "ms": {way: 1e3 * statistics.median(times) for way, times in seconds.items()},
        "ratio": {"lax": over_ours(seconds["lax"]), "better": over_ours(better)},
        "peak bytes": peaks,
        "losses": losses,
        "equal": max(losses.values()) - min(losses.values()) < 2e-3,
    }


def child(part: str, rounds: int) -> None:
    if part == "pipelines":  # read by XLA when it starts: each process has a core, for one thread
        os.environ["PJRT_NPROC"] = "1"
    import jax

    if part == "pipelines":
        rows = pipelines.measure(rounds)
    else:
        layout = jax.process_count(), jax.local_device_count()
        chosen = it.product(LAYOUTS[layout], products(jax.device_count()))
        rows = (measure(of, axes, rounds) for of, axes in chosen)
    for row in rows:
        if jax.process_index() == 0:
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", default="1,2", help="layouts of so many alone")
    parser.add_argument("--only", default="plans,pipelines")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child is not None:
        child(chosen.child, chosen.rounds)
        return
    result: dict[str, Any] = {
        "command": command(),
        "environment": environment(),
        "rounds": chosen.rounds,
        "plans": [],
        "pipelines": [],
    }
    if "pipelines" in chosen.only:  # first: it takes less time
        options = ("--child", "pipelines", "--rounds", chosen.rounds)
        result["pipelines"] = job(__file__, pipelines.RANKS, 1, *options)
    for processes, devices in LAYOUTS if "plans" in chosen.only else ():
        if processes in map(int, chosen.processes.split(",")):
            rows = job(__file__, processes, devices, "--child", "plans", "--rounds", chosen.rounds)
            where = {"processes": processes, "devices": devices}
            result["plans"] += [{**where, **row} for row in rows]
    plan_report.draw(result, save("plan", result, plan_report.markdown(result), chosen.out))
    if not all(row["equal"] for row in (*result["plans"], *result["pipelines"])):
        sys.exit("losses differ")


if __name__ == "__main__":
    main()

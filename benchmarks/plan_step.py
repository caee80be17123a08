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
import sys
from pathlib import Path
from typing import Any

import pipelines
import plan_report
from environment import environment
from shared import command, job, save
from three_ways import ACCUMULATED, WAYS, by_gspmd, compare, placed, windows

AXES = ("pipe", "data", "fsdp", "tensor")
MICRO_BATCHES = 4  # of pipelines
# Width, heads, layers, windows of a step, bytes of a window.
SMALL, LARGE = (160, 4, 4, 16, 128), (256, 4, 8, 16, 32)
# A quarter of the tokens, between processes: of a large step nearly all is computing.
FEWER_TOKENS = (160, 4, 4, 8, 64)
# Processes, devices of each; models. To compile takes most of the time.
LAYOUTS = {
    (1, 2): (SMALL, LARGE),
    (1, 4): (SMALL, LARGE),
    (1, 8): (SMALL,),
    (2, 1): (SMALL, LARGE, FEWER_TOKENS),
    (2, 2): (SMALL, LARGE, FEWER_TOKENS),
}


def products(devices: int) -> list[tuple[dict[str, int], str]]:
    """Returns all products of axes of two ranks, and schedules: of a pipeline alone all three."""
    count = devices.bit_length() - 1
    return [
        (dict.fromkeys(names, 2), schedule)
        for names in it.combinations(AXES, count)
        for schedule in (pipelines.SCHEDULES if names == ("pipe",) else ("1f1b",))
    ]


def measure(of: Any, axes: dict[str, int], schedule: Any, rounds: int) -> dict[str, Any]:
    """Measures all ways of a plan on all devices of this job."""
    import jax
    import optax
    from jax.sharding import NamedSharding

    import jaxcoll
    from jaxcoll.models import TransformerLM

    width, heads, layers, *_ = of
    plan = jaxcoll.ParallelPlan(axes, num_micro_batches=MICRO_BATCHES, schedule=schedule)
    axis = "tensor" if "tensor" in axes else None
    model = TransformerLM(256, layers, width, num_heads=heads, axis_name=axis, mesh=plan.mesh)
    batch = plan.shard_batch(windows(of), batch_is_global=True)
    first = plan.init(model, optax.adamw(1e-3), jax.random.key(0), batch)

    def loss(logits: Any, batch: Any) -> Any:
        losses = jaxcoll.vocab_parallel_cross_entropy(logits, batch[1], axis)
        return losses.sum(), losses.size

    def make(way: str) -> tuple[Any, Any, Any]:
        step = plan.build_train_step(loss)
        state = jax.tree.map(lambda leaf: leaf.copy(), first)  # which a step is given for good
        if way not in ("GSPMD", ACCUMULATED):
            return jax.jit(step, donate_argnums=0), state, batch
        # The batch is split over stages, too: without that, each would compute all layers of it.
        split = jax.P(tuple(name for name in plan.mesh.axis_names if name != "tensor"))
        plain = TransformerLM(256, layers, width, num_heads=heads)
        arrays = placed(windows(of), NamedSharding(plan.mesh, split))
        return by_gspmd(plain, state, arrays, MICRO_BATCHES if way == ACCUMULATED else 1)

    ways, bubble = tuple(WAYS), 0.0
    if "pipe" in axes:
        # As few windows as devices would leave some of these without any.
        if of[3] // MICRO_BATCHES >= plan.mesh.size // axes.get("tensor", 1):
            ways += (ACCUMULATED,)
        if jax.process_count() > 1:  # elsewhere another stage has the core meanwhile
            bubble = jaxcoll.PipelineSchedule(schedule, axes["pipe"]).bubble(MICRO_BATCHES)
    about = {"axes": axes, "schedule": schedule, "model": list(of)}
    return {**about, **compare(make, rounds, ways, bubble)}


def child(part: str, rounds: int) -> None:
    if part == "pipelines":  # read by XLA when it starts: each process has a core, for one thread
        os.environ["PJRT_NPROC"] = "1"
    import jax

    if part == "pipelines":
        rows = pipelines.measure(rounds)
    else:
        layout = jax.process_count(), jax.local_device_count()
        chosen = it.product(LAYOUTS[layout], products(jax.device_count()))
        rows = (measure(of, *product, rounds) for of, product in chosen)
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
    about = {"command": command(), "environment": environment(), "rounds": chosen.rounds}
    found: dict[str, list[Any]] = {}
    if "pipelines" in chosen.only:  # first: it takes less time
        options = ("--child", "pipelines", "--rounds", chosen.rounds)
        found["pipelines"] = job(__file__, pipelines.RANKS, 1, *options)
    for processes, devices in LAYOUTS if "plans" in chosen.only else ():
        if processes in map(int, chosen.processes.split(",")):
            rows = job(__file__, processes, devices, "--child", "plans", "--rounds", chosen.rounds)
            where = {"processes": processes, "devices": devices}
            found.setdefault("plan", []).extend({**where, **row} for row in rows)
    for name, rows in found.items():
        result = {**about, "rows": rows}
        path = save(name, result, plan_report.PAGES[name](result), chosen.out)
        plan_report.PICTURES[name](result, path)
    if not all(row["equal"] for rows in found.values() for row in rows):
        sys.exit("losses differ")


if __name__ == "__main__":
    main()

"""Data-parallel and fully sharded training steps of a Transformer: ours, on `jax.lax`, by GSPMD.

    python benchmarks/zero_step.py [--rounds 15] [--processes 1,2,4]

For each layout of devices, each strategy and each model, in turn and in one run: our step, the same
step on lax, and `jax.jit` of the plain step on arrays with the same shardings; of data parallelism
also ours in buckets. AdamW, float32. Losses are compared.
"""

import argparse
import itertools as it
import json
import sys
from pathlib import Path
from typing import Any

import zero_report
from environment import environment
from shared import command, job, save
from three_ways import WAYS, by_gspmd, compare, placed, windows
from zero_report import BUCKET_BYTES, BUCKETS

# Processes, devices of each, axes; parts of a state are over "shard", copies of them over "data".
LAYOUTS = (
    (1, 2, {"shard": 2}),
    (1, 4, {"shard": 4}),
    (1, 8, {"shard": 8}),
    (1, 4, {"data": 2, "shard": 2}),
    (2, 1, {"shard": 2}),
    (2, 2, {"data": 2, "shard": 2}),
    (4, 1, {"shard": 4}),
)
# Width, heads, layers, windows of a step, bytes of a window; the first is train_lm.py's.
MODELS = ((160, 4, 3, 16, 128), (256, 4, 6, 16, 32))
# Between processes also train_lm.py's with --batch 4: of a large step nearly all is computing.
FEWER_TOKENS = (160, 4, 3, 4, 128)
STRATEGIES = {
    "data-parallel": {},
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {"stage": 3},
    "ZeRO-3, a layer ahead": {"stage": 3, "prefetch": 1},
    "ZeRO-3, kept": {"stage": 3, "reshard_after_forward": False},
}


def ours(model: Any, mesh: Any, batch: Any, strategy: Any) -> tuple[Any, Any]:
    """Returns a jitted step and its state."""
    import jax
    import optax
    from jax.sharding import PartitionSpec as P

    import jaxcoll

    is_split = "stage" in strategy
    sharded = jaxcoll.fully_shard(model, "shard", **strategy) if is_split else model
    state = jaxcoll.create_train_state(sharded, optax.adamw(1e-3), jax.random.key(0), batch, mesh)
    axes = tuple(mesh.axis_names)
    options = {} if is_split else strategy
    step = jaxcoll.data_parallel_train_step(sharded, axis_name=axes, **options)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(state.specs, P(axes)), out_specs=(state.specs, P())
    )
    return jax.jit(mapped, donate_argnums=0), state


def measure(of: Any, axes: dict[str, int], strategy: Any, rounds: int) -> dict[str, Any]:
    """Measures all ways of a strategy on all devices of this job."""
    import jax
    from jax.sharding import NamedSharding

    import jaxcoll
    from jaxcoll.models import TransformerLM

    width, heads, layers, *_ = of
    mesh = jaxcoll.make_mesh(axes)
    model = TransformerLM(256, layers, width, num_heads=heads)
    batch = placed(windows(of), NamedSharding(mesh, jax.P(tuple(axes))))

    def make(way: str) -> tuple[Any, Any, Any]:
        calls = {"bucket_bytes": BUCKET_BYTES} if way == BUCKETS else {}
        step, state = ours(model, mesh, batch, {**strategy, **calls})
        return by_gspmd(model, state, batch) if way == "GSPMD" else (step, state, batch)

    ways = list(WAYS) if "stage" in strategy else [*WAYS, BUCKETS]
    return {"model": list(of), **compare(make, rounds, ways)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", default="1,2,4", help="layouts of so many alone")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child is not None:
        import jax

        processes, _, axes = LAYOUTS[chosen.child]
        models = MODELS if processes == 1 else (*MODELS, FEWER_TOKENS)
        for of, (name, strategy) in it.product(models, STRATEGIES.items()):
            row = measure(of, axes, strategy, chosen.rounds)
            if jax.process_index() == 0:
                print(json.dumps({"axes": axes, "strategy": name, **row}), flush=True)
        return
    of = environment()
    rows = [
        {"processes": processes, "devices": devices, **row}
        for number, (processes, devices, _) in enumerate(LAYOUTS)
        if processes in map(int, chosen.processes.split(","))
        for row in job(__file__, processes, devices, "--child", number, "--rounds", chosen.rounds)
    ]
    result = {
        "command": command(),
        "environment": of,
        "rounds": chosen.rounds,
        "rows": rows,
    }
    picture = save("zero", result, zero_report.markdown(result), chosen.out)
    zero_report.draw(result, picture)
    if not all(row["equal"] for row in rows):
        sys.exit("losses differ")


if __name__ == "__main__":
    main()

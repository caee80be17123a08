"""A data-parallel training step of a small Transformer across processes, ours beside lax's.

    python benchmarks/train_step.py [--processes 2,4] [--jobs 3]

And beside the same step without communication, *alone*, whose time no library can undercut. It is a
part of processes.py as well.
"""

import argparse
import functools as ft
import json
import statistics
from pathlib import Path
from typing import Any

from environment import environment
from paired_rounds import measure
from process_report import pooled, step_lines
from shared import command, head, job, save

# Seconds of the whole measurement are so many times those of a call's.
BUDGETS = 4
LEAST_ROUNDS = 10


def run(budget_s: float) -> list[dict[str, Any]]:
    """Measures the step each way, in turn; one row."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxcoll
    from jaxcoll.models import TransformerLM

    p = jax.device_count()
    mesh = jax.make_mesh((p,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = TransformerLM(256, 3, 160, 4)
    batch, context = 8, 128
    optimizer = optax.adamw(1e-3)

    def loss(params: Any, tokens: Any) -> Any:
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(backend: Any) -> Any:
        communicates = backend is not None

        def train_step(params: Any, opt_state: Any, tokens: Any) -> Any:
            local = jax.lax.pcast(params, "data", to="varying") if communicates else params
            value, grads = jax.value_and_grad(loss)(local, tokens)
            if communicates:
                both = (value, grads)
                value, grads = jaxcoll.all_reduce(both, "data", op="mean", backend=backend)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        specs = jax.P()
        mapped = jax.shard_map(
            train_step, mesh=mesh, in_specs=(specs, specs, jax.P("data")), out_specs=specs,
            check_vma=communicates,  # alone, results differ
        )  # fmt: skip
        return jax.jit(mapped)

    replicated = jax.NamedSharding(mesh, jax.P())
    init = jax.jit(
        lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32)), out_shardings=replicated
    )
    params = init(jax.random.key(0))
    opt_state = jax.jit(optimizer.init, out_shardings=replicated)(params)
    shape = (batch * p, context + 1)
    tokens = np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    tokens = jax.make_array_from_callback(shape, sharding, tokens.__getitem__)

    steps = {
        name: ft.partial(step(backend), params, opt_state, tokens)
        for name, backend in (("native", "native"), ("lax", "lax"), ("alone", None))
    }
    losses = {name: float(jax.block_until_ready(steps[name]())[2]) for name in ("native", "lax")}
    meet = jax.jit(
        jax.shard_map(
            lambda: jaxcoll.all_reduce(jnp.ones(1), "data"),
            mesh=mesh,
            in_specs=(),
            out_specs=jax.P(),
            check_vma=False,
        )
    )
    made = {name: [function] for name, function in steps.items()}
    measured = measure(made, meet, BUDGETS * budget_s, LEAST_ROUNDS)
    seconds = {name: of[0] for name, of in measured.items()}

    def over(one: str, other: str) -> float:
        pairs = zip(seconds[one], seconds[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    return [
        {
            "processes": p,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "tokens_per_step": batch * p * context,
            **{f"{name}_ms": round(statistics.median(t) * 1e3, 2) for name, t in seconds.items()},
            "lax_over_native": over("lax", "native"),
            "lax_over_alone": over("lax", "alone"),
            "rounds": len(seconds["native"]),
            "losses": losses,
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", default="2,4", help="numbers of processes")
    parser.add_argument("--jobs", type=int, default=3, help="jobs, of which rows are medians")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of a call's measurement")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        import jax

        import jaxcoll

        jaxcoll.initialize()
        jaxcoll.accelerate_lax(False)
        for row in run(chosen.budget):
            if jax.process_index() == 0:
                print(json.dumps(row), flush=True)
        return
    result: dict[str, Any] = {"command": command(), "environment": environment()}
    arguments = ("--child", "--budget", chosen.budget)
    result["train_step"] = [
        row
        for n in map(int, chosen.processes.split(","))
        for row in pooled([job(__file__, n, 1, *arguments) for _ in range(chosen.jobs)])
    ]
    title = "A data-parallel training step: jaxcoll, and jax.lax on Gloo"
    page = [*head(title, result), "One device a process; medians of jobs.", ""]
    save(
        "train-step",
        result,
        "\n".join([*page, *step_lines(result["train_step"])]) + "\n",
        chosen.out,
    )


if __name__ == "__main__":
    main()

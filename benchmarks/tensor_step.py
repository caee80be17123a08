"""A tensor-parallel training step of a Transformer, ours beside the same step on `jax.lax`.

    python benchmarks/tensor_step.py [--rounds 15] [--processes 1,2,4]

For each layout of devices and each model, in turn and in one run: the sums of whole activations
("sums"), the sequence split between the layers ("sequence"), and that in collective matmuls
("async"), each on jaxcoll and on lax. Losses are compared with those of one device.
"""

import argparse
import itertools as it
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from environment import environment
from shared import command, head, job, save

# Processes, devices of each, axes with their sizes; the first axis is the one across processes.
LAYOUTS = (
    (1, 2, {"data": 1, "tensor": 2}),
    (1, 4, {"data": 2, "tensor": 2}),
    (2, 1, {"data": 1, "tensor": 2}),
    (2, 2, {"data": 2, "tensor": 2}),
    (2, 2, {"tensor": 2, "data": 2}),
    (4, 1, {"data": 2, "tensor": 2}),
)
# Width, heads, layers, windows of a step, bytes of a window; the first is train_lm.py's.
MODELS = ((160, 4, 3, 16, 128), (64, 4, 6, 8, 64))
FORMS = {
    "sums": {},
    "sequence": {"sequence_parallel": True},
    "async": {"sequence_parallel": True, "overlap": True},
}
BACKENDS: tuple[Literal["auto", "lax"], ...] = ("auto", "lax")


def variant(of: Sequence[int], axes: dict[str, int], form: str) -> Any:
    """Returns a jitted step, `(params, tokens) -> (params, loss)`, with its operands."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxcoll
    from jaxcoll.models import TransformerLM

    width, heads, layers, batch, length = of
    mesh = jaxcoll.make_mesh(axes)
    options: dict[str, Any] = FORMS[form]
    model = TransformerLM(
        256, layers, width, num_heads=heads, axis_name="tensor", mesh=mesh, **options
    )
    key = jax.random.key(0)

    def init(key: Any) -> Any:
        return model.init(key, jnp.zeros((1, length), jnp.int32))

    specs = nn.get_partition_spec(jax.eval_shape(init, key))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.jit(lambda key: nn.unbox(init(key)), out_shardings=shardings)(key)

    def step(params: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = model.apply(params, tokens[:, :-1])
            return jaxcoll.vocab_parallel_cross_entropy(logits, tokens[:, 1:]).mean()

        local = jax.lax.pcast(params, "data", to="varying")
        value, grads = jaxcoll.all_reduce(jax.value_and_grad(loss)(local), "data", op="mean")
        return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, grads), value

    shape = (batch, length + 1)
    tokens = np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)
    sharding = NamedSharding(mesh, P("data"))
    placed = jax.make_array_from_callback(shape, sharding, tokens.__getitem__)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
    return jax.jit(mapped), params, placed


def measure(of: Sequence[int], axes: dict[str, int], rounds: int) -> dict[str, Any]:
    """Measures all forms on all devices of this job."""
    import jax

    import jaxcoll

    variants = {(form, backend): variant(of, axes, form) for form in FORMS for backend in BACKENDS}
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in variants}
    losses = {}
    for number in range(rounds + 2):
        order = list(variants)[:: 1 if number % 2 else -1]
        for name in order:
            step, params, tokens = variants[name]
            with jaxcoll.using(backend=name[1]):
                begin = time.perf_counter()
                params, loss = jax.block_until_ready(step(params, tokens))
                if number > 1:  # compiled, and warm
                    seconds[name].append(time.perf_counter() - begin)
            variants[name] = (step, params, tokens)
            losses[name] = float(loss)
    best = [min(times) for times in zip(*(seconds[form, "lax"] for form in FORMS), strict=True)]

    def ratio(of_lax: list[float], of_ours: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(of_lax, of_ours, strict=True))

    return {
        "model": list(of),
        "ms": {f"{f} {b}": 1e3 * statistics.median(seconds[f, b]) for f, b in variants},
        "same form": {f: ratio(seconds[f, "lax"], seconds[f, "auto"]) for f in FORMS},
        "lax's best form": {f: ratio(best, seconds[f, "auto"]) for f in FORMS},
        "losses": [losses[name] for name in variants],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| processes x devices | mesh | width x layers, tokens | form | ours, ms | lax, ms "
        "| same form | lax's best form | losses |",
        "|---|---|---|---|--:|--:|--:|--:|---|",
    ]
    for row, form in it.product(rows, FORMS):
        width, _, layers, batch, length = row["model"]
        mesh = ", ".join(f"{name} {size}" for name, size in row["axes"].items())
        ours, lax = (row["ms"][f"{form} {backend}"] for backend in BACKENDS)
        same, best = row["same form"][form], row["lax's best form"][form]
        lines.append(
            f"| {row['processes']} x {row['devices']} | {mesh} | {width} x {layers}, "
            f"{batch * length} | {form} | {ours:.1f} | {lax:.1f} | {same:.2f} | "
            f"{best:.2f} | {'equal' if row['equal'] else 'DIFFERENT'} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", default="1,2,4", help="layouts of so many alone")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child is not None:
        import jax

        for of in MODELS:
            row = measure(of, LAYOUTS[chosen.child][2], chosen.rounds)
            if jax.process_index() == 0:
                print(json.dumps(row), flush=True)
        return
    of = environment()
    rows = [
        {"processes": processes, "devices": devices, "axes": axes, **row}
        for number, (processes, devices, axes) in enumerate(LAYOUTS)
        if processes in map(int, chosen.processes.split(","))
        for row in job(__file__, processes, devices, "--child", number, "--rounds", chosen.rounds)
    ]
    for row in rows:
        same = [r["losses"][0] for r in rows if r["model"] == row["model"]]
        row["equal"] = all(abs(loss - same[0]) < 1e-3 for loss in (*row["losses"], *same))
    result = {"command": command(), "environment": of, "rows": rows}
    lines = [
        *head("Tensor-parallel training steps", result),
        "`TransformerLM` in float32, plain SGD. Medians of the time of a step; ratios are medians "
        f"of those of {chosen.rounds} rounds: lax's time with the same form, and with the fastest "
        "of its forms, over ours; above 1 ours is faster. *sums*: whole activations are summed. "
        "*sequence*: the sequence is split between the layers. *async*: that in collective "
        "matmuls, on lax across processes a ring of `ppermute`s. The loss after all steps is "
        "compared, to 0.001, between all forms and layouts.",
        "",
        *table(rows),
    ]
    save("tensor", result, "\n".join(lines) + "\n", chosen.out)
    if not all(row["equal"] for row in rows):
        sys.exit("losses differ")


if __name__ == "__main__":
    main()

"""A data-parallel training step of a small Transformer across processes, ours beside lax's."""

import statistics
import time
from typing import Any


def run(budget_s: float) -> list[dict[str, Any]]:
    """Measures the step with each backend, in turn; one row."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.experimental import multihost_utils

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
        def train_step(params: Any, opt_state: Any, tokens: Any) -> Any:
            local = jax.lax.pcast(params, "data", to="varying")
            value, grads = jax.value_and_grad(loss)(local, tokens)
            value, grads = jaxcoll.all_reduce((value, grads), "data", op="mean", backend=backend)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        specs = jax.P()
        mapped = jax.shard_map(
            train_step, mesh=mesh, in_specs=(specs, specs, jax.P("data")), out_specs=specs
        )
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

    steps = {"native": step("native"), "lax": step("lax")}
    losses = {}
    for name, function in steps.items():
        for _ in range(2):
            losses[name] = float(jax.block_until_ready(function(params, opt_state, tokens))[2])
    begin = time.perf_counter()
    for function in steps.values():
        jax.block_until_ready(function(params, opt_state, tokens))
    wanted = np.int32(min(60, max(5, 4 * budget_s / (time.perf_counter() - begin))))
    rounds = int(multihost_utils.broadcast_one_to_all(wanted))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(rounds):
        for name in list(steps)[:: 1 if done % 2 else -1]:
            start = time.perf_counter()
            jax.block_until_ready(steps[name](params, opt_state, tokens))
            seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["lax"], seconds["native"], strict=True)]
    return [
        {
            "processes": p,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "tokens_per_step": batch * p * context,
            **{f"{name}_ms": round(statistics.median(t) * 1e3, 2) for name, t in seconds.items()},
            "lax_over_native": round(statistics.median(ratios), 3),
            "rounds": rounds,
            "losses": losses,
        }
    ]

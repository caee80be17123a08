"""The gradients of a small Transformer: 73 leaves, 40 MB a device, mean, donated."""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll._timing import measure

AXIS = "ranks"
# Twelve blocks of two matrices and four vectors, and an embedding: 10.0 million values.
SHAPES = [
    *((411, 1536), (411, 512), (512,), (1536,), (512,), (512,)) * 12,
    (822 - 392, 512),
]


def _program(kind: str, mesh: Any) -> Any:
    def step(grads: Any) -> Any:
        if kind == "lax":
            grads = jax.tree.map(lambda g: lax.pmean(g, AXIS), grads)
        elif kind != "nothing":
            grads = jaxcoll.all_reduce(grads, AXIS, op="mean", backend=kind)
        return jax.tree.map(lambda g: g * 1.0001, grads)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def run(num_devices: int, rounds: int) -> list[dict[str, Any]]:
    """Measures the sync of one gradient tree; `nothing` is the program without it.

    `nothing` reads and writes the tree once, as an ideal sync does: its time is the memory bound.
    """
    mesh = jax.make_mesh((num_devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P(AXIS))

    def fresh() -> list[Any]:
        rng = np.random.default_rng(0)
        return [
            jax.device_put(
                rng.integers(-8, 8, (num_devices * s[0], *s[1:])).astype(np.float32), sharding
            )
            for s in SHAPES
        ]

    kinds = ("nothing", "native", "auto", "lax")
    programs = {kind: _program(kind, mesh) for kind in kinds}
    results = {kind: programs[kind](fresh()) for kind in ("native", "auto", "lax")}
    wrong = sum(
        int((jnp.abs(a - b) > 1e-6).sum())
        for kind in ("native", "auto")
        for a, b in zip(results[kind], results["lax"], strict=True)
    )
    del results
    state = {kind: fresh() for kind in kinds}

    def step(kind: str) -> Any:
        state[kind] = programs[kind](state[kind])
        return state[kind]

    t = measure({kind: (lambda kind=kind: step(kind)) for kind in kinds}, rounds, budget_s=12)
    rest = t.seconds["nothing"]
    own = {
        kind: [total - without for total, without in zip(t.seconds[kind], rest, strict=True)]
        for kind in ("native", "auto", "lax")
    }
    own_ms = {kind: statistics.median(values) * 1e3 for kind, values in own.items()}
    return [
        {
            "devices": num_devices,
            "leaves": len(SHAPES),
            "megabytes_per_device": round(sum(int(np.prod(s)) for s in SHAPES) * 4 / 1e6, 1),
            "wrong": wrong,
            **{f"{kind}_ms": round(t.median_us(kind) / 1e3, 2) for kind in kinds},
            **{f"{kind}_own_ms": round(ms, 2) for kind, ms in own_ms.items()},
            "lax_over_native_own": round(own_ms["lax"] / max(own_ms["native"], 1e-6), 2),
            "native_own_over_memory_bound": round(
                own_ms["native"] / (statistics.median(rest) * 1e3), 2
            ),
            "rounds": len(rest),
        }
    ]

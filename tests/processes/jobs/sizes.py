"""Sizes that break loops: nothing, one, odd, around a window's rounds, several windows."""

import numpy as np
from helpers import BY_NAME
from world import assert_blocks, mapped, mesh, put, say

import jaxcoll
from jaxcoll import _engine

OPS = ("all_reduce_sum", "reduce_scatter_sum_0", "all_gather_0", "all_to_all_0_2", "ppermute_ring")


def main() -> None:
    over = mesh()
    size = over.size
    window = _engine.window_bytes()
    around = [n // 4 for n in (64 << 10, window // 4, window, 3 * window)]
    counts = [0, 1, 7, 1023, *(n + step for n in around for step in (-1, 0, 1))]
    counts += [(4 << 20) // 4 + 5, (16 << 20) // 4 - 1]
    rng = np.random.default_rng(0)
    backend = "lax" if jaxcoll.config.backend == "lax" else "native"
    for name in (*OPS, "broadcast_last"):
        op = BY_NAME[name]
        for count in counts:
            per_rank = count // size if name.startswith(("reduce_scatter", "all_to_all")) else count
            shape = {
                "reduce_scatter_sum_0": (size, per_rank),
                "all_to_all_0_2": (size, per_rank, 1),
            }.get(name, (count,))
            xs = rng.integers(-9, 9, (size, *shape)).astype(np.float32)
            with jaxcoll.using(backend=backend):
                ys = mapped(op.over(over.axis_names)["ours"], over)(put(xs, over))
            assert_blocks(ys, op.reference(xs), f"{name} of {shape}")
    say("all sizes are right")


main()

"""Collectives without end, and with all that surrounds them: new programs, new memory.

Ours, or XLA's where the job was started with --accelerate and JAXCOLL_BACKEND=lax.
"""

import itertools as it

import jax
import numpy as np
from world import mapped, mesh, put, say

import jaxcoll

AXES = mesh().axis_names
RING = [(i, (i + 1) % mesh().size) for i in range(mesh().size)]


def main() -> None:
    if jaxcoll.config.backend != "lax":
        jaxcoll.config.backend = "native"  # in Gloo the others would wait for who is dead
    small = put(np.ones((mesh().size, 9), np.float32), mesh())
    large = put(np.ones((mesh().size, 1 << 20), np.float32), mesh())
    steps = [
        mapped(lambda x: jaxcoll.all_reduce(x, AXES, op="mean"), mesh()),
        mapped(lambda x: jaxcoll.ppermute(x, AXES, RING), mesh()),
    ]
    say("begins")
    for round_ in it.count():
        for step in steps:
            for _ in range(20):
                small, large = step(small), step(large)
        new = mapped(lambda x, by=round_: jaxcoll.all_reduce(x + by, AXES), mesh())
        jax.block_until_ready((new(small), large))
        if round_ % 3 == 2:
            jaxcoll.reset()


main()

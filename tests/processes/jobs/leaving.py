"""Process 1 ends while its last step, which nobody awaits, computes: leaving.py SECONDS.

It comes to its call so late that it could be taken for one that never will.
"""

import sys
import time

import jax
import numpy as np
from jax import lax
from world import mapped, mesh, put, say

import jaxcoll

SECONDS = float(sys.argv[1])
AXES = mesh().axis_names


def computed(x, turns):
    return lax.fori_loop(0, turns, lambda _, y: jax.numpy.sin(y) + 1e-9, x)


def late(x, turns):
    is_first = lax.axis_index(AXES) == 0
    return jaxcoll.all_reduce(computed(x, lax.select(is_first, 0, turns[0])), AXES)


def blocks(turns):
    return put(np.full((mesh().size, 1), turns, np.int32), mesh())


ones = put(np.ones((mesh().size, 1 << 16), np.float32), mesh())
step, compute = mapped(late, mesh()), jax.jit(computed)
jax.block_until_ready(step(ones, blocks(1)))
local = ones.addressable_shards[0].data
jax.block_until_ready(compute(local, 1))
begin = time.monotonic()
jax.block_until_ready(compute(local, 200))
each_s = (time.monotonic() - begin) / 200
turns = int(SECONDS / each_s)


def last_step():
    begin = time.monotonic()
    results = step(ones, blocks(turns))
    if jax.process_index() == 0:
        jax.block_until_ready(results)
        say(f"after {time.monotonic() - begin:.1f} s")


last_step()
say("the end")

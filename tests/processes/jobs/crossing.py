"""Callbacks of two devices, one in each process, take long: crossing.py SECONDS.

In one group process 0 waits for process 1, in the other one it is the other way round.
"""

import sys
import time

import jax
import numpy as np
from world import assert_blocks, mapped, mesh, put, say

import jaxcoll

SECONDS = float(sys.argv[1])


def late(p, d):
    if p != d:
        time.sleep(SECONDS)
    return np.float32(0)


def total(x):
    p, d = jax.lax.axis_index("p"), jax.lax.axis_index("d")
    x = x + jax.pure_callback(late, jax.ShapeDtypeStruct((), np.float32), p, d)
    return jaxcoll.all_reduce(x, "p")


ones = np.ones((mesh().size, 8), np.float32)
result = mapped(total, mesh())(put(ones, mesh()))
assert_blocks(result, 2 * ones, "sums")
say("the sums are right")

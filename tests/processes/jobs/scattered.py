"""reduce_scatter of large chunks on lax, many times: scattered.py RUNS BYTES_OF_A_CHUNK.

Gloo's own is wrong at times (jax#40830), so that ours sums and slices.
"""

import sys

import jax
import numpy as np
from world import assert_blocks, mapped, mesh, put, say

import jaxcoll

RUNS, CHUNK = map(int, sys.argv[1:])
AXES = mesh().axis_names

size = mesh().size
places = np.arange(size * size, dtype=np.float32).reshape(size, size, 1)
xs = places + np.arange(CHUNK // 4, dtype=np.float32) % 7
expected = xs.sum(axis=0)
x = put(xs, mesh())
program = mapped(lambda x: jaxcoll.reduce_scatter(x, AXES), mesh())
(row,) = jaxcoll.explain(program, x).rows
assert row.path == "lax", row
for run in range(RUNS):
    assert_blocks(jax.block_until_ready(program(x)), expected, f"run {run}")
say("all runs are right")

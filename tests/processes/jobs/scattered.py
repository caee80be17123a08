"""reduce_scatter of large chunks, many times, on lax or over two hosts, which build on Gloo.

    scattered.py RUNS BYTES_OF_A_CHUNK PATH

Gloo's own is wrong at times (jax#40830), so that ours sums and slices. PATH is what `explain` says.
"""

import sys

import jax
import numpy as np
from world import assert_blocks, mapped, mesh, on_two_hosts, put, say

import jaxcoll

RUNS, CHUNK = map(int, sys.argv[1:3])
AXES = mesh().axis_names

if sys.argv[3] == "two-level":
    on_two_hosts()

size = mesh().size
places = np.arange(size * size, dtype=np.float32).reshape(size, size, 1)
xs = places + np.arange(CHUNK // 4, dtype=np.float32) % 7
expected = xs.sum(axis=0)
x = put(xs, mesh())
program = mapped(lambda x: jaxcoll.reduce_scatter(x, AXES), mesh())
(row,) = jaxcoll.explain(program, x).rows
assert row.path == sys.argv[3], row
for run in range(RUNS):
    assert_blocks(jax.block_until_ready(program(x)), expected, f"run {run}")
say("all runs are right")

"""A script that ends while the work that it started, and never awaited, fails: unawaited.py HOW."""

import sys

import jax
import numpy as np
from world import mapped, mesh, put, say

import jaxcoll

jaxcoll.config.timeout_s = 1.0
step = mapped(lambda x: jaxcoll.all_reduce(x, mesh().axis_names), mesh())
ones = put(np.ones((mesh().size, 8), np.float32), mesh())
jax.block_until_ready(step(ones))
if jax.process_index() == 0:
    result = step(ones)
    say("started")
    if sys.argv[1] == "caught":
        try:
            with jaxcoll.watch():
                jax.block_until_ready(result)
        except jaxcoll.CollectiveError:
            pass

"""Who gets an error ends its process at once, with no more of Python: exits.py."""

import os
import time

import jax
import numpy as np
from world import mapped, mesh, put, say

import jaxcoll

jaxcoll.config.timeout_s = 2.0
step = mapped(lambda x: jaxcoll.all_reduce(x, mesh().axis_names), mesh())
ones = put(np.ones((mesh().size, 8), np.float32), mesh())
jax.block_until_ready(step(ones))
if jax.process_index() == 1:
    time.sleep(60)  # and does not come
try:
    jax.block_until_ready(step(ones))  # the call that fails
except (RuntimeError, ValueError):  # the latter while JAX starts it
    say("caught")
    os._exit(7)

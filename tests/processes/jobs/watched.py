"""On jax.lax a process does not begin a step in time, and the other one's watch says so."""

import logging
import time

import jax
import numpy as np
from world import mapped, mesh, put, say

import jaxcoll


class Said(logging.Handler):
    """Passes on what is reported, in one line."""

    def emit(self, record: logging.LogRecord) -> None:
        say("reported: " + record.getMessage().replace("\n", " | "))


logging.getLogger("jaxcoll").addHandler(Said(logging.ERROR))


@jaxcoll.watch
def step(x: jax.Array) -> jax.Array:
    return total(x)


total = mapped(lambda x: jax.lax.psum(x, mesh().axis_names), mesh())
ones = put(np.ones((mesh().size, 8), np.float32), mesh())
for _ in range(3):
    jax.block_until_ready(step(ones))
jaxcoll.config.timeout_s = 2.0
if jax.process_index() == 1:
    time.sleep(8.0)
jax.block_until_ready(step(ones))

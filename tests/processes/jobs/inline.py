"""Programs so small that XLA runs them where they are started: inline.py HOW, with one device.

JAX then raises their errors there. first: in a program's only call; second: in one that is resumed
by another thread; thread: in a thread of Python's; xla: in one of XLA's. raised: nobody catches it,
on any process.
"""

import sys
import threading
import time

import jax
import numpy as np
from world import mapped, mesh, put, say

import jaxcoll

how = sys.argv[1]
jaxcoll.config.timeout_s = 1.0
axes = mesh().axis_names


def total(x):
    x = jaxcoll.all_reduce(x, axes)
    return jaxcoll.all_reduce(x, axes, "max") if how == "second" else x


def start():
    try:
        step(ones)
    except ValueError as error:
        say("caught" if "jaxcoll.CollectiveError" in str(error) else str(error))


step = jax.jit(lambda x: x.sum(0)) if how == "xla" else mapped(total, mesh())
other = mapped(lambda x: jaxcoll.all_reduce(x, axes, "max"), mesh())
ones = put(np.ones((mesh().size, 8), np.float32), mesh())
for _ in range(2):  # the first time through JAX's Python, which raises another type
    jax.block_until_ready((step(ones), other(ones)))
if how == "raised":
    (other if jax.process_index() == 1 else step)(ones)
elif jax.process_index() == 1:
    time.sleep(3.0)  # so that the other one waits until its deadline
elif how == "thread":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()

"""A script that ends while the work that it started fails: unawaited.py HOW.

never: its result is held. dropped: it isn't. early: it isn't, and fails long before the end.
caught, plainly: it was awaited, and is held; afterwards: when it had failed. reset: it was dropped,
and the job goes on. status: as early, and the script has an exit status of its own.

With one device XLA would run a smaller program where it is started, see inline.py.
"""

import contextlib
import sys
import time

import jax
import numpy as np
from world import mapped, mesh, put, say

import jaxcoll

jaxcoll.config.timeout_s = 1.0
step = mapped(lambda x: jaxcoll.all_reduce(x @ x, mesh().axis_names), mesh())
ones = put(np.ones((mesh().size, 16, 16), np.float32), mesh())
jax.block_until_ready(step(ones))
if jax.process_index() == 0:
    held = [step(ones)]
    if sys.argv[1] in ("dropped", "early", "reset", "status"):
        held.clear()
    say("started")
    if sys.argv[1] in ("early", "reset", "afterwards", "status"):
        time.sleep(3.0)
    if sys.argv[1] == "status":
        sys.exit(3)
    if sys.argv[1] in ("plainly", "afterwards"):
        with contextlib.suppress(RuntimeError):
            jax.block_until_ready(held)
    if sys.argv[1] == "caught":
        try:
            with jaxcoll.watch():
                jax.block_until_ready(held)
        except jaxcoll.CollectiveError:
            pass
elif sys.argv[1] in ("plainly", "early", "afterwards", "status"):
    time.sleep(3.0)  # so that the other one waits until its deadline
if sys.argv[1] == "reset":
    jaxcoll.config.timeout_s = 60  # for the other one
    jaxcoll.reset()
    jax.block_until_ready(step(ones))

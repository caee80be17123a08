"""A process that waits for one that does not come is interrupted: interrupted.py FOLDER HOW."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from world import mapped, mesh, put, say

import jaxcoll
from jaxcoll import _host

FILE = Path(sys.argv[1]) / "pid"
IS_WATCHED = sys.argv[2] == "watched"
AXES = mesh().axis_names

jaxcoll.config.timeout_s = 40
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the launcher, when the other one has ended
step = mapped(lambda x: jaxcoll.all_reduce(x, AXES), mesh())
x = put(np.ones((mesh().size, 8), np.float32), mesh())
jax.block_until_ready(step(x))
if jax.process_index() == 0:
    y = step(x)
    FILE.with_suffix(".part").write_text(str(os.getpid()))
    FILE.with_suffix(".part").replace(FILE)
    with jaxcoll.watch() if IS_WATCHED else contextlib.nullcontext():
        jax.block_until_ready(y)
while not FILE.exists():
    time.sleep(0.05)
time.sleep(1)  # it awaits the result by then, or does so at once
pid, begin = int(FILE.read_text()), time.monotonic()
os.kill(pid, signal.SIGINT)
while not _host.has_ended(pid):
    time.sleep(0.05)
say(f"{time.monotonic() - begin:.1f}")
os._exit(0)

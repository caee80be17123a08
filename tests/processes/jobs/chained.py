"""Process 0 waits for process 1, which waits for process 3, which is stopped: chained.py.

The limit of process 0 is over first.
"""

import os
import signal
import subprocess

import jax
import numpy as np
from jax.sharding import Mesh
from world import mapped, put, say

import jaxcoll

RANK = jax.process_index()
LIMIT_S = 2.0
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "columns"))
row, column = (mapped(lambda x, a=axis: jaxcoll.all_reduce(x, a), mesh) for axis in mesh.axis_names)
ones = put(np.ones((mesh.size, 8), np.float32), mesh)
jax.block_until_ready((row(ones), column(ones)))
jaxcoll.config.timeout_s = LIMIT_S if RANK == 0 else 60
if RANK == 3:
    wake = f"sleep {2 * LIMIT_S}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["/bin/sh", "-c", wake]):
        os.kill(os.getpid(), signal.SIGSTOP)
try:
    with jaxcoll.watch():
        jax.block_until_ready((column if RANK == 0 else row)(ones))
except jaxcoll.CollectiveError as error:
    info = jaxcoll.error_info(error)
    assert info is not None
    say(f"missing {[late.rank for late in info.missing]}: {info.text!r}")

"""A script that asks for both doors by itself: initialized_late.py [hosts]."""

import logging
import os
import sys

import jax
import jax.numpy as jnp

import jaxcoll
from jaxcoll import _door, _native

if "hosts" in sys.argv:  # pretends that each process is on a host of its own
    os.environ["JAXCOLL_HOST_ID"] = os.environ["JAXCOLL_PROCESS_ID"]
    # `jaxcoll run` has attached this process already, as one of its host.
    from jaxcoll import _engine

    _engine.attach()
logging.basicConfig(stream=sys.stdout, format="%(levelname)s: %(message)s")
jaxcoll.initialize(accelerate=True)
mesh = jax.make_mesh((jax.device_count(),), ("x",))
x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
assert float(jax.jit(jnp.sum)(x)) == 28
print(f"open: {_door.is_open()}, calls: {_native.num_mpi_calls() > 0}", flush=True)

"""A model that one process has no memory for, trained by four that keep a part each.

python examples/15_larger_than_one_process.py            one process, for comparison
python examples/15_larger_than_one_process.py --mib 500  the same under a limit: it fails
jaxcoll run -n 4 examples/15_larger_than_one_process.py --mib 500
"""

import argparse
import re
import resource
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxcoll

WIDTH, LAYERS, EXAMPLES, STEPS = 2048, 10, 64, 3


def mib(field: str) -> float:
    """Returns a field of this process's status: VmData is what a limit counts, VmHWM the peak."""
    found = re.search(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0


def init(rng: jax.Array, x: jax.Array) -> list[jax.Array]:
    del x
    keys = jax.random.split(rng, LAYERS)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]


def apply(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jnp.tanh(x @ w)
    return x


def loss_fn(outputs: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((outputs - batch[1]) ** 2)


parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, help="what each process may have beside JAX itself")
options = parser.parse_args()
jaxcoll.initialize()  # does nothing outside of a job
mesh = jaxcoll.make_mesh({"data": -1})
jaxcoll.config.timeout_s = 60
before = mib("VmData")
if options.mib:
    limit = int((before + options.mib) * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

rng = np.random.default_rng(0)
whole = tuple(rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32) for _ in range(2))
placed = jax.NamedSharding(mesh, P("data"))
batch = tuple(jax.make_array_from_callback(x.shape, placed, x.__getitem__) for x in whole)
model = jaxcoll.fully_shard((init, apply))
state = jaxcoll.create_train_state(model, optax.adamw(1e-4), jax.random.key(0), batch, mesh)
step = jax.jit(
    jax.shard_map(
        jaxcoll.data_parallel_train_step(model, loss_fn=loss_fn),
        mesh=mesh,
        in_specs=(state.specs, P("data")),
        out_specs=(state.specs, P()),
    ),
    donate_argnums=0,
)
for _ in range(STEPS):
    state, metrics = step(state, batch)
if jax.process_index() == 0:
    print(f"loss {metrics['loss']:.6f}, {jax.process_count()} processes")
print(f"peak {mib('VmHWM'):.0f} MiB")

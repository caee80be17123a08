"""`reshard`: the memory that it takes beside both layouts, and that they share none.

What it does with values and with training states is in test_fully_shard.py.
"""

import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes.run_job import job_environment
from training import mesh_of

from jaxcoll import reshard

# Large blocks are returned to the system at once, so that the process's peak is that of the arrays.
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
RANKS, LEAVES, MIB = 4, 16, 4
MEASURED = f"""
import functools, gc, json, pathlib, re
import jaxcoll
jaxcoll.simulate_cpu_devices({RANKS})
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P

def mib(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s*(\\d+)", status)[1]) / 1024

def held(tree):
    shards = [shard for leaf in tree for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards) / 2**20

def measure(name, make, specs, target):
    jaxcoll.reshard(make(), specs, mesh=target)  # compiled before it is measured
    state = jax.block_until_ready(make())
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = mib("VmRSS")
    moved = jaxcoll.reshard(state, specs, mesh=target)
    more = mib("VmHWM") - before - held(getattr(moved, "params", moved))
    print(json.dumps([name, more]))

mesh = jaxcoll.make_mesh({{"a": 2, "b": {RANKS} // 2}})
fewer = jaxcoll.make_mesh({{"a": 1, "b": 2}}, allow_unused=True)
layouts = {{
    "from rows to columns": (P(("a", "b")), P(None, ("a", "b")), mesh),
    "made whole": (P(("a", "b")), P(), mesh),
    "split": (P(), P(("a", "b")), mesh),
    "axes the other way round": (P("a", "b"), P("b", "a"), mesh),
    "another axis": (P("a"), P(None, "b"), mesh),
    "the same": (P("a", "b"), P("a", "b"), mesh),
    "fewer devices": (P(("a", "b")), P("b"), fewer),
}}
for name, (old, new, target) in layouts.items():
    full = lambda i: jnp.full((1024, {MIB} * 256), i, jnp.float32)
    make = jax.jit(full, out_shardings=jax.NamedSharding(mesh, old))
    measure(name, lambda: [make(float(i)) for i in range({LEAVES})], new, target)

def kernels(*shape):
    def init(rng, x):
        return [jnp.zeros(shape, jnp.float32) for _ in range({LEAVES} // 2)]

    def apply(params, x, pipeline=jaxcoll.sequential):
        return pipeline(lambda layer, x: x + sum(map(jnp.sum, layer)), params, x)

    return init, apply

parts = jaxcoll.fully_shard(kernels(1021, {MIB} * 240 + 1), "a")  # which no ranks divide
stages = jaxcoll.pipelined(kernels(5, 512, {MIB} * 102), axis_name="a")
batch = (np.zeros((8, 4), np.float32), np.zeros(8, int))
stored = {{"other zeros at the end": (parts, 3), "other stages": (stages, 2)}}
for name, (model, count) in stored.items():
    make = lambda count: jaxcoll.create_train_state(
        model, optax.sgd(0.1), jax.random.key(0), batch,
        jaxcoll.make_mesh({{"a": count}}, allow_unused=True),
    )
    target = jaxcoll.make_mesh({{"a": count}}, allow_unused=True)
    measure(name, functools.partial(make, {RANKS}), make(count).specs, target)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads and resets the peak in /proc")
def test_memory_for_both_layouts_and_one_leaf():
    """Of sixteen leaves, or eight: beside both layouts, on each device two whole ones at most."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED],
        capture_output=True,
        text=True,
        timeout=240,
        env=job_environment() | AT_ONCE,
    )
    assert done.returncode == 0, done.stderr
    beside = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(beside) == 9
    assert all(-1 < more < 2 * MIB * RANKS for more in beside.values()), beside


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        (jax.P("a", "b"), jax.P("b", "a"), 4),  # two of the parts lie right
        (jax.P("a", "b"), jax.P("a", "b"), 4),
        (jax.P(), jax.P("a"), 4),
        (jax.P(), jax.P(), 2),
    ],
)
def test_layouts_share_no_memory(old: Any, new: Any, count: int, is_old: bool):
    """A step may donate either."""
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    laid = reshard({"x": x}, old, mesh=mesh_of(a=2, b=2))
    moved = reshard(laid, new, mesh=mesh_of(a=count // 2, b=2))
    given, kept = (laid, moved) if is_old else (moved, laid)
    change = jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)
    np.testing.assert_array_equal(change(given)["x"], -x)
    np.testing.assert_array_equal(kept["x"], x)
    np.testing.assert_array_equal(x[0], np.arange(8))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (jax.P("a", "a"), r"of shape \(6, 5\): P\('a', 'a'\) splits it over \"a\" twice"),
        (jax.P(None, None, None), r".* has an entry for dimension 2, but .* shape \(6, 5\)"),
        (jax.P("b"), r"dimension 0 of shape \(6, 5\) .* a multiple of 4: drop 2 or pad 2\.$"),
    ],
    ids=["an axis twice", "too long", "not divisible"],
)
def test_specs_that_do_not_fit(spec: Any, text: str):
    mesh = mesh_of(a=2, b=4)
    with pytest.raises(ValueError, match=r"reshard: \['w'\]:? " + text):
        reshard({"w": np.ones((6, 5))}, spec, mesh=mesh)

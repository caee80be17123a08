"""A job in which something goes wrong, and what jaxcoll says of it.

    jaxcoll run -n 4 examples/debug_a_hang.py --fault stops
    python examples/debug_a_hang.py --fault skips          # 4 devices of one process

`--fault` is what rank `--rank` does at step `--step`: it `stops` (SIGSTOP; in one process, a
callback that does not come back), `dies` (in several processes), `skips` a call, calls another
`shape`, or is `slow` from then on. The others raise within `--timeout` seconds; the error names the
command that says more. A `slow` rank is no error: the job is dumped at its end.
"""

import argparse
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll

FAULTS = ("none", "stops", "dies", "skips", "shape", "slow")
READING_S = 0.02  # of all ranks, each step, as if they read their data
DELAY_S = 0.05  # of a slow rank, besides

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--fault", choices=FAULTS, default="stops")
parser.add_argument("--rank", type=int, default=2)
parser.add_argument("--step", type=int, default=10)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--timeout", type=float, default=3.0)
options = parser.parse_args()

if not jax.distributed.is_initialized():  # as `jaxcoll run` has it
    jaxcoll.simulate_cpu_devices(4)
jaxcoll.config.timeout_s = options.timeout
mesh = jax.make_mesh((jax.device_count(),), ("data",))
here = jax.process_count() == 1  # all ranks: then a fault happens within the program
if here and options.fault == "dies":
    parser.error("--fault dies: expected several processes: in one, nobody is left who could tell")


def per_rank(body, out_specs):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P()), out_specs=out_specs))


def fault_of(number):
    """Returns which fault the rank is to have at a step, as a number; 0 for none."""
    due = number == options.step or (options.fault == "slow" and number > options.step)
    return FAULTS.index(options.fault) if due else 0


def misbehave(rank, fault):
    """Keeps a rank, in a callback, from its next call."""
    if rank == options.rank and FAULTS[fault] == "stops":
        time.sleep(2 * options.timeout)
    if rank == options.rank and FAULTS[fault] == "slow":
        time.sleep(DELAY_S)
    return np.float32(0)


def average(grads):
    return jax.lax.pcast(jaxcoll.all_reduce(grads, "data", op="mean"), "data", to="varying")


def reshaped_average(grads):
    half = jaxcoll.all_reduce(grads[::2], "data", op="mean")
    return jax.lax.pcast(jnp.tile(half, 2), "data", to="varying")


def train_step(grads, fault):
    if not here:
        return average(grads)
    rank = jax.lax.axis_index("data")
    shape = jax.ShapeDtypeStruct((), np.float32)
    grads += jax.pure_callback(misbehave, shape, rank, fault)
    branch = jnp.where(rank == options.rank, fault, 0)
    skips, reshapes = FAULTS.index("skips"), FAULTS.index("shape")
    return jax.lax.switch(
        jnp.where(branch == skips, 1, jnp.where(branch == reshapes, 2, 0)),
        [average, lambda g: g, reshaped_average],
        grads,
    )


def evaluate(loss, _):
    return jaxcoll.all_reduce(loss.sum(), "data")


def main():
    sharding = NamedSharding(mesh, P("data"))
    grads = jax.make_array_from_callback(
        (8 * mesh.size,), sharding, lambda at: np.ones(8 * mesh.size, np.float32)[at]
    )
    step, evaluation = per_rank(train_step, P("data")), per_rank(evaluate, P())
    others = per_rank(lambda g, _: reshaped_average(g), P("data"))
    for number in range(options.steps):
        time.sleep(READING_S)
        fault = fault_of(number)
        mine = fault if jax.process_index() == options.rank and not here else 0
        if number == options.step and (mine or (here and fault)):
            print(f"step {number}: rank {options.rank} {options.fault}", flush=True)
        if FAULTS[mine] == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULTS[mine] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULTS[mine] == "slow":
            time.sleep(DELAY_S)
        if FAULTS[mine] == "shape":
            grads = others(grads, np.int32(0))
        elif FAULTS[mine] != "skips":
            grads = step(grads, np.int32(fault))
        loss = evaluation(grads, np.int32(0))
        loss.block_until_ready()
    if jax.process_index() == 0:
        print(f"{options.steps} steps, loss {float(loss)}")


try:
    with jaxcoll.watch():
        main()
    if options.fault == "slow":
        print(f"jaxcoll doctor {jaxcoll.dump().parent}")
except jaxcoll.CollectiveError as error:
    sys.exit(f"CollectiveError: {error}")

"""Programs that try to make native calls meet the wrong call, hang, or fail for no reason.

    PYTHONPATH=tests python -m stress.scenarios --devices 4 --seed 1 --rounds 3 mixed clones

runs these scenarios (all without names) in this process and says how each went. Data are integers
and are compared with `==`: with what `jax.lax` gives for the same program, or with the truth where
that is plain. A scenario that takes longer than `--limit` seconds prints the calls that wait and
every thread's stack, and ends the process. `run.py` starts many of these.
"""

import argparse
import faulthandler
import os
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from stress import failing, order, random_programs, waiting  # noqa: F401  (registers them)
from stress.world import SCENARIOS, World, calls

import jaxcoll
from jaxcoll.diagnosis import black_box


def leave_unawaited(world: World) -> None:
    """Launches steps and returns: a process may end in the midst of them.

    Without callbacks into Python, on which JAX itself aborts at exit.
    """

    def body(x: jax.Array) -> jax.Array:
        y = x[0]
        for _ in range(10):
            y = jaxcoll.all_reduce(y, "x") % 1009
            y = y + lax.psum(y, "x") % 10
        return y[None]

    step = world.per_rank(body)
    for _ in range(25):
        step(world.integers(world.size, 50_000))


def _say_what_waits(name: str) -> None:
    """Prints the latest native calls of each device; only works where Python still runs."""
    latest: dict[int, list[Any]] = {}
    for call in calls():
        latest.setdefault(int(call["device"]), []).append(call)
    print(f"{name} HANGS. The latest native calls, {black_box.CALL.names}:")
    for records in latest.values():
        for record in records[-4:]:
            print(" ", record)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="scenario", help=", ".join(SCENARIOS))
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one scenario")
    parser.add_argument("--list", action="store_true", help="print the scenarios' names")
    args = parser.parse_args()
    if args.list:
        print(*SCENARIOS, sep="\n")
        return
    # Where a call can't be native, that is an error here, not a reason to run on lax.
    os.environ.pop("JAXCOLL_BACKEND", None)
    jaxcoll.config.backend = "native"
    jaxcoll.simulate_cpu_devices(args.devices)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    failed = 0
    for name in args.names or SCENARIOS:
        faulthandler.dump_traceback_later(args.limit, exit=True)
        timer = threading.Timer(args.limit - 2, _say_what_waits, [name])
        timer.daemon = True
        timer.start()
        start = time.monotonic()
        what = f"{name} --devices {args.devices} --seed {args.seed} --rounds {args.rounds}"
        print(f"start {what}", flush=True)
        try:
            SCENARIOS[name](World(mesh, args.seed, args.rounds))
        except Exception as problem:
            failed += 1
            print(f"FAIL  {what}: {type(problem).__name__}: {problem}", flush=True)
        else:
            print(f"ok    {what}: {time.monotonic() - start:.1f} s", flush=True)
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()
    leave_unawaited(World(mesh, args.seed, args.rounds))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

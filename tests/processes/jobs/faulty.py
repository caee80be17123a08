"""Random faults, one after the other, and what is said of each: faulty.py SEED COUNT.

Each is a rank, a moment and a kind; the last one is a death, with which the job ends. Every other
rank checks the error, and one of them what the doctor says.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from world import mapped, mesh, put, say

import jaxcoll
from jaxcoll.diagnosis import doctor

SEED, COUNT = map(int, sys.argv[1:3])
DUMPS = Path(os.environ["JAXCOLL_DUMP_DIR"])
RANK, RANKS = jax.process_index(), jax.process_count()
AXES = mesh().axis_names
LIMIT_S, GRACE_S = 3.0, 5.0
ring = [(i, (i + 1) % RANKS) for i in range(RANKS)]

CALLS = {
    "all_reduce": lambda x: jaxcoll.all_reduce(x, AXES),
    "all_gather": lambda x: jaxcoll.all_gather(x, AXES),
    "reduce_scatter": lambda x: jaxcoll.reduce_scatter(x, AXES, tiled=True),
    "all_to_all": lambda x: jaxcoll.all_to_all(x, AXES, 0, 0, tiled=True),
    "ppermute": lambda x: jaxcoll.ppermute(x, AXES, ring),
}
LENGTHS = {name: 4 * RANKS * (i + 1) for i, name in enumerate(CALLS)}
steps = {name: mapped(call, mesh()) for name, call in CALLS.items()}
STATUS = {
    "late": doctor.BEHIND,
    "stops": doctor.BEHIND,
    "skips": doctor.MISMATCH,
    "shape": doctor.MISMATCH,
    "dies": doctor.GONE,
}


def operand(name: str, extra: int = 0) -> jax.Array:
    return put(np.ones((mesh().size, LENGTHS[name] + extra * RANKS), np.float32), mesh())


def call(name: str, extra: int = 0) -> None:
    jax.block_until_ready(steps[name](operand(name, extra)))


def misbehave(kind: str, name: str) -> None:
    """Does, as the rank with the fault, what goes wrong instead of a call, or before it."""
    match kind:
        case "late":
            time.sleep(LIMIT_S + 2.5)
            call(name)
        case "stops":
            wake = f"sleep {LIMIT_S + 2.5}; kill -CONT {os.getpid()}"
            with subprocess.Popen(["/bin/sh", "-c", wake]):
                os.kill(os.getpid(), signal.SIGSTOP)
            call(name)
        case "skips":
            pass
        case "shape":
            call(name, extra=1)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)


def place(name: str) -> str:
    """Returns where a collective is called, as errors say it."""
    return f"faulty.py:{CALLS[name].__code__.co_firstlineno} (<lambda>)"


def run(kind: str, faulty: int, order: list[str], moment: int) -> tuple[Exception | None, float]:
    """Returns the error, and for how many seconds this rank was in the call that failed."""
    begin = 0.0
    try:
        for i, name in enumerate(order):
            begin = time.monotonic()
            if faulty == RANK and i == moment:
                misbehave(kind, name)
            else:
                call(name)
    except Exception as error:  # a ValueError where JAX learns of it at once
        return error, time.monotonic() - begin
    return None, 0.0


def check(kind: str, faulty: int, order: list[str], moment: int, error: Exception | None) -> None:
    what = (kind, faulty, order, moment)
    info = jaxcoll.error_info(error) if error is not None else None
    assert info is not None, (what, error)
    if STATUS[kind] == doctor.MISMATCH:
        assert info.kind == "mismatch", (what, info)
        its_own = place(order[moment + (kind == "skips")])
        assert re.search(rf"process {faulty} waits in [^;]*{re.escape(its_own)}", info.text), what
        assert place(order[moment]) in info.text, (what, info)
    else:
        states = {"late": "running", "stops": "stopped", "dies": "gone"}
        assert info.kind == "missing", (what, info)
        assert [(m.rank, m.state) for m in info.missing] == [(faulty, states[kind])], (what, info)
        assert info.op in order[moment:], (what, info)
        assert (info.source or "").endswith(place(info.op)), (what, info)


def check_doctor(kind: str, faulty: int, since: float) -> None:
    """Waits for all dumps of the failure, and asks what they show."""
    files = [DUMPS / f"process_{rank}.json" for rank in range(RANKS)]
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if all(file.exists() and file.stat().st_mtime > since for file in files):
            break
        time.sleep(0.05)
    text, status = doctor.report([DUMPS])
    found = {
        doctor.BEHIND: f"rank {faulty} (process {faulty}, device 0) is behind",
        doctor.MISMATCH: f"rank {faulty}:",
        doctor.GONE: f"process {faulty} is gone",
    }[STATUS[kind]]
    assert status == STATUS[kind], (kind, faulty, text)
    assert found in text, (kind, faulty, text)


def main() -> None:
    rng = random.Random(SEED)
    for name in CALLS:
        call(name)
        if name != "ppermute":
            call(name, extra=1)
    for number in range(COUNT):
        kind = "dies" if number == COUNT - 1 else rng.choice(["late", "stops", "skips", "shape"])
        order: list[Any] = rng.sample(list(CALLS), len(CALLS))
        # Of a pair's calls others may be ahead: all meet in the others.
        moments = [i for i, name in enumerate(order[:-1]) if name != "ppermute"]
        faulty, moment = rng.randrange(RANKS), rng.choice(moments)
        jaxcoll.config.timeout_s = LIMIT_S
        since = time.time()
        error, seconds = run(kind, faulty, order, moment)
        if faulty != RANK:
            check(kind, faulty, order, moment, error)
            assert seconds < LIMIT_S + GRACE_S, (kind, seconds)  # it must not hang
        if (faulty + 1) % RANKS == RANK:
            check_doctor(kind, faulty, since)
        if kind != "dies":
            jaxcoll.config.timeout_s = 60
            jaxcoll.reset()
        say(f"{number}: {kind} of rank {faulty} at {order[moment]} diagnosed")


main()

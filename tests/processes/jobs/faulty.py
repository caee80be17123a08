"""Random faults, one after the other, and what is said of each: faulty.py SEED COUNT.

Each is a process, a moment and a kind; the last one is a death, with which the job ends. Every
other process checks the error, and one of them what the doctor says. Where processes have several
devices, it may be one of these alone that is late. A rank that is slow is no error.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from world import mapped, mesh, put, say

import jaxcoll
from jaxcoll.diagnosis import doctor

SEED, COUNT = map(int, sys.argv[1:3])
DUMPS = Path(os.environ["JAXCOLL_DUMP_DIR"])
PROCESS, PROCESSES = jax.process_index(), jax.process_count()
RANKS, DEVICES = mesh().size, jax.local_device_count()
AXES = mesh().axis_names
LIMIT_S, GRACE_S = 3.0, 5.0
LATE_S = LIMIT_S + 2.5
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
    "late device": doctor.BEHIND,
    "stops": doctor.BEHIND,
    "skips": doctor.MISMATCH,
    "shape": doctor.MISMATCH,
    "dies": doctor.GONE,
}
KINDS = ["slow", "late", "stops", "skips", "shape", *["late device"] * (DEVICES > 1)]


def with_a_late_rank(call: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Keeps the rank `late` from a call, in a callback."""

    def wait(rank: Any, late: Any) -> Any:
        time.sleep(LATE_S if rank == late else 0)
        return np.float32(0)

    def step(x: Any, late: Any) -> Any:
        zero = jax.ShapeDtypeStruct((), np.float32)
        return call(x + jax.pure_callback(wait, zero, jax.lax.axis_index(AXES), late))

    return step


late_steps = {name: mapped(with_a_late_rank(call), mesh()) for name, call in CALLS.items()}


def operand(name: str, extra: int = 0) -> jax.Array:
    return put(np.ones((mesh().size, LENGTHS[name] + extra * RANKS), np.float32), mesh())


def call(name: str, extra: int = 0) -> None:
    jax.block_until_ready(steps[name](operand(name, extra)))


def misbehave(kind: str, name: str) -> None:
    """Does, as the process with the fault, what goes wrong instead of a call, or before it."""
    match kind:
        case "slow":
            time.sleep(LIMIT_S / 2)
            call(name)
        case "late":
            time.sleep(LATE_S)
            call(name)
        case "stops":
            wake = f"sleep {LATE_S}; kill -CONT {os.getpid()}"
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


def ranks_of(kind: str, faulty: int) -> list[int]:
    """Returns the ranks with the fault: the last one of a process, or all of it."""
    ranks = [faulty * DEVICES + device for device in range(DEVICES)]
    return ranks[-1:] if kind == "late device" else ranks


def run(kind: str, faulty: int, order: list[str], moment: int) -> tuple[Exception | None, float]:
    """Returns the error, and for how many seconds this process was in the call that failed."""
    begin = 0.0
    try:
        for i, name in enumerate(order):
            begin = time.monotonic()
            if kind == "late device" and i == moment:
                late = put(np.full(RANKS, ranks_of(kind, faulty)[0]), mesh())
                jax.block_until_ready(late_steps[name](operand(name), late))
            elif faulty == PROCESS and i == moment:
                misbehave(kind, name)
            else:
                call(name)
    except Exception as error:  # a ValueError where JAX learns of it at once
        return error, time.monotonic() - begin
    return None, 0.0


def check(kind: str, faulty: int, order: list[str], moment: int, error: Exception | None) -> None:
    what = (kind, faulty, order, moment)
    if kind == "slow":
        assert error is None, what
        return
    info = jaxcoll.error_info(error) if error is not None else None
    assert info is not None, (what, error)
    if STATUS[kind] == doctor.MISMATCH:
        assert info.kind == "mismatch", (what, info)
        its_own = place(order[moment + (kind == "skips")])
        assert re.search(rf"process {faulty} waits in [^;]*{re.escape(its_own)}", info.text), what
        calls = {(call.where, (call.source or "").rpartition("/")[2]) for call in info.calls}
        assert ((faulty,), its_own) in calls, (what, info)
        assert place(order[moment]) in info.text, (what, info)
    else:
        state = {"stops": "stopped", "dies": "gone"}.get(kind, "running")
        late = [(rank, state) for rank in ranks_of(kind, faulty)]
        assert info.kind == "missing", (what, info)
        # A process that is gone is not waited for, so that others may not have come yet.
        found = [(m.rank, m.state) for m in info.missing if (m.state, kind) != ("running", "dies")]
        assert found == late, (what, info)
        # Elsewhere than in the call to which it did not come; a program with one call had no other.
        seen = (
            "last call, ",
            "no call in this run yet" if kind == "late device" else "last call, ",
        )
        assert all(m.last_call.startswith(seen) for m in info.missing), (what, info)
        assert info.op in order[moment:], (what, info)
        assert (info.source or "").endswith(place(info.op)), (what, info)


def check_doctor(kind: str, faulty: int, since: float) -> None:
    """Waits for all dumps of the failure, and asks what they show."""
    files = [DUMPS / f"process_{process}.json" for process in range(PROCESSES)]
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if all(file.exists() and file.stat().st_mtime > since for file in files):
            break
        time.sleep(0.05)
    text, status = doctor.report([DUMPS])
    late = ranks_of(kind, faulty)
    ranks = ", ".join(map(str, late))
    places = "; ".join(f"process {faulty}, device {rank % DEVICES}" for rank in late)
    found = {
        doctor.BEHIND: f"rank {ranks} ({places}) is behind",
        doctor.MISMATCH: f"rank {ranks}:",
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
        kind = "dies" if number == COUNT - 1 else rng.choice(KINDS)
        order: list[Any] = rng.sample(list(CALLS), len(CALLS))
        # Of a pair's calls others may be ahead: all meet in the others.
        moments = [i for i, name in enumerate(order[:-1]) if name != "ppermute"]
        faulty, moment = rng.randrange(PROCESSES), rng.choice(moments)
        jaxcoll.config.timeout_s = LIMIT_S
        since = time.time()
        error, seconds = run(kind, faulty, order, moment)
        if faulty != PROCESS or kind == "late device":
            check(kind, faulty, order, moment, error)
            assert seconds < LIMIT_S + GRACE_S, (kind, seconds)  # it must not hang
        if kind != "slow" and (faulty + 1) % PROCESSES == PROCESS:
            check_doctor(kind, faulty, since)
        if kind != "dies":
            jaxcoll.config.timeout_s = 60
            jaxcoll.reset()
        say(f"{number}: {kind} of process {faulty} at {order[moment]} diagnosed")


main()

"""Random faults among the 4 devices of one process: faulty_devices.py SEED COUNT.

Each is a rank, a moment and a kind. The error must name the rank, its line and, where it is in
another call, that; and so must the doctor. After each the same program runs again.
"""

import os
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcoll
from jaxcoll.diagnosis import doctor

SEED, COUNT = map(int, sys.argv[1:3])
DUMPS = Path(os.environ["JAXCOLL_DUMP_DIR"])
RANKS, LIMIT_S, GRACE_S = 4, 2.0, 5.0
LATE_S = LIMIT_S + 1.5
KINDS = ("none", "late", "skips", "shape")
STATUS = {"late": doctor.BEHIND, "skips": doctor.MISMATCH, "shape": doctor.MISMATCH}

jaxcoll.simulate_cpu_devices(RANKS)
jaxcoll.config.timeout_s = LIMIT_S
mesh = jax.make_mesh((RANKS,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
ring = [(i, (i + 1) % RANKS) for i in range(RANKS)]

CALLS: list[Callable[..., Any]] = [
    lambda x: jaxcoll.all_reduce(x, "x"),
    lambda x: jaxcoll.all_gather(x, "x", tiled=True)[: x.size],
    lambda x: jnp.tile(jaxcoll.reduce_scatter(x, "x", tiled=True), RANKS),
    lambda x: jaxcoll.all_to_all(x, "x", 0, 0, tiled=True),
    lambda x: jaxcoll.broadcast(x, "x"),
]
OTHERS: list[Callable[..., Any]] = [
    lambda x: jnp.tile(jaxcoll.all_reduce(x[::2], "x"), 2),
    lambda x: jaxcoll.all_gather(x[::2], "x", tiled=True)[: x.size],
    lambda x: jnp.tile(jaxcoll.reduce_scatter(x[::2], "x", tiled=True), 2 * RANKS),
    lambda x: jnp.tile(jaxcoll.all_to_all(x[::2], "x", 0, 0, tiled=True), 2),
    lambda x: jnp.tile(jaxcoll.broadcast(x[::2], "x"), 2),
]


def place(call: Callable[..., Any]) -> str:
    """Returns where a collective is called, as errors say it."""
    return f"faulty_devices.py:{call.__code__.co_firstlineno} (<lambda>)"


def sleep(kind: np.ndarray, _: np.ndarray) -> np.floating:
    if KINDS[int(kind)] == "late":
        time.sleep(LATE_S)
    return np.float32(0)


def program(x: jax.Array, faulty: jax.Array, moment: jax.Array, kind: jax.Array) -> jax.Array:
    is_faulty = jax.lax.axis_index("x") == faulty
    for i, (call, other) in enumerate(zip(CALLS, OTHERS, strict=True)):
        now = jnp.where(is_faulty & (moment == i), kind, 0)
        x = x + jax.pure_callback(sleep, jax.ShapeDtypeStruct((), np.float32), now, x[0])
        way = jnp.array([0, 0, 1, 2])[now]
        x = jax.lax.switch(way, [call, lambda x: x, other], x)
    return x


step = jax.jit(
    jax.shard_map(
        program, mesh=mesh, in_specs=(jax.P("x"), *[jax.P()] * 3), out_specs=jax.P("x"),
        check_vma=False,
    )
)  # fmt: skip
ones = np.ones(8 * RANKS * RANKS, np.float32)


def run(kind: str, faulty: int, moment: int) -> None:
    jax.block_until_ready(step(ones, faulty, moment, KINDS.index(kind)))


def check(kind: str, faulty: int, moment: int, error: Exception | None) -> None:
    what = (kind, faulty, moment)
    info = jaxcoll.error_info(error) if error is not None else None
    assert info is not None, (what, error)
    assert place(CALLS[moment]) in info.text, (what, info)
    if kind == "late":
        assert info.kind == "missing", (what, info)
        assert [late.rank for late in info.missing] == [faulty], (what, info)
        assert "in a callback" in info.text, (what, info)
    else:
        its_own = place(OTHERS[moment] if kind == "shape" else CALLS[moment + 1])
        assert info.kind == "mismatch", (what, info)
        assert re.search(rf"device {faulty} waits in [^;]*{re.escape(its_own)}", info.text), info


def check_doctor(kind: str, faulty: int, since: float) -> None:
    file = DUMPS / "process_0.json"
    until = time.monotonic() + 10
    while time.monotonic() < until and not (file.exists() and file.stat().st_mtime > since):
        time.sleep(0.05)
    text, status = doctor.report([DUMPS])
    found = {
        doctor.BEHIND: f"rank {faulty} (process 0, device {faulty}) is behind",
        doctor.MISMATCH: f"rank {faulty}:",
    }[STATUS[kind]]
    assert status == STATUS[kind], (kind, faulty, text)
    assert found in text, (kind, faulty, text)


def main() -> None:
    rng = random.Random(SEED)
    run("none", 0, 0)
    for number in range(COUNT):
        kind, faulty = rng.choice(KINDS[1:]), rng.randrange(RANKS)
        moment = rng.randrange(len(CALLS) - 1)
        since, begin, error = time.time(), time.monotonic(), None
        try:
            run(kind, faulty, moment)
        except Exception as raised:  # a ValueError where JAX learns of it at once
            error = raised
        assert time.monotonic() - begin < LATE_S + GRACE_S, kind  # it must not hang
        check(kind, faulty, moment, error)
        check_doctor(kind, faulty, since)
        run("none", 0, 0)
        print(f"{number}: {kind} of rank {faulty} at {moment} diagnosed", flush=True)


main()

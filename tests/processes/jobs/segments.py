"""Where memory can't be shared as usual, and settings that differ: segments.py KIND."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from world import assert_blocks, mapped, mesh, native_calls, put, say

import jaxcoll
from jaxcoll import _engine, _segments

KIND = sys.argv[1]
RANK = jax.process_index()
AXES = mesh().axis_names


def check(native: bool) -> None:
    """A sum is right on whichever path, and `explain` says which one that is."""
    xs = np.random.default_rng(0).integers(0, 9, (mesh().size, 700)).astype(np.float32)
    program = mapped(lambda x: jaxcoll.all_reduce(x, AXES), mesh())
    with native_calls(jax.local_device_count() if native else 0):
        y = jax.block_until_ready(program(put(xs, mesh())))
    assert_blocks(y, np.broadcast_to(xs.sum(axis=0), xs.shape), KIND)
    (row,) = jaxcoll.explain(program, put(xs, mesh())).rows
    assert row.path == ("native" if native else "lax"), row
    if not native:
        say(f"reason: {row.reason}")


def leftovers() -> list[Path]:
    return list(Path("/dev/shm").glob("jaxcoll-*"))


def refuse(*_: Any) -> Any:
    raise PermissionError(1, "not here")


def main() -> None:
    check(native=True)
    match KIND:
        case "named":
            _segments.KINDS = ("named",)
            dead = subprocess.Popen([sys.executable, "-c", ""])
            dead.wait()
            left = Path(f"/dev/shm/jaxcoll-{dead.pid}-of-a-dead-process")
            if RANK == 0:
                left.write_bytes(b"x")
            jaxcoll.reset()
            check(native=True)
            assert not left.exists()
            say("no file is left" if not leftovers() else f"left: {leftovers()}")
        case "little memory":
            _segments._memory_left = lambda: 1 << 20
            jaxcoll.reset()
            check(native=False)
        case "forbidden":
            os.memfd_create = refuse
            os.open = refuse
            jaxcoll.reset()
            check(native=False)
        case "closed to others":
            _segments.join = refuse if RANK else _segments.join
            jaxcoll.reset()
            check(native=False)
        case "settings":
            jaxcoll.config.backend = "lax" if RANK else "auto"
            try:
                jaxcoll.reset()
            except RuntimeError as error:
                say(f"error: {error}")
        case _:
            raise AssertionError(KIND)
    assert _engine.window_bytes() > 0


main()

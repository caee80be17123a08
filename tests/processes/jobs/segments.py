"""Where memory can't be shared as usual, and settings that differ: segments.py KIND."""

import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from helpers import BY_NAME
from world import assert_blocks, mapped, mesh, native_calls, put, say

import jaxcoll
from jaxcoll import _engine, _native, _segments

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


def check_large() -> None:
    """Copies so large that they are read from where they lie, if that is allowed."""
    over = mesh()
    for name in ("all_gather_0", "all_to_all_0_2", "ppermute_ring"):
        op = BY_NAME[name]
        for count in (1 << 18, 5 * (1 << 18) + 4 * over.size):
            shape = (over.size, count // over.size, 1) if "all_to_all" in name else (count,)
            xs = np.random.default_rng(0).integers(-9, 9, (over.size, *shape)).astype(np.float32)
            program = mapped(op.over(AXES)["ours"], over)
            with native_calls(jax.local_device_count()):
                ys = jax.block_until_ready(program(put(xs, over)))
            assert_blocks(ys, op.reference(xs), f"{name} of {shape}")


def forbid_reading_peers() -> None:
    """Has the system refuse process_vm_readv to this process, as containers may."""
    seccomp, refused = {"x86_64": (317, 310), "aarch64": (277, 270)}[platform.machine()]
    steps = [  # of classic BPF: the call's number, whether it is that one, what to do
        (0x20, 0, 0, 0),
        (0x15, 0, 1, refused),
        (0x06, 0, 0, 0x0005_0000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF_0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    filter_ = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_filter, all_threads = 38, 1, 1
    failed = libc.prctl(no_new_privileges, 1, 0, 0, 0)
    if failed or libc.syscall(seccomp, set_filter, all_threads, filter_):
        say(f"no seccomp: {os.strerror(ctypes.get_errno())}")
        sys.exit(0)


def shown(name: str, value: bool) -> bool:
    say(f"{name}: {value}")
    return value


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
        case "full":
            os.memfd_create = refuse
            jaxcoll.reset()
            check(native=False)
            _segments.shortage = lambda *_: None  # as if another took it after one looked
            jaxcoll.reset()
            check(native=False)
            say("no file is left" if not leftovers() else f"left: {leftovers()}")
        case "closed to others":
            _segments.join = refuse if RANK else _segments.join
            jaxcoll.reset()
            check(native=False)
        case "unread":
            core: Any = _native.core()
            probe, start = core.probe_peers, core.start
            for cost in (0.0, 1e9):  # whatever it is here
                _engine._state.copy_costs = 3 * [1.0, 1.0, cost]
                jaxcoll.reset()
                check_large()
            core.probe_peers = lambda: shown("may read", probe())
            core.start = lambda may, cost: start(shown("will read", may), cost)
            if RANK == 1:
                forbid_reading_peers()
            jaxcoll.reset()
            check(native=True)
            check_large()
            say("all values are right")
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

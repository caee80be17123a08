"""Chains of collectives with nothing around them, bare.cc: what no library can be faster than.

Built for a run of the benchmark; without a compiler there are none.
"""

import contextlib
import ctypes
import functools as ft
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

SOURCE = Path(__file__).with_name("bare.cc")
# The numbers of bare.cc.
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "broadcast")
ROUTES = {"nothing": 0, "window": 1, "read": 2}
# Those whose result takes the operand's place, as ours: no memory is touched for the first time.
IN_PLACE = ("all_reduce", "broadcast")
# Of a rank. Below, a system call for each process takes longer than another copy.
LEAST_READ_BYTES = 64 << 10
# Above, time goes into the results that a call which does nothing leaves unwritten.
MOST_NOTHING_BYTES = 4 << 10
# Of a line, for a measurement of a few milliseconds.
HAND_OVERS = 10_000


@contextlib.contextmanager
def built(num_processes: int) -> Iterator[str | None]:
    """Yields what `join` needs to know: a library, and memory for a job. None: no compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir="/dev/shm") as f:
        library = Path(folder) / "libbare.so"
        command = [compiler, "-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"]
        command += ["-isystem", jax.ffi.include_dir(), str(SOURCE), "-o", str(library)]
        subprocess.run(command, check=True)
        size = ctypes.CDLL(str(library)).BareBytes
        size.restype, size.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
        f.truncate(size(num_processes))
        yield f"{library}:{f.name}"


def join(made: str, rank: int, num_processes: int) -> Callable[[], float]:
    """Lets this process take part, as `rank`; all processes must, before the first call.

    Returns what tells rank 0, when all call it, how long a cache line takes to rank 1's core and
    back, in ns; 0 where they share a core.
    """
    path, memory = made.split(":")
    library = ctypes.CDLL(path)
    library.BareJoin.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_bool]
    library.BareJoin.restype = ctypes.c_bool
    share_cores = num_processes > (os.cpu_count() or 1)
    if not library.BareJoin(memory.encode(), rank, num_processes, share_cores):
        raise OSError(f"{memory} can't be mapped")
    jax.ffi.register_ffi_target("bare", jax.ffi.pycapsule(library.BareCall), platform="cpu")
    library.BareRoundTrip.argtypes = [ctypes.c_uint64]
    library.BareRoundTrip.restype = ctypes.c_double
    return ft.partial(library.BareRoundTrip, HAND_OVERS)


def routes(size: int) -> list[str]:
    """Returns what is measured for `size` bytes of a rank; "nothing" is XLA's own part."""
    if size <= MOST_NOTHING_BYTES:
        return ["nothing", "window"]
    return ["window", "read"] if size >= LEAST_READ_BYTES else ["window"]


def chains(op: str, route: str, lengths: tuple[int, ...], num_processes: int) -> list[Any]:
    """Returns chains on this process's block, with the same arithmetic between calls as all."""
    from jaxcoll._chains import OPS as SHAPES

    back = SHAPES[op][2]

    def call(x: Any) -> Any:
        count = {
            "all_gather": x.shape[0] * num_processes,
            "reduce_scatter": x.shape[0] // num_processes,
        }.get(op, x.shape[0])
        result = jax.ShapeDtypeStruct((count,), x.dtype)
        numbers = {"op": np.int64(OPS.index(op)), "route": np.int64(ROUTES[route])}
        aliases = {0: 0} if op in IN_PLACE else {}
        return jax.ffi.ffi_call("bare", result, input_output_aliases=aliases)(x, **numbers)

    def made(length: int) -> Any:
        def run(x: Any) -> Any:
            for _ in range(length - 1):
                x = back(call(x), num_processes) * 0.5
            return call(x)

        return jax.jit(run)

    return [made(length) for length in lengths]

"""The engine for GPUs on simulated CPU devices: everything is real but the chips.

As it is installed it opens a CUDA runtime, NCCL and cuBLASLt that work on ordinary memory
(tests/cpp/fake_cuda.cc), and XLA's CPU devices call its handlers (on_cpu.cc).
"""

import ctypes
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import jax
import jax.ffi

from jaxcoll import _cuda, _lax_rules, _lowering, _native
from jaxcoll.collectives import _matmul, broadcast

ROOT = pathlib.Path(__file__).parents[2]


def missing() -> str | None:
    """Says what the engine or its libraries can't be had without, or None."""
    if _cuda.library_path() is None:
        return "jaxcoll was installed without its engine for GPUs"
    return None if shutil.which("c++") else "there is no C++ compiler"


def build(folder: pathlib.Path) -> None:
    """Compiles the libraries."""
    common = ["c++", "-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
    common += ["-I", str(ROOT / "csrc"), "-isystem", jax.ffi.include_dir()]
    for source in ("tests/cpp/fake_cuda.cc", "tests/nccl/on_cpu.cc"):
        built = folder / pathlib.Path(source).with_suffix(".so").name
        subprocess.run([*common, str(ROOT / source), "-o", str(built)], check=True, timeout=240)


def connect(folder: pathlib.Path) -> ctypes.CDLL:
    """Returns the engine with the libraries of a folder, its handlers registered for CPU."""
    fake = str(folder / "fake_cuda.so")
    library, reason = _cuda._opened(
        ctypes.CDLL(_cuda.library_path()),
        {name: [fake] for name in ("runtime", "driver", "nccl", "blas")},
    )
    assert library is not None, reason
    _native._connect_gpu(library)
    library.fake = ctypes.CDLL(fake)
    library.fake.fake_cuda_take_log.restype = ctypes.c_char_p
    _register(library, ctypes.CDLL(str(folder / "on_cpu.so")))
    return library


def _register(library: ctypes.CDLL, adapter: ctypes.CDLL) -> None:
    execute = ctypes.cast(adapter.on_cpu, ctypes.c_void_p).value
    type_id, type_info = map(jax.ffi.pycapsule, _cuda.state_type(library))
    registration = {"type_id": type_id, "type_info": type_info}
    devices = jax.local_devices()  # a stateful handler that comes first keeps XLA from starting
    jax.ffi.register_ffi_type("jaxcoll_cuda_site", registration, platform="cpu")
    for target in _cuda.targets(library):
        adapter.on_cpu_connect(ctypes.c_void_p(target.initialize), ctypes.c_void_p(target.execute))
        stages = {
            "instantiate": jax.ffi.pycapsule(target.instantiate),
            "execute": jax.ffi.pycapsule(execute),
        }
        jax.ffi.register_ffi_target(target.name, stages, platform="cpu")
    _cuda.set_devices(library, devices)


def changes(engine: ctypes.CDLL) -> Iterator[tuple[Any, str, Any]]:
    """Yields what has programs for CPU lowered as for GPUs: an object, a name, the new value."""
    for module in (_lowering, _lax_rules, _matmul, broadcast):
        yield module, "native_platform", lambda ctx: "cuda"
    yield _cuda, "IS_FASTER", True
    yield _native, "gpu_problem", lambda: None
    yield _native, "gpu_matmul_problem", lambda: None
    yield _native, "gpu_peer_problem", lambda devices: _cuda.peer_problem(engine, devices)

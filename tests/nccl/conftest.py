"""Programs for GPUs on simulated CPU devices: everything is real but the chips.

The engine for GPUs is compiled together with handlers that XLA's CPU devices can call, and opens a
CUDA runtime, NCCL and cuBLASLt that work on ordinary memory (tests/cpp/fake_cuda.cc).
"""

import ctypes
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator

import jax
import jax.ffi
import pytest

from jaxcoll import _cuda, _lowering, _native

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Returns the engine, its handlers registered for CPU devices."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("nccl")
    common = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden"]
    common += ["-I", str(ROOT / "csrc"), "-isystem", jax.ffi.include_dir()]
    sources = {
        "fake": [ROOT / "tests/cpp/fake_cuda.cc"],
        "engine": [
            *(ROOT / "csrc/cuda").glob("*.cc"),
            *(ROOT / "csrc/ffi/cuda").glob("*.cc"),
            ROOT / "csrc/ffi/attributes.cc",
            ROOT / "tests/nccl/on_cpu.cc",
        ],
    }
    builds = [
        subprocess.Popen([*common, *map(str, files), "-o", f"{folder}/{name}.so", "-ldl"])
        for name, files in sources.items()
    ]
    assert [build.wait(timeout=240) for build in builds] == [0, 0]
    fake = f"{folder}/fake.so"
    library, reason = _cuda._opened(
        ctypes.CDLL(f"{folder}/engine.so"),
        {name: [fake] for name in ("runtime", "driver", "nccl", "blas")},
    )
    assert library is not None, reason
    library.fake = ctypes.CDLL(fake)
    library.fake.fake_cuda_take_log.restype = ctypes.c_char_p
    _register(library)
    return library


def _register(library: ctypes.CDLL) -> None:
    on_cpu = library.jaxcoll_cuda_on_cpu
    on_cpu.restype = ctypes.c_void_p
    type_id, type_info = map(jax.ffi.pycapsule, _cuda.state_type(library))
    registration = {"type_id": type_id, "type_info": type_info}
    jax.devices()  # a stateful handler that comes before the client keeps it from starting
    jax.ffi.register_ffi_type("jaxcoll_cuda_site", registration, platform="cpu")
    for target in _cuda.targets(library):
        stages = {
            "instantiate": jax.ffi.pycapsule(target.instantiate),
            "execute": jax.ffi.pycapsule(on_cpu()),
        }
        jax.ffi.register_ffi_target(target.name, stages, platform="cpu")
    devices = jax.devices()
    ids = (ctypes.c_int64 * len(devices))(*(device.id for device in devices))
    ordinals = (ctypes.c_int32 * len(devices))(*(device.id for device in devices))
    library.jaxcoll_cuda_set_devices(ids, ordinals, len(devices))


@pytest.fixture
def gpus(engine: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Has programs for CPU lowered as for GPUs; returns what takes the log of NCCL's calls."""
    from jaxcoll import _lax_rules
    from jaxcoll.collectives import _matmul, broadcast

    for module in (_lowering, _lax_rules, _matmul, broadcast):
        monkeypatch.setattr(module, "native_platform", lambda ctx: "cuda")
    monkeypatch.setattr(_native, "gpu_problem", lambda: None)
    monkeypatch.setattr(_native, "gpu_matmul_problem", lambda: None)
    jax.clear_caches()
    engine.fake.fake_cuda_take_log()
    yield lambda: engine.fake.fake_cuda_take_log().decode()
    jax.clear_caches()
    engine.jaxcoll_cuda_reset()

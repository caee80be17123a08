"""Programs for GPUs on simulated CPU devices: everything is real but the chips.

The engine for GPUs, as it is installed, opens a CUDA runtime, NCCL and cuBLASLt that work on
ordinary memory (tests/cpp/fake_cuda.cc), and XLA's CPU devices call its handlers (on_cpu.cc).
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
    path, compiler = _cuda.library_path(), shutil.which("c++")
    if path is None or compiler is None:
        pytest.skip(
            "jaxcoll was installed without its engine for GPUs, or there is no C++ compiler"
        )
    folder = tmp_path_factory.mktemp("nccl")
    common = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
    common += ["-I", str(ROOT / "csrc"), "-isystem", jax.ffi.include_dir()]
    for source in ("tests/cpp/fake_cuda.cc", "tests/nccl/on_cpu.cc"):
        built = folder / pathlib.Path(source).with_suffix(".so").name
        subprocess.run([*common, str(ROOT / source), "-o", str(built)], check=True, timeout=240)
    fake = str(folder / "fake_cuda.so")
    library, reason = _cuda._opened(
        ctypes.CDLL(path), {name: [fake] for name in ("runtime", "driver", "nccl", "blas")}
    )
    assert library is not None, reason
    _native._connect_gpu(library)
    library.jaxcoll_cuda_set_peers(0)  # most tests are about NCCL
    library.fake = ctypes.CDLL(fake)
    library.fake.fake_cuda_take_log.restype = ctypes.c_char_p
    _register(library, ctypes.CDLL(str(folder / "on_cpu.so")))
    return library


def _register(library: ctypes.CDLL, adapter: ctypes.CDLL) -> None:
    execute = ctypes.cast(adapter.on_cpu, ctypes.c_void_p).value
    type_id, type_info = map(jax.ffi.pycapsule, _cuda.state_type(library))
    registration = {"type_id": type_id, "type_info": type_info}
    jax.devices()  # a stateful handler that comes before the client keeps it from starting
    jax.ffi.register_ffi_type("jaxcoll_cuda_site", registration, platform="cpu")
    for target in _cuda.targets(library):
        adapter.on_cpu_connect(ctypes.c_void_p(target.initialize), ctypes.c_void_p(target.execute))
        stages = {
            "instantiate": jax.ffi.pycapsule(target.instantiate),
            "execute": jax.ffi.pycapsule(execute),
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
    monkeypatch.setattr(_cuda, "IS_MEASURED", True)
    monkeypatch.setattr(_native, "gpu_problem", lambda: None)
    monkeypatch.setattr(_native, "gpu_matmul_problem", lambda: None)
    monkeypatch.setattr(
        _native, "gpu_peer_problem", lambda devices: _cuda.peer_problem(engine, devices)
    )
    jax.clear_caches()
    engine.fake.fake_cuda_take_log()
    yield lambda: engine.fake.fake_cuda_take_log().decode()
    jax.clear_caches()
    engine.jaxcoll_cuda_reset()


@pytest.fixture
def peers(engine: ctypes.CDLL, gpus: Callable[[], str]) -> Iterator[Callable[[], str]]:
    """As `gpus`, with small sums over peer memory."""
    engine.jaxcoll_cuda_set_peers(1)
    if problem := _cuda.peer_problem(engine, ()):
        pytest.skip(problem)
    yield gpus
    engine.jaxcoll_cuda_set_peers(0)

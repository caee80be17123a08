"""The compiled extension: loading it, registering its targets, and why it is absent.

The only file that touches `jax.ffi` and `jaxcoll._core`.
"""

import ctypes
import functools as ft
import importlib
import json
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax

from jaxcoll import _blas, _compat, _cuda
from jaxcoll._config import config, logger

_register_lock = threading.Lock()


@ft.cache
def _load() -> tuple[ModuleType | None, str | None]:
    """Returns the extension, or None and the reason; logs the reason once."""
    if problem := _compat.problem():
        logger.warning(
            "jaxcoll: %s; collectives run on jax.lax. Upgrade with: pip install -U jaxcoll", problem
        )
        return None, problem
    try:
        core = importlib.import_module("jaxcoll._core")
        config._on_change("timeout_s", core.set_timeout)
        config._on_change("compile_timeout_s", core.set_compile_timeout)
    except Exception as error:  # a broken or foreign extension fails in many ways
        if isinstance(error, ModuleNotFoundError) and error.name == "jaxcoll._core":
            reason = (
                "jaxcoll was installed without its native extension for this Python (with "
                "JAXCOLL_NATIVE=OFF, or without a C++ compiler: install it again with one)"
            )
        else:
            reason = f"the native extension can't be loaded ({error})"
        logger.warning("jaxcoll: %s; collectives run on jax.lax.", reason)
        return None, reason
    return core, None


@ft.cache
def _register() -> str | None:
    """Registers all types and targets with XLA; returns why that failed, or None.

    A stateful target that is registered before the CPU client exists keeps the backend from
    starting, so this waits for the first lowering, which has a client.
    """
    core, reason = _load()
    if core is None:
        return reason
    try:
        for name, registration in core.types().items():
            jax.ffi.register_ffi_type(name, registration, platform="cpu")
        for name, stages in core.targets().items():
            jax.ffi.register_ffi_target(name, stages, platform="cpu")
    except Exception as error:
        reason = f"XLA refused the native extension, which was built for another jaxlib ({error})"
        logger.warning("jaxcoll: %s; collectives run on jax.lax.", reason)
        return reason
    return None


def unavailable_reason() -> str | None:
    """Says why native calls can't be lowered in this process, or None. Registers on first use."""
    with _register_lock:
        return _register()


def _connect_gpu(library: ctypes.CDLL) -> None:
    """Has the engine for GPUs know what the extension does."""
    core, _ = _load()
    if core is not None:
        _cuda.ask(core.is_anyone_excused, core.absent)
        _cuda.record(library, core.recorder())


@ft.cache
def _register_gpu() -> str | None:
    """As `_register`, of the engine for GPUs."""
    library, reason = _cuda.load()
    if library is None:
        logger.info("jaxcoll: %s; collectives on GPUs run on jax.lax.", reason)
        return reason
    try:
        _cuda.set_devices(library, jax.local_devices(backend="cuda"))
        _connect_gpu(library)
        type_id, type_info = _cuda.state_type(library)
        registration: Any = {
            "type_id": jax.ffi.pycapsule(type_id),
            "type_info": jax.ffi.pycapsule(type_info),
        }
        jax.ffi.register_ffi_type("jaxcoll_cuda_site", registration, platform="CUDA")
        for target in _cuda.targets(library):
            stages = {
                "instantiate": jax.ffi.pycapsule(target.instantiate),
                "initialize": jax.ffi.pycapsule(target.initialize),
                "execute": jax.ffi.pycapsule(target.execute),
            }
            jax.ffi.register_ffi_target(target.name, stages, platform="CUDA")
    except Exception as error:  # as in `_register`, and a process without GPUs
        reason = f"the engine for GPUs can't be registered with XLA ({error})"
        logger.warning("jaxcoll: %s; collectives on GPUs run on jax.lax.", reason)
        return reason
    return None


def gpu_problem() -> str | None:
    """Says why native calls can't be lowered for GPUs, or None. Registers on first use."""
    with _register_lock:
        return _register_gpu()


def gpu_matmul_problem() -> str | None:
    """Says why the engine can't multiply matrices on GPUs, or None."""
    library, reason = _cuda.load()
    return reason if library is None else _cuda.matmul_problem(library)


def gpu_peer_problem(devices: Sequence[int]) -> str | None:
    """Says why small sums of these GPUs, by rank, don't go over their memory, or None."""
    library, reason = _cuda.load()
    return reason if library is None else _cuda.peer_problem(library, devices)


@ft.cache
def matmul_problem() -> str | None:
    """Says why the extension can't multiply matrices, or None."""
    core, reason = _load()
    if core is None:
        return reason
    blas = _blas.find()
    if isinstance(blas, str):
        logger.warning("jaxcoll: %s; collective matmuls are a collective and a matmul.", blas)
        return blas
    core.use_blas(*blas)
    return None


def matmul_is_behind() -> str | None:
    """Says why XLA's matmul is much faster than the extension's, or None."""
    return _blas.is_behind(kernel_sets())


def matmul_keeps_up() -> bool:
    """Tells whether the extension multiplies as fast as XLA."""
    return _blas.keeps_up(kernel_sets())


def multiplies() -> list[str]:
    """Returns what says which BLAS there is, and what it does on this processor."""
    return [*kernel_sets(), *_blas.card()]


def missing_reason() -> str | None:
    """Says why there is no extension that works, as far as is known before JAX has started."""
    if _register.cache_info().currsize:
        return _register()
    return _load()[1]


def core() -> ModuleType | None:
    """Returns the extension, or None where there is none that works."""
    return _load()[0]


def kernel_sets() -> list[str]:
    """Returns the instruction sets with kernels for this processor; the last one is in use."""
    core, _ = _load()
    return [] if core is None else core.kernel_sets()


def describe_site(site: int, text: str, details: Mapping[str, Any]) -> None:
    """Sets the text that native errors show for a call site, and the same for programs."""
    core, _ = _load()
    if core is not None:
        core.describe_site(site, text, json.dumps(details, separators=(",", ":")))
    _cuda.describe_site(site, text)


def num_calls() -> int:
    """Returns how many native calls were begun in this process, over all devices."""
    core, _ = _load()
    return _cuda.num_calls() if core is None else core.num_calls()


def num_mpi_calls() -> int:
    """Returns how many calls XLA's own collectives have begun in this process."""
    core, _ = _load()
    return 0 if core is None else core.num_mpi_calls()

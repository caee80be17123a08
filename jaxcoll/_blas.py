"""The BLAS that multiplies for the collective matmuls: SciPy's, which JAX depends on.

SciPy publishes C pointers to it for Cython; JAX takes its LAPACK from there as well.
"""

import ctypes
import functools as ft
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

# OpenBLAS, by the prefixes and suffixes under which distributions build it.
_PREFIXES, _SUFFIXES = ("scipy_", ""), ("", "64_")


# What OpenBLAS calls its kernels of 512 bits, and of 256.
_OF_512_BITS = ("SkylakeX", "Cooperlake", "SapphireRapids")
_OF_256_BITS = ("Haswell", "Zen")


class Blas(NamedTuple):
    """Addresses of functions; 0 where the library has none."""

    sgemm: int
    dgemm: int
    set_num_threads: int
    num_threads: int


@ft.cache
def find() -> Blas | str:
    """Returns the BLAS, or says why there is none to use."""
    try:
        from scipy.linalg import cython_blas
    except ImportError as error:
        return f"SciPy's BLAS can't be loaded ({error})"
    capsules = getattr(cython_blas, "__pyx_capi__", {})
    if missing := [name for name in ("sgemm", "dgemm") if name not in capsules]:
        return f"SciPy does not publish {' and '.join(missing)}"
    threads = _thread_functions(ctypes.CDLL(cython_blas.__file__))
    if threads is None:
        return "SciPy's BLAS is none whose threads can be limited (OpenBLAS)"
    return Blas(_address(capsules["sgemm"]), _address(capsules["dgemm"]), *threads)


def is_behind(instruction_sets: Sequence[str]) -> str | None:
    """Says why XLA's matmul is much faster than this BLAS, or None.

    OpenBLAS takes older kernels for processors that it does not know, or as OPENBLAS_CORETYPE says.

    Args:
        instruction_sets: of the processor, `avx512` among them if it has that.
    """
    chosen = kernels()
    if "avx512" not in instruction_sets or chosen is None or chosen in _OF_512_BITS:
        return None
    return f"SciPy's BLAS uses kernels for {chosen}, without AVX-512"


def keeps_up(instruction_sets: Sequence[str]) -> bool:
    """Tells whether this BLAS takes no longer than XLA's matmul: where neither has AVX-512.

    On AMD EPYC (Zen 3) it takes 0.93 to 1.08 of that time on one core, and less where both cores
    multiply (benchmarks/blas.py, benchmarks/matmul.py).

    Args:
        instruction_sets: as of `is_behind`.
    """
    return instruction_sets[-1:] == ["avx2"] and kernels() in _OF_256_BITS


@ft.cache
def kernels() -> str | None:
    """Returns for which processor the library has chosen its kernels; None where it can't say."""
    try:
        from scipy.linalg import cython_blas
    except ImportError:
        return None
    library = ctypes.CDLL(cython_blas.__file__)
    for name in _names("get_corename"):
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype = ctypes.c_char_p
            return function().decode()
    return None


def card() -> list[str]:
    """Returns what the library and its kernels depend on, without loading it."""
    try:
        found = version("scipy")
    except PackageNotFoundError:
        found = "none"
    return [f"SciPy {found}", os.environ.get("OPENBLAS_CORETYPE", "")]


def _names(verb: str) -> Iterator[str]:
    for prefix in _PREFIXES:
        for suffix in _SUFFIXES:
            yield f"{prefix}openblas_{verb}{suffix}"


def _address(capsule: Any) -> int:
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return pointer(capsule, name(capsule))


def _thread_functions(library: ctypes.CDLL) -> tuple[int, int] | None:
    """Looks in what the library was linked against."""
    for names in zip(_names("set_num_threads"), _names("get_num_threads"), strict=True):
        if all(hasattr(library, name) for name in names):
            set_it, get_it = (
                ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names
            )
            return set_it, get_it
    return None

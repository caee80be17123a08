"""The BLAS that multiplies for the collective matmuls: SciPy's, which JAX depends on.

SciPy publishes C pointers to it for Cython; JAX takes its LAPACK from there as well.
"""

import ctypes
import functools as ft
from typing import Any, NamedTuple

# OpenBLAS, by the prefixes and suffixes under which distributions build it.
_PREFIXES, _SUFFIXES = ("scipy_", ""), ("", "64_")


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


def _address(capsule: Any) -> int:
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return pointer(capsule, name(capsule))


def _thread_functions(library: ctypes.CDLL) -> tuple[int, int] | None:
    """Looks in what the library was linked against."""
    for prefix in _PREFIXES:
        for suffix in _SUFFIXES:
            names = [f"{prefix}openblas_{verb}_num_threads{suffix}" for verb in ("set", "get")]
            if all(hasattr(library, name) for name in names):
                set_it, get_it = (
                    ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
                    for name in names
                )
                return set_it, get_it
    return None

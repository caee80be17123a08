"""What this machine's processor can do, where the faster way to multiply depends on it."""

import contextlib
import functools as ft
from pathlib import Path

# By dtype: Linux's names of instructions that multiply it and sum in float32.
_PRODUCTS = {
    "bfloat16": {"amx_bf16", "avx512_bf16"},
    "float16": {"amx_fp16", "avx512_fp16"},
}


@ft.cache
def flags() -> frozenset[str]:
    """Returns the features that Linux names; none where it names them otherwise."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return frozenset(value.split())
    return frozenset()


def converts(dtype: str) -> bool:
    """Tells whether products of this dtype are made in float32, for want of instructions."""
    return dtype in _PRODUCTS and bool(flags()) and not flags() & _PRODUCTS[dtype]

"""How the tests' many small programs are compiled: quickly, since most run once.

With `--full` alone, programs of one process have JAX's and XLA's own choices. The stress test
always has.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

# JAX 0.10 has an older way to kernels, in half the time; JAX 0.12 knows what it is asked for.
_OLDER_WAY = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
_PRESET = " --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE"
XLA_FLAGS = (
    "--xla_backend_optimization_level=0"
    + _OLDER_WAY * (jax.__version_info__ < (0, 11))
    + _PRESET * (jax.__version_info__ >= (0, 12))
)


def inherited() -> str:
    """Returns what of this process's XLA_FLAGS is for the sake of quick compilation."""
    return " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if flag in XLA_FLAGS.split())


def draw_quickly() -> None:
    """Makes this process's random numbers of few instructions: other, and worse ones.

    Most of what a program that draws a model's parameters compiles is Threefry and `erf_inv`.
    """
    for primitive, rule, several in (
        (threefry2x32_p, _hash, True),
        (jax.lax.erf_inv_p, _spread, False),
    ):
        lowered = mlir.lower_fun(rule, multiple_results=several)
        mlir.register_lowering(primitive, lowered, platform="cpu")


def _hash(key1: Any, key2: Any, x1: Any, x2: Any) -> tuple[Any, Any]:
    a = _mixed(x1 + key1 * jnp.uint32(0x9E3779B9) + (key2 ^ jnp.uint32(0x85EBCA6B)))
    b = _mixed(x2 ^ a)
    return _mixed(b + key2 ^ a), b


def _mixed(x: Any) -> Any:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _spread(x: Any) -> Any:
    # Of about the same variance. As that of `erf_inv`, the logarithm keeps XLA from simplifying
    # what comes before it together with what follows: in some programs it would, in others not.
    return -x * jnp.log1p(-x * x)

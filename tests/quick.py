"""How XLA compiles the tests' many small programs: quickly, since most run once.

With `--full` alone, programs of one process have XLA's own choices. The stress test always has.
"""

import os

import jax

# JAX 0.10 has an older way to kernels as well, in half the time.
_OLDER_WAY = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
XLA_FLAGS = "--xla_backend_optimization_level=0" + _OLDER_WAY * (jax.__version_info__ < (0, 11))


def inherited() -> str:
    """Returns what of this process's XLA_FLAGS is for the sake of quick compilation."""
    return " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if flag in XLA_FLAGS.split())

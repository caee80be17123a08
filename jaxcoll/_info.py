"""`info`: what this installation has, what is switched on, and what is off and why."""

import dataclasses
import os
import platform
from importlib.metadata import PackageNotFoundError, version

from jaxcoll import _cuda, _door, _engine, _native, _processes
from jaxcoll._config import accelerates_lax, config

_PACKAGES = ("jaxcoll", "jax", "jaxlib", "numpy", "flax", "optax")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "JAXCOLL_ACCELERATE",
    "JAXCOLL_ACCELERATE_LAX",
    "JAXCOLL_BACKEND",
    "JAXCOLL_CROSSOVERS",
    "JAXCOLL_CUDA_PEERS",
    "JAXCOLL_CUDA_TRAP",
    "JAXCOLL_DISTRIBUTED",
    "JAXCOLL_HOST_ID",
    "JAXCOLL_SEGMENT_BYTES",
    "JAXCOLL_TIMEOUT_S",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PLATFORMS",
    "MPITRAMPOLINE_LIB",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "NPROC",
    "PJRT_NPROC",
    "XLA_FLAGS",
)


@dataclasses.dataclass(frozen=True)
class Info:
    """What `info` found. Prints as lines.

    Attributes:
        versions: of Python and the packages that matter; absent ones are left out.
        machine: system, processor architecture, and the cores this process may use.
        instruction_sets: those with kernels that this processor can run; the last is in use.
        transports: what native calls can travel over.
        off: what is not there, and why.
        settings: `jaxcoll.config` at this moment.
        environment: the variables that are set and that count.
    """

    versions: dict[str, str]
    machine: str
    instruction_sets: tuple[str, ...]
    transports: tuple[str, ...]
    off: dict[str, str]
    settings: dict[str, object]
    environment: dict[str, str]

    def __str__(self) -> str:
        lines = [
            ("versions", ", ".join(f"{name} {number}" for name, number in self.versions.items())),
            ("machine", self.machine),
            *([] if "native path" in self.off else [("native path", "on")]),
            ("instruction sets", ", ".join(self.instruction_sets) or "none"),
            ("transports", ", ".join(self.transports) or "none"),
            *((f"off: {what}", why) for what, why in self.off.items()),
            ("settings", ", ".join(f"{name}={value!r}" for name, value in self.settings.items())),
            *((name, value) for name, value in self.environment.items()),
        ]
        width = max(len(title) for title, _ in lines)
        return "\n".join(f"{title.ljust(width)}  {text}" for title, text in lines)


def info() -> Info:
    """Says what this installation has, what is switched on, and what is off and why.

    Starts no device and no other process; `print` it, or run `python -m jaxcoll info`.

    Example:
        >>> print(jaxcoll.info())
        versions          python 3.11.7, jaxcoll 0.1.0, jax 0.10.2, jaxlib 0.10.2, numpy 2.4.6
        machine           Linux x86_64, 2 cores
        instruction sets  baseline, avx2, avx512
        transports        memory of one process
        ...
    """
    missing = _native.missing_reason()
    off = {} if missing is None else {"native path": missing}
    shared, reason = _engine.summary()
    if reason:
        off["several processes"] = reason
    if reason := _native.matmul_is_behind():
        off["matmuls in one call"] = f'{reason}; "auto" takes XLA\'s'
    gpu, reason = _cuda.load()
    if gpu is None:
        off["GPU"] = f"{reason}; programs for GPUs run on jax.lax"
    elif reason := _cuda.matmul_problem(gpu):
        off["matmuls on GPUs"] = reason
    if gpu is not None and (reason := _cuda.peer_problem(gpu, ())):
        off["small sums over peer memory of GPUs"] = f"{reason}; NCCL does them"
    if gpu is not None and (reason := _cuda.ipc_problem(gpu)):
        off["small sums over peer memory between processes"] = f"{reason}; NCCL does them"
    on_gpus = {} if gpu is None else _cuda.versions(gpu)
    return Info(
        versions={"python": platform.python_version(), **_versions(), **on_gpus},
        machine=f"{platform.system()} {platform.machine()}, {_processes.num_cpus()} cores",
        instruction_sets=tuple(_native.kernel_sets()),
        transports=(
            *(() if missing else ("memory of one process", *shared)),
            *(() if gpu is None else ("NCCL between GPUs",)),
        ),
        off=off,
        settings={
            "backend": config.backend,
            "timeout_s": config.timeout_s,
            "strict": config.strict,
            "accelerate_lax": accelerates_lax(),
            "accelerate_xla": _door.is_open(),
        },
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

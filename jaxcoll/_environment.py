"""The variables of a process that JAX reads when it starts; known without importing it."""

import math
import os
from collections.abc import Mapping

from jaxcoll._limits import timeout_from

ACCELERATE = "JAXCOLL_ACCELERATE"  # set by `jaxcoll run --accelerate`
TRACE = "JAXCOLL_TRACE"  # the file of `jaxcoll run --trace`

# XLA's own limits on the waits of its own collectives: after the first it warns, and when the
# second is over as well it ends the process.
XLA_WARN = "--xla_cpu_collective_call_warn_stuck_timeout_seconds"
XLA_WARN_S = 20
XLA_TERMINATE = "--xla_cpu_collective_call_terminate_timeout_seconds"
XLA_TERMINATE_S = 40
FOR_EVER_S = 10**7


def num_cpus() -> int:
    """Returns how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def needed_environment(
    num_devices: int, cpus: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables that a process with as many CPU devices needs before JAX starts.

    What the environment says already is kept. The limits are those of `simulate_cpu_devices`, for
    its `JAXCOLL_TIMEOUT_S`.

    Args:
        num_devices: of the process.
        cpus: which it may use; XLA has as many threads by itself.
        environment: of the process.
    """
    # One for each device program, and one for each launch that waits for its turn, of up to three
    # Python threads; launches of one device wait for nothing. No more than that: XLA divides its
    # work among all of them, and 16 on one CPU took 1.3 times as long as 2.
    threads = 2 if num_devices == 1 else 4 * num_devices
    chosen = int_of("PJRT_NPROC", environment) or int_of("NPROC", environment) or cpus
    flags = environment.get("XLA_FLAGS", "").split()
    for limit in limits(environment):
        if not any(flag.startswith(limit.partition("=")[0]) for flag in flags):
            flags.append(limit)
    return {
        "PJRT_NPROC": str(max(threads, chosen)),
        "XLA_FLAGS": " ".join(flags),
    }


def limits(environment: Mapping[str, str]) -> list[str]:
    """Returns the flags with limits of XLA's own collectives beyond ours."""
    timeout_s = timeout_from(environment)
    ours_s = FOR_EVER_S if timeout_s is None else math.ceil(timeout_s)
    return [
        f"{name}={max(seconds, XLA_TERMINATE_S)}"
        for name, seconds in (
            (XLA_WARN, ours_s + ours_s // 2),
            (XLA_TERMINATE, 2 * ours_s),
        )
    ]


def int_of(variable: str, environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number that a variable holds; 0 where it holds none."""
    try:
        return int(environment.get(variable, ""))
    except ValueError:
        return 0

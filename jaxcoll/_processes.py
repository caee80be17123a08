"""The devices of this process: simulated CPU devices for one machine."""

import math
import os
import re
from collections.abc import Mapping

import jax

from jaxcoll._config import DEFAULT_TIMEOUT_S, config, logger, timeout_from

# XLA's own limits on the waits of its own collectives: after the first it warns, and when the
# second is over as well it ends the process.
_XLA_WARN = "--xla_cpu_collective_call_warn_stuck_timeout_seconds"
_XLA_WARN_S = 20
_XLA_TERMINATE = "--xla_cpu_collective_call_terminate_timeout_seconds"
_XLA_TERMINATE_S = 40
_FOR_EVER_S = 10**7

_simulated: int | None = None


def simulate_cpu_devices(num_devices: int) -> None:
    """Makes JAX see `num_devices` CPU devices in this process.

    Call it before JAX starts, that is before the first computation, `jax.devices()` or the like. It
    also sets what a multi-device CPU program needs: a thread pool that un-awaited steps can't
    exhaust (`PJRT_NPROC`; with XLA's default, more than 32 of them hang), and the limits on the
    waits of XLA's own collectives, which end the process: after one and a half times
    `config.timeout_s`, as it is when JAX starts, XLA warns, and after twice as long as that limit
    more it ends, so that an error of ours comes first; each is 40 s at least. In a job that
    `jaxcoll run --devices-per-process` started it does nothing: that number holds.

    Args:
        num_devices: how many devices, at least 1.

    Raises:
        ValueError: `num_devices` is not a positive int.
        RuntimeError: JAX has started already, and not with as many devices by this function.

    Example:
        >>> import jaxcoll
        >>> jaxcoll.simulate_cpu_devices(8)
        >>> mesh = jax.make_mesh((8,), ("data",))
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(
            f"simulate_cpu_devices(num_devices): expected a positive int, got {num_devices!r}."
        )
    global _simulated
    if chosen := _int_of("JAXCOLL_DEVICES_PER_PROCESS"):
        if chosen != num_devices:
            logger.info(
                "jaxcoll: simulate_cpu_devices(%d): `jaxcoll run --devices-per-process %d` holds",
                num_devices,
                chosen,
            )
        return
    if _simulated == num_devices:  # a notebook's cell that runs again
        return
    if jax_has_started():
        raise RuntimeError(
            f"simulate_cpu_devices({num_devices}): JAX has started already, with "
            f"{len(jax.devices())} {jax.devices()[0].platform} device(s). Call it first in the "
            "program, before anything that uses a device."
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    prepare(num_devices)
    _simulated = num_devices


def is_one_of_several() -> bool:
    """Tells whether `jaxcoll run` has started this process as one of several."""
    return _int_of("JAXCOLL_NUM_PROCESSES") > 1


def expected_devices() -> int:
    """Returns how many CPU devices this process will have, as far as can be known before JAX."""
    forced = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    return max(1, int(jax.config.jax_num_cpu_devices), *map(int, forced[-1:]))


def prepare(num_devices: int) -> None:
    """Sets what this process needs before JAX starts; until then `config.timeout_s` counts."""
    # Also those of `jaxcoll run`, for what was set when it began.
    ours = set(_limits(timeout_from(os.environ, "JAXCOLL_TIMEOUT_S", DEFAULT_TIMEOUT_S)))

    def follow(timeout_s: float | None) -> None:
        if not jax_has_started():
            kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in ours]
            needed = needed_environment(
                num_devices, num_cpus(), {**os.environ, "XLA_FLAGS": " ".join(kept)}
            )
            ours.update(set(needed["XLA_FLAGS"].split()) - set(kept))
            os.environ.update(needed)
        _warn_of_xla_limit(timeout_s)

    config._on_change("timeout_s", follow)


def xla_limit_s() -> int:
    """Returns after how long XLA ends a process that waits in a collective of its own."""
    limits_s = [_flag_s(_XLA_WARN, _XLA_WARN_S), _flag_s(_XLA_TERMINATE, _XLA_TERMINATE_S)]
    return sum(limits_s) if min(limits_s) >= 0 else _FOR_EVER_S


def _flag_s(name: str, default_s: int) -> int:
    found = re.findall(rf"{name}=(-?\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else default_s


def _warn_of_xla_limit(timeout_s: float | None) -> None:
    limit_s = xla_limit_s()
    if limit_s < (_FOR_EVER_S if timeout_s is None else timeout_s):
        logger.warning(
            "jaxcoll: config.timeout_s = %s: XLA ends a process that waits for %d s in one of its "
            "own collectives, on jax.lax; a longer limit is to be set before JAX starts "
            "(JAXCOLL_TIMEOUT_S)",
            timeout_s,
            limit_s,
        )


def num_cpus() -> int:
    """Returns how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def needed_environment(
    num_devices: int, cpus: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables that a process with as many CPU devices needs before JAX starts.

    What the environment says already is kept. The limits are those of `simulate_cpu_devices`.

    Args:
        num_devices: of the process.
        cpus: which it may use; XLA has as many threads by itself.
        environment: of the process.
    """
    # One for each device program, and one for each launch that waits for its turn, of up to three
    # Python threads; launches of one device wait for nothing. No more than that: XLA divides its
    # work among all of them, and 16 on one CPU took 1.3 times as long as 2.
    threads = 2 if num_devices == 1 else 4 * num_devices
    chosen = _int_of("PJRT_NPROC", environment) or _int_of("NPROC", environment) or cpus
    flags = environment.get("XLA_FLAGS", "").split()
    for limit in _limits(config.timeout_s):
        if not any(flag.startswith(limit.partition("=")[0]) for flag in flags):
            flags.append(limit)
    return {
        "PJRT_NPROC": str(max(threads, chosen)),
        "XLA_FLAGS": " ".join(flags),
    }


def _limits(timeout_s: float | None) -> list[str]:
    """Returns the flags with limits of XLA's own collectives beyond ours."""
    ours_s = _FOR_EVER_S if timeout_s is None else math.ceil(timeout_s)
    return [
        f"{name}={max(seconds, _XLA_TERMINATE_S)}"
        for name, seconds in (
            (_XLA_WARN, ours_s + ours_s // 2),
            (_XLA_TERMINATE, 2 * ours_s),
        )
    ]


def threads_problem(num_devices: int) -> str | None:
    """Says that XLA has too few threads for `num_devices` of this process, or None."""
    threads = max(_int_of("PJRT_NPROC") or _int_of("NPROC") or num_cpus(), num_devices)
    if num_devices == 1 or threads >= 2 * num_devices:
        return None
    return (
        f"XLA has {threads} threads for {num_devices} devices: a program of which more than 32 "
        f"steps are started without waiting for one can hang. Set PJRT_NPROC={4 * num_devices} "
        f"before JAX starts, or call jaxcoll.simulate_cpu_devices({num_devices})."
    )


def jax_has_started() -> bool:
    """Tells whether devices are fixed."""
    from jaxcoll import _compat

    return _compat.problem() is None and _compat.backends_are_initialized()


def _int_of(variable: str, environment: Mapping[str, str] = os.environ) -> int:
    try:
        return int(environment.get(variable, ""))
    except ValueError:
        return 0

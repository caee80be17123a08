"""The devices of this process: simulated CPU devices for one machine."""

import os
import re

import jax

from jaxcoll._config import config, logger
from jaxcoll._environment import (
    FOR_EVER_S,
    XLA_TERMINATE,
    XLA_TERMINATE_S,
    XLA_WARN,
    XLA_WARN_S,
    int_of,
    limits,
    needed_environment,
    num_cpus,
)

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
    if chosen := int_of("JAXCOLL_DEVICES_PER_PROCESS"):
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
    return int_of("JAXCOLL_NUM_PROCESSES") > 1


def expected_devices() -> int:
    """Returns how many CPU devices this process will have, as far as can be known before JAX."""
    forced = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    return max(1, int(jax.config.jax_num_cpu_devices), *map(int, forced[-1:]))


def prepare(num_devices: int) -> None:
    """Sets what this process needs before JAX starts; until then `config.timeout_s` counts."""
    # Also those of `jaxcoll run`, for what was set when it began.
    ours = set(limits(os.environ))

    def follow(timeout_s: float | None) -> None:
        if not jax_has_started():
            kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in ours]
            environment = {
                **os.environ,
                "XLA_FLAGS": " ".join(kept),
                "JAXCOLL_TIMEOUT_S": str(timeout_s),
            }
            needed = needed_environment(num_devices, num_cpus(), environment)
            ours.update(set(needed["XLA_FLAGS"].split()) - set(kept))
            os.environ.update(needed)
        _warn_of_xla_limit(timeout_s)

    config._on_change("timeout_s", follow)


def xla_limit_s() -> int:
    """Returns after how long XLA ends a process that waits in a collective of its own."""
    limits_s = [_flag_s(XLA_WARN, XLA_WARN_S), _flag_s(XLA_TERMINATE, XLA_TERMINATE_S)]
    return sum(limits_s) if min(limits_s) >= 0 else FOR_EVER_S


def _flag_s(name: str, default_s: int) -> int:
    found = re.findall(rf"{name}=(-?\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else default_s


def _warn_of_xla_limit(timeout_s: float | None) -> None:
    limit_s = xla_limit_s()
    if limit_s < (FOR_EVER_S if timeout_s is None else timeout_s):
        logger.warning(
            "jaxcoll: config.timeout_s = %s: XLA ends a process that waits for %d s in one of its "
            "own collectives, on jax.lax; a longer limit is to be set before JAX starts "
            "(JAXCOLL_TIMEOUT_S)",
            timeout_s,
            limit_s,
        )


def threads_problem(num_devices: int) -> str | None:
    """Says that XLA has too few threads for `num_devices` of this process, or None."""
    threads = max(int_of("PJRT_NPROC") or int_of("NPROC") or num_cpus(), num_devices)
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

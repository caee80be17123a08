"""`initialize`: makes this process one of several, if it was started as one."""

import functools as ft
import importlib.util
import os
import time
from typing import Any

import jax

from jaxcoll import _clusters, _compat, _door, _engine
from jaxcoll._accelerate import accelerate_lax
from jaxcoll._addresses import reserved
from jaxcoll._config import logger
from jaxcoll._environment import ACCELERATE
from jaxcoll._errors import one_of
from jaxcoll._host import has_ended
from jaxcoll._processes import expected_devices, jax_has_started, prepare

# How long the process that has JAX's coordination service waits at its end for the others, which
# do not survive the service. JAX's own limit.
_LEAVE_S = 300.0
# What a process may take from saying that it leaves until it needs the service no more.
_LAST_WORDS_S = 2.0
# Of the keys of those that leave.
_LEFT = "jaxcoll/left/"

_done = False
_leaves_at_once = False


def initialize(accelerate: bool = False) -> None:
    """Connects this process with the others of its job, if it was started as one of several.

    Call it first in the program, before anything that uses a device. In a script that `jaxcoll run`
    started it has been called already, and `jax.distributed.initialize()` is not needed.

    A job that `jax.distributed.initialize()` has connected is used as it is. Otherwise Slurm's
    `srun`, Open MPI's `mpirun`, an indexed Job of Kubernetes or `JAX_COORDINATOR_ADDRESS` make it
    call that function. It never waits for others because of variables that an interactive
    allocation or a pod leaves behind: then, and where there are none, this is one process, and the
    logger `jaxcoll` has the reason at level INFO. `JAXCOLL_DISTRIBUTED=1` makes it call
    `jax.distributed.initialize()` in any case, `JAXCOLL_DISTRIBUTED=0` never.

    Again it does nothing. Before JAX has started it also sets what `simulate_cpu_devices` sets:
    `PJRT_NPROC`, and the limits on the waits of XLA's own collectives.

    Args:
        accelerate: has programs that don't call this package run on its engine, too: the
            collectives of `jax.lax`, as by `accelerate_lax()`, and those that the compiler inserts
            for `jax.jit` with shardings. On all processes of a job alike, and before JAX has
            started. `jaxcoll run --accelerate` asks for it. Where XLA's collectives can't run on
            the engine, as over several hosts, they stay what they are, and the logger `jaxcoll`
            has the reason at level WARNING.

    Raises:
        RuntimeError: JAX has started already, as one process; or the others can't be reached; or
            not all of them accelerate.
        TypeError: `accelerate` is not a bool.
        ValueError: `JAXCOLL_DISTRIBUTED` is something else.

    Example:
        >>> import jaxcoll
        >>> jaxcoll.initialize()
        >>> jax.process_count()
    """
    if not isinstance(accelerate, bool):
        raise TypeError(f"initialize: accelerate: expected a bool, got {accelerate!r}.")
    accelerate = accelerate or os.environ.get(ACCELERATE) == "1"
    if accelerate:
        accelerate_lax()
    _join()
    if accelerate:
        _accelerate_xla()


def _join() -> None:
    global _done
    if _done:
        return
    choice = _choice()
    if not jax_has_started():
        prepare(expected_devices())
    if not jax.distributed.is_initialized():
        if os.environ.get("JAXCOLL_COORDINATOR"):
            _join_launched()
        else:
            _join_cluster(choice)
    if jax.distributed.is_initialized():
        if problem := _compat.distributed_problem():
            logger.warning("%s: collectives across processes are lax's", problem)
        elif _compat.process_id_and_count()[1] > 1:
            if "JAXCOLL_COORDINATOR" not in os.environ:
                logger.info(
                    "jaxcoll.initialize(): process 0 has JAX's coordination service: if it dies, "
                    "JAX ends the others. `jaxcoll run` keeps the service in its own process."
                )
            _engine.attach()
    _done = True


def leave_at_once() -> None:
    """Has this process end without waiting for the others, because it has failed."""
    global _leaves_at_once
    _leaves_at_once = True


def _choice() -> str:
    value = os.environ.get("JAXCOLL_DISTRIBUTED", "").strip() or "auto"
    if value not in ("auto", "0", "1"):
        raise ValueError(one_of("environment", "JAXCOLL_DISTRIBUTED", value, ("auto", "0", "1")))
    return value


# ---- XLA's own collectives -----------------------------------------------------------------------


@ft.cache
def _accelerate_xla() -> None:
    reason = _door.problem()
    if _compat.process_id_and_count()[1] > 1:
        reason = _engine.agree("accelerate", reason or _engine.problem_of_all())
    if reason is None and not jax.distributed.is_initialized():
        _join_alone()  # XLA looks for collectives only in a job
    if reason is None:
        _door.open_()
    else:
        logger.warning("jaxcoll: XLA's own collectives don't run on jaxcoll's engine: %s", reason)


def _join_alone() -> None:
    with reserved(None) as address:
        jax.distributed.initialize(address, 1, 0, coordinator_bind_address=address)


# ---- jaxcoll run ---------------------------------------------------------------------------------


def _join_launched() -> None:
    """Connects to the service of the launcher, which outlives every rank."""
    if problem := _compat.distributed_problem():
        raise RuntimeError(f"jaxcoll.initialize(): `jaxcoll run` can't be used: {problem}.")
    _refuse_if_started("`jaxcoll run` has started this process as one of several")
    address = os.environ["JAXCOLL_COORDINATOR"]
    process_id = int(os.environ["JAXCOLL_PROCESS_ID"])
    num_processes = int(os.environ["JAXCOLL_NUM_PROCESSES"])
    connect = ft.partial(_compat.connect, address, process_id, num_processes)
    jax.config.update("jax_enable_recoverability", True)
    connect()

    @ft.wraps(jax.distributed.initialize)
    def already(*_: Any, **__: Any) -> None:
        if jax.distributed.is_initialized():
            logger.debug("jax.distributed.initialize(): `jaxcoll run` has connected this process")
        else:  # after jax.distributed.shutdown()
            connect()

    _compat.replace_distributed_initialize(already)
    if int(os.environ.get("JAXCOLL_NUM_HOSTS", "1")) > 1:
        # The launcher of the first host, and with it the service, ends after its ranks.
        _compat.before_distributed_shutdown(_let_others_end)


# ---- Slurm, Open MPI, Kubernetes -----------------------------------------------------------------


def _join_cluster(choice: str) -> None:
    if choice == "0":
        logger.info("jaxcoll.initialize(): one process: JAXCOLL_DISTRIBUTED=0")
        return
    join, reason, arguments = _clusters.decide(os.environ, _has_package)
    if not join and choice == "auto":
        logger.info("jaxcoll.initialize(): one process: %s", reason)
        return
    if choice == "1":
        reason = f"JAXCOLL_DISTRIBUTED=1 ({reason})"
    _refuse_if_started(reason)
    knows = _compat.distributed_problem() is None
    if knows:  # else a rank that dies ends all, and at the end all wait for all
        jax.config.update("jax_enable_recoverability", True)
    logger.info("jaxcoll.initialize(): several processes: %s", reason)
    try:
        jax.distributed.initialize(**arguments)
    except Exception as error:
        raise RuntimeError(
            f"jaxcoll.initialize(): {reason}, but jax.distributed.initialize() failed: {error} "
            "Mend that, or set JAXCOLL_DISTRIBUTED=0 to run as one process."
        ) from error
    if knows:
        _compat.before_distributed_shutdown(_let_others_end)


def _has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _refuse_if_started(reason: str) -> None:
    if jax_has_started():
        raise RuntimeError(
            f"jaxcoll.initialize(): {reason}, but JAX has started already, as one process. Call "
            "it first in the program, before anything that uses a device."
        )


def _await_last_words(count: int) -> None:
    """Waits until the others, which have said that they leave, have also told JAX's service."""
    others = _engine.other_pids().values()
    until = time.monotonic() + _LAST_WORDS_S
    while time.monotonic() < until and not all(map(has_ended, others)):
        time.sleep(0.01)
    if len(others) < count - 1:  # some are on other hosts, where nobody sees them end
        time.sleep(_LAST_WORDS_S / 4)


def _let_others_end() -> None:
    """Has the process that keeps the service alive wait until the others need it no more.

    With recoverability on JAX does not wait, and the end of the service ends whoever is left.
    """
    me, count = _compat.process_id_and_count()
    client = _compat.distributed_client()
    try:
        client.key_value_set(f"{_LEFT}{me}", "", allow_overwrite=True)
        deadline = time.monotonic() + (0.0 if me or _leaves_at_once else _LEAVE_S)
        wait_s = 0.01
        while time.monotonic() < deadline:
            left = {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get(_LEFT)}
            # Who was killed says nothing.
            left |= {other for other, pid in _engine.other_pids().items() if has_ended(pid)}
            if len(left) >= count:
                _await_last_words(count)
                return
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.5)
    except jax.errors.JaxRuntimeError as error:  # the service is gone; so are we, then
        logger.debug("jaxcoll: at the end: %s", error)

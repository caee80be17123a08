"""What goes wrong with one process of a job, the last one; the others say what they get.

All make the communicators and the first calls before. Who has said what there is to say ends at
once: at JAX's own end all would wait for all.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxcoll

LIMIT_S = 5.0
_STAYS_AWAY_S = 30.0
_MANY = 1500


def break_down(kind: str, mesh: Any) -> None:
    """Runs some steps; in the next one the last process does what `kind` names."""
    fault = FAULTS[kind]
    step, other = _program(mesh, _total), _program(mesh, _total)
    xs = _operand(mesh, 1 << 20)
    few = _operand(mesh, 8)
    for _ in range(2):
        jax.block_until_ready((step(xs), other(few)))
    if fault.calls is not _total:
        step = _program(mesh, fault.calls).lower(xs).compile()
    if fault.is_known:
        jax.block_until_ready(step(xs))
    jaxcoll.config.timeout_s = jaxcoll.config.compile_timeout_s = LIMIT_S
    is_last = jax.process_index() == jax.process_count() - 1
    begun = time.monotonic()
    try:
        with jaxcoll.watch():
            fault.of_last(lambda: other(few)) if is_last else jax.block_until_ready(step(xs))
    except jaxcoll.CollectiveError as error:
        print(f"raised after {time.monotonic() - begun:.0f} s: {error}", flush=True)
    else:
        print("nothing was raised", flush=True)
    sys.stdout.flush()
    os._exit(0)


def _stay_away(other: Callable[[], Any]) -> None:
    del other
    print("stays away", flush=True)
    time.sleep(_STAYS_AWAY_S)


def _die(other: Callable[[], Any]) -> None:
    del other
    print("dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _call_another(other: Callable[[], Any]) -> None:
    """Calls what is over before what the others have called has begun, as NCCL sees it."""
    print("calls another", flush=True)
    jax.block_until_ready(other())


def _total(x: Any) -> Any:
    return jaxcoll.all_reduce(x, "x", backend="native")


def _shift(x: Any) -> Any:
    """Connects two ranks that have only summed before: NCCL waits for the other one."""
    size = jax.lax.axis_size("x")
    pairs = [(rank, (rank + 1) % size) for rank in range(size)]
    return jaxcoll.ppermute(x, "x", pairs, backend="native")


def _many_totals(x: Any) -> Any:
    """More calls than a stream takes: who makes the next one waits for the first."""
    return jax.lax.fori_loop(0, _MANY, lambda _, x: _total(x), x)


def _product(x: Any) -> Any:
    x = x.reshape(1024, -1)
    return jaxcoll.all_gather_matmul(x, x, "x", backend="native")


class Fault(NamedTuple):
    """What the last process does, what it says, and what the others call: the function, the op.

    And whether all have made that call before.
    """

    of_last: Callable[[Callable[[], Any]], None]
    says: str
    calls: Callable[[Any], Any] = _total
    op: str = "all_reduce"
    is_known: bool = False


FAULTS = {
    "late": Fault(_stay_away, "stays away"),
    "late at first": Fault(_stay_away, "stays away", _shift, "ppermute"),
    "late for many": Fault(_stay_away, "stays away", _many_totals),
    "late for a block": Fault(
        _stay_away, "stays away", _product, "all_gather_matmul", is_known=True
    ),
    "killed": Fault(_die, "dies"),
    "another": Fault(_call_another, "calls another"),
}


def _program(mesh: Any, f: Callable[[Any], Any]) -> Any:
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False)
    )


def _operand(mesh: Any, length: int) -> Any:
    xs = np.ones((mesh.size, length), np.float32)
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    return jax.make_array_from_callback(xs.shape, sharding, lambda at: xs[at])

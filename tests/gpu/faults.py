"""What goes wrong with one process of a job, the last one; the others say what they get.

All make the communicators and the first calls before. Who has said what there is to say ends at
once: at JAX's own end all would wait for all.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxcoll

LIMIT_S = 5.0
_STAYS_AWAY_S = 30.0


def break_down(kind: str, mesh: Any) -> None:
    """Runs some steps; in the next one the last process does what `kind` names."""
    step, other = _program(mesh), _program(mesh)
    xs = _operand(mesh, 1 << 20)
    few = _operand(mesh, 8)
    for _ in range(2):
        jax.block_until_ready((step(xs), other(few)))
    jaxcoll.config.timeout_s = LIMIT_S
    is_last = jax.process_index() == jax.process_count() - 1
    begun = time.monotonic()
    try:
        with jaxcoll.watch():
            _FAULTS[kind](lambda: other(few)) if is_last else jax.block_until_ready(step(xs))
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


_FAULTS: dict[str, Callable[[Callable[[], Any]], None]] = {
    "late": _stay_away,
    "killed": _die,
    "another": _call_another,
}
KINDS = tuple(_FAULTS)


def _program(mesh: Any) -> Any:
    return jax.jit(
        jax.shard_map(
            lambda x: jaxcoll.all_reduce(x, "x", backend="native"),
            mesh=mesh,
            in_specs=jax.P("x"),
            out_specs=jax.P("x"),
            check_vma=False,
        )
    )


def _operand(mesh: Any, length: int) -> Any:
    xs = np.ones((mesh.size, length), np.float32)
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    return jax.make_array_from_callback(xs.shape, sharding, lambda at: xs[at])

"""Calls that go wrong on one process, and what the others say: failing.py KIND[,KIND...] FOLDER."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from world import mapped, mesh, put, say

import jaxcoll

KINDS, FOLDER = sys.argv[1].split(","), Path(sys.argv[2])
RANK = jax.process_index()
AXES = mesh().axis_names
LIMIT_S = 3.0


def ones(length: int = 8, dtype: Any = np.float32) -> jax.Array:
    return put(np.ones((mesh().size, length), dtype), mesh())


def healthy(x: Any) -> Any:
    return jaxcoll.all_reduce(x, AXES)


def after(x: Any) -> Any:
    return 2 * jaxcoll.all_reduce(x, AXES)


def one_order(x: Any) -> Any:
    return jaxcoll.all_reduce(jaxcoll.ppermute(x, AXES, [(0, mesh().size - 1)]), AXES)


def another_order(x: Any) -> Any:
    return jaxcoll.ppermute(jaxcoll.all_reduce(x, AXES), AXES, [(0, mesh().size - 1)])


def over_processes(x: Any) -> Any:
    return jaxcoll.all_reduce(jaxcoll.all_reduce(x, "p"), AXES)


def over_all_first(x: Any) -> Any:
    return jaxcoll.all_reduce(jaxcoll.all_reduce(x, AXES), "p")


def from_own_process(x: Any) -> Any:
    """Each process's own rank is the root, so that none waits for another."""
    return jaxcoll.broadcast(x, AXES, root=RANK)


def to_the_other(x: Any) -> Any:
    return jaxcoll.ppermute(x, AXES, [(RANK, 1 - RANK)])


def summed(x: jax.Array) -> jax.Array:
    total = jax.shard_map(
        lambda x: jaxcoll.all_reduce(x * x, AXES),
        mesh=mesh(),
        in_specs=jax.P(AXES),
        out_specs=jax.P(),
        check_vma=False,
    )
    return jax.jit(total)(x).sum()


def run(f: Any, x: jax.Array) -> jax.Array:
    return jax.block_until_ready(mapped(f, mesh())(x))


def pause(x: Any) -> Any:
    """Keeps one device of process 1 from its call."""

    def wait(rank: Any) -> Any:
        if rank == mesh().size - 1:
            time.sleep(LIMIT_S + 2)
        return np.float32(0)

    late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), jax.lax.axis_index(AXES))
    return jaxcoll.all_reduce(x + late, AXES)


def wait_for_failure() -> None:
    """Goes on with its steps: the broadcast's program is gone."""
    step = mapped(healthy, mesh())
    for _ in range(200):
        time.sleep(0.1)
        jax.block_until_ready(step(ones()))


def go_wrong(kind: str) -> None:
    """Makes the call that fails."""
    match kind:
        case "shapes":
            run(after, ones(8 + RANK % 2))
        case "dtypes":
            run(after, ones(dtype=np.int32 if RANK % 2 else np.float32))
        case "reductions":
            run(lambda x: jaxcoll.all_reduce(x, AXES, op="max" if RANK else "sum"), ones())
        case "axes":
            run(lambda x: jaxcoll.all_gather(x, AXES, axis=1 if RANK else 0), ones())
        case "order":
            run(another_order if RANK else one_order, ones())
        case "groups":
            jaxcoll.config.timeout_s = 60
            run(over_all_first if RANK else over_processes, ones())
        case "groups in Python":
            jaxcoll.config.timeout_s = 60
            y = mapped(over_all_first if RANK else over_processes, mesh())(ones())
            time.sleep(LIMIT_S + 2)
            say("failed" if y.is_ready() else "not yet")
            jax.block_until_ready(y)
        case "roots":
            run(from_own_process, ones())
            wait_for_failure()
        case "pairs":
            run(to_the_other, ones())
            wait_for_failure()
        case "late":
            if RANK == 1:
                time.sleep(LIMIT_S + 2)
            run(after, ones())
        case "late in a gradient":  # which JAX evaluates while it takes the function apart
            if RANK == 1:
                time.sleep(LIMIT_S + 2)
            jax.block_until_ready(jax.grad(jax.checkpoint(summed))(ones()))
        case "meshes":
            jaxcoll.config.timeout_s = 60  # on a busy machine it takes a while to ask all
            over = jax.sharding.Mesh(np.array(jax.devices()[:: -1 if RANK else 1]), ("x",))
            x = put(np.ones((over.size, 8), np.float32), over)
            jax.block_until_ready(mapped(lambda x: jaxcoll.all_reduce(x, "x"), over)(x))
        case "late device":
            run(pause, ones())
        case "killed":
            jaxcoll.config.timeout_s = 60
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            run(after, ones())
        case "first killed":
            jaxcoll.config.timeout_s = 60
            if RANK == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            run(after, ones())
        case "stopped":
            if RANK == 1:
                (FOLDER / "pid").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            run(after, ones())
        case "reset":  # by one alone, say for an exception of its own
            jaxcoll.config.timeout_s = 60
            if RANK == 1:
                jaxcoll.reset()
            else:
                run(after, ones())
        case "left":
            if RANK == 1:
                sys.exit(0)
            run(after, ones())
        case _:
            raise AssertionError(kind)


def fail(kind: str) -> None:
    jaxcoll.config.timeout_s = LIMIT_S
    for _ in range(3):
        run(healthy, ones())
    begin = time.monotonic()
    try:
        go_wrong(kind)
        say("no error")
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter while JAX starts it
        head, *details = str(error).splitlines()
        say(f"after {time.monotonic() - begin:.1f} s: {head}")
        for detail in details:
            if detail.startswith("  rank "):
                say(detail.strip())
    if kind == "stopped" and RANK == 0:
        os.kill(int((FOLDER / "pid").read_text()), signal.SIGCONT)
    # Alive, and so is JAX; and who calls again is told the same.
    assert int(jax.jit(lambda x: x + 1)(1)) == 2
    try:
        run(healthy, ones())
        say("no error in the next call")
    except jax.errors.JaxRuntimeError as error:
        say(f"next: {error}".splitlines()[0])
    if "killed" in kind:
        try:
            jaxcoll.reset()
            say("no error in reset")
        except RuntimeError as error:
            is_alone = error.__cause__ is None and error.__suppress_context__
            say(f"{error}{' (alone)' if is_alone else ''}")
    has_reset = kind == "reset" and RANK == 1
    if "killed" not in kind and kind != "left" and not has_reset:
        jaxcoll.config.timeout_s = 60
        jaxcoll.reset()
        (shard, *_) = run(healthy, ones()).addressable_shards
        assert (np.asarray(shard.data) == mesh().size).all()
        say("works again")


for each in KINDS:
    fail(each)

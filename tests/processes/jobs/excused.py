"""One process compiles, pauses or is late for longer than the limit: excused.py."""

import logging
import time

import jax
import numpy as np
from world import mapped, mesh, put, say

import jaxcoll

RANK = jax.process_index()
LIMIT_S, LONGER_S = 1.5, 6.0


def total(x):
    return jaxcoll.all_reduce(x, mesh().axis_names)


step = mapped(total, mesh())
ones = put(np.ones((mesh().size, 8), np.float32), mesh())


def some_wait_for_others(x):
    """The first device of a process waits for the second, which waits for the other process."""
    first = jax.lax.axis_index("d") == 0
    x = jax.lax.cond(first, lambda x: x, lambda x: jaxcoll.all_reduce(x, "p"), x)
    return jaxcoll.all_reduce(x, "d")


in_turn = mapped(some_wait_for_others, mesh())


reports = []
logging.getLogger("jaxcoll").addFilter(lambda record: reports.append(record) or True)


def run(step=step):
    jax.block_until_ready(step(ones))


def slow_to_trace(x):
    time.sleep(LONGER_S)
    return x


def after(what, step=step):
    """The next call, before which process 1 does something for longer than the limit."""
    if RANK == 1:
        what()
    begin = time.monotonic()
    try:
        with jaxcoll.watch():
            run(step)
        return f"came after {time.monotonic() - begin:.1f} s"
    except jaxcoll.CollectiveError as error:
        info = jaxcoll.error_info(error)
        assert info is not None
        return f"{info.kind}: rank {info.missing[0].rank}, {info.text.splitlines()[1:]}"


def compile_slowly():
    jax.jit(slow_to_trace)(1.0)


def pause():
    with jaxcoll.allow_pause(60):
        time.sleep(LONGER_S)
    time.sleep(LIMIT_S / 3)  # the limit begins when the pause ends


def pause_too_short():
    with jaxcoll.allow_pause(0.5):
        time.sleep(LONGER_S)


run()
run(in_turn)
jaxcoll.config.timeout_s = LIMIT_S
say(f"compiles: {after(compile_slowly)}")
say(f"pauses: {after(pause)}")
say(f"pauses, waited for by one that is: {after(pause, in_turn)}")
say("reports: " + " ".join(r.getMessage() for r in reports if "has not ended" in r.getMessage()))
say(f"pauses too long: {after(pause_too_short)}")
jaxcoll.config.timeout_s = 60
jaxcoll.reset()
run()
jaxcoll.config.compile_timeout_s = 1.0
jaxcoll.config.timeout_s = LIMIT_S
jax.clear_caches()
say(f"compiles too long: {after(compile_slowly)}")

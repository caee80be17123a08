"""Processes that compile at different times and different often: calls meet all the same.

    compiling.py [CACHE [RANK]]

`CACHE`: a folder for what is compiled, of all processes or of one alone.
"""

import collections
import re
import sys
import time
from typing import Any

import jax
import numpy as np
from world import assert_blocks, mapped, mesh, put, say

import jaxcoll

RANK = jax.process_index()
AXES = mesh().axis_names


def step(x: Any) -> Any:
    for _ in range(3):
        x = jaxcoll.all_reduce(x, AXES) % 101
    return x + jaxcoll.ppermute(x, AXES, [(0, 1), (1, 0)])


def expected(xs: np.ndarray) -> np.ndarray:
    for _ in range(3):
        xs = np.broadcast_to(xs.sum(axis=0, dtype=np.int32) % 101, xs.shape)
    received = np.zeros_like(xs)
    received[[0, 1]] = xs[[1, 0]]
    return xs + received


def check_calls() -> None:
    """Calls of one function have a place each, and no id where each device has a process."""
    again = jax.jit(jax.checkpoint(step))
    program: Any = mapped(lambda x: again(x) + again(x + 1), mesh())
    text = program.lower(put(operand(), mesh())).as_text()
    sites = re.findall(r"site = (\d+)", text)
    assert len(sites) == 8, text
    assert len(set(sites)) == 8, sites
    assert ("partition_id" in text) == (jax.local_device_count() > 1), text


def check_uneven() -> None:
    """All processes have the same program, though one has a device less in it."""
    over = jax.sharding.Mesh(np.array(jax.devices()[1:]), ("x",))
    xs = np.arange(3 * over.size).reshape(over.size, 3).astype(np.int32)
    program: Any = mapped(lambda x: jaxcoll.all_reduce(x, "x"), over)
    assert "partition_id" in program.lower(put(xs, over)).as_text()
    assert_blocks(
        program(put(xs, over)), np.broadcast_to(xs.sum(axis=0, dtype=np.int32), xs.shape), "uneven"
    )


def operand() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 9, (mesh().size, 33)).astype(np.int32)


def look_ups() -> collections.Counter[str]:
    """Returns how often something was found in the cache from now on, and how often not."""
    counts: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    return counts


def main() -> None:
    check_calls()
    if jax.local_device_count() > 1:
        check_uneven()
    if len(sys.argv) == 2 or sys.argv[2:] == [str(RANK)]:  # another process may have filled it
        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    counts = look_ups()
    over = mesh()
    xs = operand()
    program = mapped(step, over)
    for round_ in range(12):
        if round_ % 3 == RANK % 3:
            jax.clear_caches()  # this process compiles again, the others don't
        if round_ % 4 == RANK % 4:
            jax.jit(lambda x, factor=round_: x * factor)(np.float32(RANK))  # a program of its own
            own = jax.sharding.Mesh(np.array(jax.local_devices()), ("d",))
            jax.block_until_ready(
                jax.jit(
                    jax.shard_map(
                        lambda x: jaxcoll.all_reduce(x, "d"),
                        mesh=own,
                        in_specs=jax.P("d"),
                        out_specs=jax.P(),
                    )
                )(np.ones(own.size, np.float32))
            )
        if round_ % 5 == RANK:
            time.sleep(0.05)
        assert_blocks(program(put(xs, over)), expected(xs), f"round {round_}")
        if round_ == 0:
            hits, misses = (counts[f"/jax/compilation_cache/cache_{k}"] for k in ("hits", "misses"))
            say(f"the first round: {hits} hits, {misses} misses")
    say("all rounds are right")


main()

"""Sums of floats, whose bits show the order in which they are added: of rank 0 first, always.

rank_order.py [hosts]: over two hosts, or what pretends to be, of each host first.
"""

import contextlib
import functools as ft
import sys
from typing import Any

import jax
import numpy as np
from world import assert_blocks, mapped, mesh, native_calls, on_two_hosts, put, say

import jaxcoll
from jaxcoll import _engine

ON_HOSTS = "hosts" in sys.argv


@contextlib.contextmanager
def all_native(calls: int) -> Any:
    """Refuses another path; between hosts there is none for both."""
    with jaxcoll.using(backend="auto" if ON_HOSTS else "native"):
        if ON_HOSTS:
            yield
        else:
            with native_calls(calls):
                yield


def check(over: Any, counts: list[int], what: str) -> None:
    axes = over.axis_names
    rng = np.random.default_rng(0)
    for count in counts:
        xs = rng.normal(size=(over.size, over.size, count)).astype(np.float32)
        xs *= np.float32(10.0) ** rng.integers(-3, 4, xs.shape).astype(np.float32)
        total = ft.reduce(np.add, xs)
        if ON_HOSTS:
            total = np.add(*(ft.reduce(np.add, half) for half in np.split(xs, 2)))
        assert over.size < 3 or (total != ft.reduce(np.add, xs[::-1])).any()  # else nothing is seen
        with all_native(2 * jax.local_device_count()):
            program = mapped(
                lambda x: (jaxcoll.all_reduce(x, axes), jaxcoll.reduce_scatter(x, axes)), over
            )
            sums, parts = jax.block_until_ready(program(put(xs, over)))
        if ON_HOSTS:
            rows = jaxcoll.explain(program, put(xs, over)).rows
            assert [row.path for row in rows] == ["two-level"] * 2, rows
        assert_blocks(sums, np.broadcast_to(total, xs.shape), f"all_reduce of {xs.shape}, {what}")
        assert_blocks(parts, total, f"reduce_scatter of {xs.shape}, {what}")


def main() -> None:
    if ON_HOSTS:
        on_two_hosts()
    window = _engine.window_bytes() // 4
    counts = [5, 1000, window + 1, (4 << 20) // 4 // mesh().size]
    for order in ("processes first", "devices first") if jax.local_device_count() > 1 else ("",):
        for reduction_order in ("layout", "rank"):
            jaxcoll.config.reduction_order = reduction_order
            check(mesh(order), counts, f"{order}, {reduction_order}")
    say("all sums are in rank order")


main()

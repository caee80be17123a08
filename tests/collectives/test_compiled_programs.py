"""Whole programs under JAX: compiled ahead of time, cached, checked for NaNs, in threads."""

import gzip
import json
import logging
import pathlib
import re
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.export
import numpy as np
import pytest
from checks import assert_same, auto_is_native, counted_calls, mapped, mesh
from helpers import EXAMPLES, Op, blocks

import jaxcoll


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_compiled_ahead_of_time(op: Op):
    xs = blocks(op, 4)
    f = jax.jit(mapped(op.over("x")["ours"], mesh(4)))
    sharded = jax.device_put(xs, jax.NamedSharding(mesh(4), jax.P("x")))
    compiled = f.lower(sharded).compile()
    with counted_calls() as count:
        assert_same(compiled(sharded), op.reference(xs))
    assert count.calls == (4 if auto_is_native() else 0)


WITH_A_CACHE = """
import json, sys
import jaxcoll
jaxcoll.simulate_cpu_devices(4)
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.split("/")[-1]))
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

def f(x):
    y = jaxcoll.all_reduce({"a": x, "b": x.sum()}, "x")
    return jaxcoll.all_gather(x, "x", tiled=True), y

f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P("x"), out_specs=(jax.P("x"), jax.P())))
gathered, y = jax.block_until_ready(f(np.arange(8.0)))
from jaxcoll import _native
print(json.dumps({
    "gathered": np.asarray(gathered).tolist(), "a": y["a"].tolist(), "b": y["b"].item(),
    "native": 0 if _native.unavailable_reason() else _native.num_calls(),
    "hits": events.count("cache_hits"), "misses": events.count("cache_misses"),
}))
"""


def test_a_persistent_cache_cold_and_warm(tmp_path: pathlib.Path):
    """A program from the cache meets another process's addresses, and the same collectives."""
    said = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", WITH_A_CACHE, str(tmp_path)],
                check=True,
                timeout=120,
                stdout=subprocess.PIPE,
            ).stdout
        )
        for _ in ("cold", "warm")
    ]
    for process in said:
        assert process["gathered"] == list(range(8)) * 4
        assert (process["a"], process["b"]) == ([12, 16], 28)
        assert process["native"] == (8 if auto_is_native() else 0)
    cold, warm = said
    assert (cold["hits"], cold["misses"] > 0) == (0, True)
    assert (warm["hits"], warm["misses"]) == (cold["misses"], 0)


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_nans_are_found(op: Op):
    """`jax_debug_nans` looks at what a program returns, then runs it again without `jax.jit`."""
    xs = blocks(op, 2, np.float32)
    f = jax.jit(mapped(lambda x: op.ours(x / x, "x"), mesh(2)))
    finite = np.where(xs == 0, 1, xs)
    bad = finite.copy()
    bad[1] = 0  # broadcast sends what the last rank has
    with jax.debug_nans(True):
        expected = f(finite)
        with pytest.raises(FloatingPointError, match="nan"):
            f(bad)
        assert_same(f(finite), expected)


def test_infinities_are_found():
    f = jax.jit(mapped(lambda x: jaxcoll.all_reduce(1 / x, "x"), mesh(2)))
    xs = np.ones((2, 3), np.float32)
    with jax.debug_infs(True):
        assert_same(f(xs), xs * 2)
        with pytest.raises(FloatingPointError, match="inf"):
            f(xs * 0)


def test_two_threads_call_two_functions_at_once():
    """XLA may begin the two programs in another order on each device."""
    xs = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    permutation = [(i, (i + 1) % 4) for i in range(4)]

    def summed(x: Any) -> Any:
        for _ in range(5):
            x = jaxcoll.all_reduce(x, "x", op="mean")
        return x

    def moved(x: Any) -> Any:
        for _ in range(5):
            x = jaxcoll.ppermute(x, "x", permutation)
        return x

    expected = {
        summed: np.broadcast_to(xs.mean(axis=0), xs.shape),
        moved: np.roll(xs, 5, axis=0),
    }
    problems: list[str] = []
    ready = threading.Barrier(2, timeout=60)

    def work(f: Any) -> None:
        try:
            program = jax.jit(mapped(f, mesh(4)))
            program(xs)
            ready.wait()
            for ys in [program(xs) for _ in range(30)]:
                assert_same(ys, expected[f])
        except BaseException as error:
            problems.append(f"{f.__name__}: {error!r}")

    threads = [threading.Thread(target=work, args=(f,)) for f in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_an_export_says_why_it_is_on_lax(caplog: pytest.LogCaptureFixture):
    f = jax.jit(mapped(lambda x: jaxcoll.all_reduce(x, "x", backend="auto"), mesh(2)))
    with caplog.at_level(logging.INFO, logger="jaxcoll"):
        jax.export.export(f)(np.ones((2, 3), np.float32))
    (said,) = (text for text in caplog.messages if "all_reduce over" in text)
    assert re.search(r'over "x", called at .*test_compiled_programs\.py:\d+ \(.*\): lax: ', said)
    assert "export" in said or not auto_is_native()


@pytest.mark.skipif(not auto_is_native(), reason="the names of lax's calls are XLA's")
def test_a_profile_has_the_names_of_calls(tmp_path: pathlib.Path):
    f = jax.jit(mapped(lambda x: jaxcoll.all_gather(jaxcoll.all_reduce(x, "x"), "x"), mesh(2)))
    x = np.ones((2, 3), np.float32)
    jax.block_until_ready(f(x))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(f(x))
    (file,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    for op in ("all_reduce", "all_gather"):
        assert any(name.startswith(op) for name in names), names

"""A wait in one of XLA's own collectives, which the engine knows nothing of."""

import hashlib
import os
import subprocess
import sys
import threading
import time

import pytest
from checks import native_missing

from jaxcoll.diagnosis import black_box, standstill
from jaxcoll.diagnosis.stacks import Look

AWAITS = Look(black_box.AWAITING, "the stack", 0, ((1, ("main",)),))
CALLS_BACK = Look(black_box.CALLBACK, "the stack", 1, ((7, ("load",)), (1, ("main",))))
LIMIT_S = 10.0
BLOCK = bytes(1 << 22)

# Part of a result fails; to read it starts a collective of XLA's, in which one rank stands alone.
STANDS = """
import os, threading
import jaxcoll
jaxcoll.config.timeout_s = 0.5
jaxcoll.simulate_cpu_devices(2)
import jax, jax.numpy as jnp
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
f = jax.jit(jax.shard_map(
    lambda x: jax.lax.cond(x.sum() > 0, lambda x: jaxcoll.all_reduce(x, "x"), lambda x: x, x),
    mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False))
threading.Timer(9, os._exit, [3]).start()
y = f(jnp.array([1.0, 0.0]))
try:
    float(y[0])
except Exception:
    print(f(jnp.array([1.0, 2.0])))
"""

@pytest.fixture
def waits(monkeypatch):
    """Of a process in which nothing else runs, looked at five times a second."""
    monkeypatch.setattr(standstill, "_is_busy", lambda: False)
    monkeypatch.setattr(standstill, "_is_in_a_call", lambda: False)
    monkeypatch.setattr(standstill.config, "_timeout_s", LIMIT_S)

    def look(seconds: float, *, seen: Look = AWAITS, period_s: float = 0.2, begin=0) -> list[float]:
        """Returns when something was said; until `begin` it is elsewhere at each look."""
        found, now = standstill.Standstill(), 0.0
        said = []
        while (now := now + period_s) < seconds:
            moved = seen._replace(functions=((7, (f"load {now}",)),)) if now < begin else seen
            if found.look(moved._replace(stack=f"line {now}"), now) is not None:
                said.append(now)
        return said

    return look


def test_a_wait_is_reported_once(waits):
    (when,) = waits(60)
    assert LIMIT_S < when < LIMIT_S + 5


def test_what_is_no_standstill(waits, monkeypatch):
    assert not waits(60, seen=CALLS_BACK)  # XLA's limit is far
    assert not waits(60, seen=AWAITS._replace(phase=black_box.PYTHON))
    assert not waits(60, period_s=3.0)  # as a process that hardly gets its turns
    with monkeypatch.context() as patch:
        patch.setattr(standstill, "_is_in_a_call", lambda: True)
        assert not waits(60)
    monkeypatch.setattr(standstill, "_is_busy", lambda: True)
    assert not waits(60)


def test_no_callback_is_waited_for_longer_than_by_xla(waits, monkeypatch):
    monkeypatch.setattr(standstill, "xla_limit_s", lambda: 40)
    (when,) = waits(60, seen=CALLS_BACK)
    assert 20 < when < 25
    (when,) = waits(60, seen=CALLS_BACK, begin=20)  # other callbacks until then
    assert 40 < when < 45
    with monkeypatch.context() as patch:
        patch.setattr(standstill, "_is_busy", lambda: True)  # such as the callback
        (when,) = waits(60, seen=CALLS_BACK)
        assert 20 < when < 25
        all_devices = CALLS_BACK._replace(callbacks=standstill.jax.local_device_count())
        assert not waits(60, seen=all_devices)
        assert not waits(60, seen=CALLS_BACK, begin=60)
    monkeypatch.setattr(standstill.jax, "local_device_count", lambda: 1)
    assert not waits(60, seen=CALLS_BACK)  # with whom it would wait


def test_what_has_computed_for_long_and_stands_still_then(waits, monkeypatch):
    """XLA's limit began when the first device came, and may be over by then."""
    monkeypatch.setattr(standstill, "xla_limit_s", lambda: 40)
    monkeypatch.setattr(standstill.config, "_timeout_s", None)
    looks = iter(range(10_000))
    monkeypatch.setattr(standstill, "_is_busy", lambda: next(looks) < 100)
    (when,) = waits(90)
    assert 20 + 20 < when < 20 + 30


@pytest.mark.parametrize("seen_by", ["the extension", "Linux", "its time"])
def test_who_computes_is_busy(seen_by, monkeypatch):
    """In Python its time alone shows it: a thread sleeps while another one has the interpreter."""
    if seen_by == "its time":
        monkeypatch.setattr(standstill, "_TASKS", "/none")
    else:
        monkeypatch.setattr(standstill, "_spent_by_others_s", lambda: 0.0)
    if seen_by != "the extension":
        monkeypatch.setattr(standstill._native, "core", lambda: None)
    ends = threading.Event()

    def compute():
        while not ends.is_set():
            if seen_by != "its time":
                hashlib.sha256(BLOCK)  # which leaves the interpreter to others

    def looks() -> list[float]:
        still, found = standstill.Stillness(), []
        still.begin(time.monotonic())
        for _ in range(8):
            time.sleep(0.05)
            found.append(still.look(time.monotonic(), AWAITS))
        return found

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        assert 0.0 in looks()  # it began anew
    finally:
        ends.set()
        thread.join()
    assert 0.0 not in looks()


@pytest.mark.full
@pytest.mark.skipif(native_missing() is not None, reason="the errors of the engine lead there")
def test_it_is_said_before_the_limit_of_xla(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STANDS],
        env={**os.environ, "JAXCOLL_DUMP_DIR": str(tmp_path), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3, done.stderr
    assert "It may stand in a collective of XLA's own, which ends the process 80 s" in done.stderr
    assert "all_reduce over" in done.stderr
    assert (tmp_path / "process_0.json").exists()

"""Steps and blocks that don't end on jax.lax, where nothing of ours waits, are reported."""

import logging
import time

import jax
import numpy as np
import pytest
from checks import mapped, mesh, zero_late

import jaxcoll
from jaxcoll import _watch

SLEEP_S = 1.2


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(_watch, "_GRACE_S", 0.1)
    before = jaxcoll.config.timeout_s
    jaxcoll.config.timeout_s = 0.3
    yield
    jaxcoll.config.timeout_s = before


def stuck(x):
    return jax.lax.psum(x + zero_late("x", rank=0, seconds=SLEEP_S), "x")


def reports(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "has not ended within" in r.getMessage()]


def test_a_step_that_does_not_end(caplog):
    caplog.set_level(logging.ERROR, "jaxcoll")
    step = jaxcoll.watch(jax.jit(mapped(stuck, mesh(2))))
    with jaxcoll.using(backend="lax"):
        result = step(np.ones((2, 3), np.float32))
        assert np.asarray(result).tolist() == [[2, 2, 2]] * 2
        (report,) = reports(caplog)
    assert "step 1 of " in report
    assert "all_reduce sum" in report  # the collectives of the program
    assert "in a callback" in report
    assert "in sleep" in report


def test_a_block_that_does_not_end_is_reported_once(caplog):
    caplog.set_level(logging.ERROR, "jaxcoll")
    with jaxcoll.watch():
        time.sleep(SLEEP_S)
    (report,) = reports(caplog)
    assert "the watched block has not ended within 0." in report
    assert "test_watch.py" in report


def test_a_block_that_goes_on_is_no_hang(caplog):
    """However long it takes in all, as that around the loop of a training."""
    with jaxcoll.watch():
        for _ in range(12):
            time.sleep(0.1)
            sum(range(100_000))
    assert not reports(caplog)


def test_step_functions_of_one_name_are_counted_apart():
    steps = [jaxcoll.watch(lambda x: x) for _ in range(2)]
    before = dict(_watch._Thread.get().begun)
    for step, count in zip(steps, (1, 2), strict=True):
        for _ in range(count):
            step(1)
    now = _watch._Thread.get().begun
    assert sorted(now[name] for name in now.keys() - before.keys()) == [1, 2]


def test_what_ends_is_not_reported(caplog):
    step = jaxcoll.watch(jax.jit(lambda x: x + 1))
    x = np.float32(0)
    for _ in range(20):
        x = step(x)
    jax.block_until_ready(x)
    time.sleep(0.6)
    assert not reports(caplog)


def test_donated_results_are_no_hang(caplog):
    step = jaxcoll.watch(jax.jit(lambda x: x + 1, donate_argnums=0))
    x = jax.numpy.zeros(8)
    for _ in range(20):
        x = step(x)
    jax.block_until_ready(x)
    time.sleep(0.6)
    assert not reports(caplog)


def test_to_compile_takes_no_time_of_the_limit(caplog):
    def slow_to_trace(x):
        time.sleep(SLEEP_S)
        return x

    jaxcoll.watch(jax.jit(slow_to_trace))(1.0)
    assert not reports(caplog)


def test_neither_does_a_pause(caplog):
    with jaxcoll.watch(), jaxcoll.allow_pause(60):
        time.sleep(SLEEP_S)
    assert not reports(caplog)


def test_neither_does_one_of_another_process(caplog, monkeypatch):
    """As it tells those that watch."""
    card = {"begun": {}, "phase": "in Python", "stack": "", "is_excused": True}
    monkeypatch.setattr(_watch._Thread, "_cards", lambda self: {1: card})
    with jaxcoll.watch():
        time.sleep(SLEEP_S)
    assert not reports(caplog)

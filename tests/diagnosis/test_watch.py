"""Steps and blocks that don't end on jax.lax, where nothing of ours waits, are reported."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from checks import mapped, mesh, native_missing, zero_late

import jaxcoll
from jaxcoll import _watch
from jaxcoll.diagnosis import standstill

SLEEP_S = 1.2


# The thread that watches is inside of an extension, which lets Python go on, nearly all the time.
TELLS = """
import time
import jax
import jaxcoll
from jaxcoll import _compat, _native, _watch

class Client:
    def key_value_set(self, *args, **kwargs):
        for _ in range(20):
            _native.core().is_busy()

jax.distributed.is_initialized = lambda: True
_compat.distributed_client = Client
_watch._LOOK_S = _watch._TELL_S = 1e-4
_watch.json.dumps = lambda card: str(time.monotonic())
with jaxcoll.watch():
    time.sleep(0.2)
"""


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


def lists(caplog, text):
    """Tells whether a list of collectives with this text follows a report."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        said = [r.getMessage() for r in caplog.records]
        if any("the collectives of" in each and text in each for each in said):
            return True
        time.sleep(0.01)
    return False


def test_a_step_that_does_not_end(caplog):
    caplog.set_level(logging.ERROR, "jaxcoll")
    step = jaxcoll.watch(jax.jit(mapped(stuck, mesh(2))))
    with jaxcoll.using(backend="lax"):
        result = step(np.ones((2, 3), np.float32))
        assert np.asarray(result).tolist() == [[2, 2, 2]] * 2
        (report,) = reports(caplog)
    assert "step 1 of " in report
    assert lists(caplog, "all_reduce sum")
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


@pytest.fixture
def xlas_limit(monkeypatch):
    """Of a second, where ours is far."""
    jaxcoll.config.timeout_s = 300
    monkeypatch.setattr(standstill, "SHORT_S", 0.2)
    monkeypatch.setattr(standstill, "xla_limit_s", lambda: 1)
    monkeypatch.setattr(_watch, "xla_limit_s", lambda: 1)


@pytest.mark.usefixtures("xlas_limit")
@pytest.mark.parametrize("how", ["step", "block", "block of a thread"])
def test_a_stuck_callback_is_reported_before_xla_ends_the_process(how, caplog):
    """Which it does when the other devices have waited for its limit."""
    caplog.set_level(logging.ERROR, "jaxcoll")
    step = jax.jit(mapped(stuck, mesh(2)))
    x = np.ones((2, 3), np.float32)

    def block():
        with jaxcoll.watch(), jaxcoll.using(backend="lax"):
            jax.block_until_ready(step(x))

    if how == "step":
        with jaxcoll.using(backend="lax"):
            jax.block_until_ready(jaxcoll.watch(step)(x))
    elif how == "block":
        block()
    else:
        thread = threading.Thread(target=block)
        thread.start()
        thread.join()
    (report,) = reports(caplog)
    assert "if it stands in a collective of XLA's own, XLA ends it 1 s after its" in report
    assert lists(caplog, "all_reduce")
    assert "in sleep" in report
    assert how == "step" or "in block\n" in report.partition("in a callback")[0]


# Devices that jaxcoll has not made, so that nothing has moved XLA's limit away.
STUCK = """
import sys, time
if sys.argv[2] == "without the extension":
    sys.modules["jaxcoll._core"] = None
import jax, jaxcoll, numpy as np
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def load(rank):
    time.sleep(60 * rank)
    return np.float32(rank)
def f(x):
    here = jax.ShapeDtypeStruct((), np.float32)
    return jax.lax.psum(x + jax.pure_callback(load, here, jax.lax.axis_index("x")), "x")
step = jax.jit(jax.shard_map(
    f, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P(), check_vma=False))
if sys.argv[1] == "watched":
    step = jaxcoll.watch(step)
else:
    from jaxcoll.diagnosis import watcher
    watcher.start()
jax.block_until_ready(step(np.ones(2, np.float32)))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("watched", "without the extension"),
        ("watched", "with it"),
        pytest.param(
            *("not watched", "with it"),
            marks=pytest.mark.skipif(native_missing() is not None, reason="its watchdog looks"),
        ),
    ],
)
def test_it_is_said_and_dumped_before_xla_ends_the_process(how, where, tmp_path):
    limit = "--xla_cpu_collective_call_%s_timeout_seconds=%d"
    limits = f"{limit % ('warn_stuck', 1)} {limit % ('terminate', 6)}"
    done = subprocess.run(
        [sys.executable, "-c", STUCK, how, where],
        env={
            **os.environ,
            "JAXCOLL_DUMP_DIR": str(tmp_path),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {limits}",
            "JAX_NUM_CPU_DEVICES": "-1",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "in load" in done.stderr
    assert ("all_reduce" in done.stderr) == (how == "watched")
    if where == "with it" and native_missing() is None:
        file = tmp_path / "process_0.json"
        assert f"dumped to {file}" in done.stderr
        assert "in load" in file.read_text()


@pytest.mark.usefixtures("xlas_limit")
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_callback_that_computes(goes_on, caplog, monkeypatch):
    """XLA does not wait for it any longer, if it goes on or not; who goes on is not suspected."""
    slower = 3 if goes_on else 1  # it is to be seen going on, by a thread that waits for its turns
    for module in (standstill, _watch):
        monkeypatch.setattr(module, "xla_limit_s", lambda: slower)

    def compute(x, left=24):
        ends = time.monotonic() + (slower * SLEEP_S / 24 if goes_on else 2 * SLEEP_S)
        while time.monotonic() < ends:
            pass
        return compute(x, left - 1) if goes_on and left > 1 else x

    def busy(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.lax.psum(jax.pure_callback(compute, shape, x), "x")

    with jaxcoll.using(backend="lax"):
        step = jaxcoll.watch(jax.jit(mapped(busy, mesh(2))))
        jax.block_until_ready(step(np.ones((2, 3), np.float32)))
    assert ["in compute" in report for report in reports(caplog)] == [True] * (not goes_on)


@pytest.mark.usefixtures("xlas_limit")
def test_what_is_not_jaxs_is_no_standstill(caplog):
    with jaxcoll.watch():
        time.sleep(SLEEP_S)
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
    """As it tells those that watch, as long as it tells it again and again."""
    card = {"begun": {}, "phase": "in Python", "stack": "line 7", "is_excused": True, "beat": 1}
    monkeypatch.setattr(_watch._Thread, "_cards", lambda self: {1: card})
    monkeypatch.setattr(_watch._compat, "process_id_and_count", lambda: (0, 2))
    _watch._Thread.get()._beats.clear()
    with jaxcoll.watch():
        time.sleep(SLEEP_S)
    assert not reports(caplog)
    monkeypatch.setattr(_watch, "_TELL_S", 0.1)
    monkeypatch.setattr(_watch, "_STALE_S", 0.3)
    _watch._Thread.get()._beats.clear()
    monkeypatch.setattr(_watch._Thread.get(), "begun", {})
    with jaxcoll.watch():
        time.sleep(3 * SLEEP_S)
    (report,) = reports(caplog)
    assert "\nprocess 1: it is in Python:\nline 7" in report


@pytest.mark.skipif(
    native_missing() is not None, reason="it is the extension that the thread is in"
)
def test_the_thread_ends_before_the_interpreter():
    done = subprocess.run([sys.executable, "-c", TELLS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

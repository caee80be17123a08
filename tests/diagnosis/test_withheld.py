"""Errors of which XLA tells the program later, or never."""

import os
import subprocess
import sys

import pytest
from checks import native_missing

from jaxcoll.diagnosis import black_box, withheld
from jaxcoll.diagnosis.stacks import Look

AWAITS = Look(black_box.AWAITING, "the stack", 0)
RUNS = Look(black_box.PYTHON, "the stack", 0)
# One device's part of a program never ends, and so JAX never learns that the others' failed.
WITHHOLDS = """
import os, threading
import jaxcoll
jaxcoll.config.timeout_s = 0.5
jaxcoll.simulate_cpu_devices(2)
import jax, jax.numpy as jnp
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def load(x):
    if x[0] > 1:
        threading.Event().wait()
    return x
f = jax.jit(jax.shard_map(
    lambda x: jaxcoll.all_reduce(jax.pure_callback(load, x, x), "x"),
    mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False))
threading.Timer(20, os._exit, [3]).start()
jax.block_until_ready(f(jnp.array([1.0, 2.0])))
"""


@pytest.fixture
def said(monkeypatch):
    """Looks at a process five times a second; what fails is in `failed`, by when."""

    def look(phases: dict[float, Look], failed: dict[str, float]) -> list[tuple[float, str]]:
        found = withheld.Withheld()
        texts = []
        for now in (0.2 * i for i in range(300)):
            there = [text for text, at in failed.items() if at <= now]
            monkeypatch.setattr(withheld.errors, "unseen", lambda there=there: there)
            seen = next(seen for begin, seen in reversed(phases.items()) if begin <= now)
            if (text := found.look(seen, now)) is not None:
                texts.append((now, text))
        return texts

    return look


def test_an_error_that_a_callback_keeps_from_the_program_is_said_once(said):
    calls_back = Look(black_box.CALLBACK, "the stack", 1)
    polls = {at: calls_back._replace(functions=((at, ("f",)),)) for at in (3, 4, 5, 6, 7, 8)}
    ((when, text),) = said({0: calls_back, **polls}, {"all_reduce failed": 4.0})
    assert 5 < when < 8
    assert "a callback is not over" in text
    assert text.endswith("\nall_reduce failed\nthis process:\nthe stack")


def test_one_that_a_device_keeps(said, monkeypatch):
    ((_, text),) = said({0: AWAITS}, {"all_reduce failed": 4.0})
    assert "It may stand in a collective of XLA's own" in text
    monkeypatch.setattr(withheld, "limit_before_xlas_s", lambda: withheld.math.inf)
    ((_, text),) = said({0: AWAITS}, {"all_reduce failed": 4.0})
    assert "a device of this process is not done.\nall_reduce failed" in text


def test_what_is_not_withheld(said):
    """What nobody waits for, and what has failed long before."""
    assert not said({0: RUNS}, {"all_reduce failed": 4.0})
    assert not said({0: RUNS, 9: AWAITS, 20: RUNS, 21: AWAITS}, {"all_reduce failed": 4.0})
    assert said({0: RUNS, 5: AWAITS}, {"all_reduce failed": 4.0})


@pytest.mark.full
@pytest.mark.skipif(native_missing() is not None, reason="the errors of the engine")
def test_an_error_is_said_though_a_callback_never_ends(tmp_path):
    script = tmp_path / "withholds.py"
    script.write_text(WITHHOLDS)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "JAXCOLL_DUMP_DIR": str(tmp_path), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3, done.stderr
    assert "jaxcoll: a call has failed, of which the program learns later" in done.stderr
    assert '\nall_reduce over "x" of f32[1]' in done.stderr
    assert f'in a callback:\nFile "{script}", line 10, in load' in done.stderr
    assert "a collective of XLA's own" not in done.stderr

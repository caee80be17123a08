"""`simulate_cpu_devices`: before JAX starts, or a clear error."""

import os
import re
import subprocess
import sys
from typing import Any

import jax
import pytest

import jaxcoll
from jaxcoll._environment import needed_environment


def run(script: str, **environment: str) -> str:
    """Runs a script in a process that knows nothing of this one's devices; returns its output."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PJRT_NPROC", "XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
    }
    return subprocess.run(
        [sys.executable, "-c", script],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


COUNT = "import jaxcoll; jaxcoll.simulate_cpu_devices({}); import jax; print(len(jax.devices()))"


@pytest.mark.parametrize("num_devices", [1, 3, 16])
def test_as_many_devices_as_asked_for(num_devices: int):
    assert run(COUNT.format(num_devices)).split() == [str(num_devices)]


def test_after_jax_was_imported():
    assert run("import jax; " + COUNT.format(5)).split() == ["5"]


def test_the_last_call_before_the_start_counts():
    again = "import jaxcoll; jaxcoll.simulate_cpu_devices(2); " + COUNT.format(3)
    assert run(again).split() == ["3"]


SHOW = """
import jaxcoll, os
jaxcoll.simulate_cpu_devices(8)
print(os.environ["PJRT_NPROC"], os.environ["XLA_FLAGS"])
"""


def test_the_environment_that_many_devices_need():
    threads, *flags = run(SHOW).split()
    assert int(threads) >= 2 * 8
    limits = dict(flag.split("=") for flag in flags)
    terminate = int(limits["--xla_cpu_collective_call_terminate_timeout_seconds"])
    warn = int(limits["--xla_cpu_collective_call_warn_stuck_timeout_seconds"])
    assert 300 < warn < terminate  # after jaxcoll.config.timeout_s


@pytest.mark.parametrize(
    ("devices", "cpus", "chosen", "expected"),
    [
        (1, 1, {}, 2),
        (1, 16, {}, 16),
        (8, 2, {}, 32),
        (8, 64, {}, 64),
        (1, 16, {"PJRT_NPROC": "3"}, 3),
        (1, 16, {"NPROC": "3"}, 3),
        (8, 64, {"PJRT_NPROC": "3"}, 32),
        (8, 2, {"PJRT_NPROC": "999"}, 999),
    ],
)
def test_no_more_threads_than_needed(
    devices: int, cpus: int, chosen: dict[str, str], expected: int
):
    """XLA divides its work among all of them, which costs time where there are fewer CPUs."""
    assert needed_environment(devices, cpus, chosen)["PJRT_NPROC"] == str(expected)


@pytest.mark.parametrize(("timeout", "least"), [("2", 40), ("100", 200), ("none", 10**6)])
def test_xlas_limit_follows_ours(timeout: str, least: int):
    _, *flags = run(SHOW, JAXCOLL_TIMEOUT_S=timeout).split()
    limits = dict(flag.split("=") for flag in flags)
    terminate = int(limits["--xla_cpu_collective_call_terminate_timeout_seconds"])
    assert least <= terminate < 100 * least
    assert timeout == "none" or terminate == least


def test_a_cell_that_runs_again():
    again = (
        SHOW
        + "import jax; jax.devices(); jaxcoll.simulate_cpu_devices(8); print(len(jax.devices()))"
    )
    assert run(again).split()[-1] == "8"


def test_the_users_own_environment_is_kept():
    own = "--xla_cpu_collective_call_terminate_timeout_seconds=77"
    threads, *flags = run(SHOW, PJRT_NPROC="999", XLA_FLAGS=f"--xla_dump_to= {own}").split()
    assert threads == "999"
    assert own in flags
    assert "--xla_dump_to=" in flags
    assert len([flag for flag in flags if "terminate_timeout" in flag]) == 1


def test_hundreds_of_steps_that_nobody_awaits():
    """XLA's own number of threads lets 33 of them hang."""
    steps = """
import jaxcoll
jaxcoll.simulate_cpu_devices(8)
import jax, numpy as np
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
mean = lambda x: jax.lax.psum(x, "x") / 8
f = jax.shard_map(mean, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
step, x = jax.jit(f), np.ones(100, np.float32)
for _ in range(300):
    x = step(x)
print(float(x.sum()))
"""
    assert run(steps).split() == ["100.0"]


def test_after_jax_has_started():
    jax.devices()
    text = (
        "simulate_cpu_devices(4): JAX has started already, with 8 cpu device(s). Call it first in "
        "the program, before anything that uses a device."
    )
    with pytest.raises(RuntimeError, match=re.escape(text)):
        jaxcoll.simulate_cpu_devices(4)


@pytest.mark.parametrize("num_devices", [0, -1, True, 2.0, "8", None], ids=str)
def test_numbers_that_make_no_sense(num_devices: Any):
    text = f"simulate_cpu_devices(num_devices): expected a positive int, got {num_devices!r}."
    with pytest.raises(ValueError, match=re.escape(text)):
        jaxcoll.simulate_cpu_devices(num_devices)

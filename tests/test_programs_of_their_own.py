"""What only a process of its own can show: forks, too few threads, an unknown JAX."""

import os
import subprocess
import sys
import textwrap

import pytest
from checks import native_missing

needs_native = pytest.mark.skipif(native_missing() is not None, reason="needs the native extension")

START = """
    import logging, os
    logging.basicConfig(format="LOG %(message)s")
    import jaxcoll
    import jax
    import numpy as np
    jax.config.update("jax_platforms", "cpu")

    def total(n=2):
        mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        f = lambda x: jaxcoll.all_reduce(x, "x")
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P()))
"""


def run(script: str, **variables: str) -> str:
    """Runs a script after START; returns what it printed and logged."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAXCOLL_BACKEND", "PJRT_NPROC", "NPROC", "XLA_FLAGS")
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(START) + textwrap.dedent(script)],
        env=environment | variables,
        timeout=120,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@needs_native
def test_a_fork_after_use_is_refused():
    said = run(
        """
        jaxcoll.simulate_cpu_devices(2)
        f, x = total(), np.arange(4.0)
        print("PARENT", f(x))
        child = os.fork()
        if child == 0:
            try:
                f(x)
            except RuntimeError as error:
                print("CHILD", error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print("PARENT", f(x))
        """
    )
    assert said.count("PARENT [2. 4.]") == 2
    assert 'CHILD all_reduce(x, "x"): this process was forked from one that had used' in said
    assert 'multiprocessing.get_context("spawn")' in said


@needs_native
def test_a_fork_before_use_is_fine():
    said = run(
        """
        child = os.fork()
        jaxcoll.simulate_cpu_devices(2)
        print(total()(np.arange(4.0)), flush=True)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        """
    )
    assert said.count("[2. 4.]") == 2


@needs_native
def test_too_few_threads_are_a_warning():
    script = """
        jax.config.update("jax_num_cpu_devices", 4)
        total(4)(np.arange(4.0))
        total(4)(np.arange(8.0))
    """
    said = run(script, PJRT_NPROC="5")
    assert said.count("LOG jaxcoll: XLA has 5 threads for 4 devices: ") == 1
    assert "PJRT_NPROC=16" in said
    assert "threads" not in run(script, PJRT_NPROC="8")


def test_simulated_devices_have_enough_threads():
    said = run(
        """
        jaxcoll.simulate_cpu_devices(4)
        total(4)(np.arange(4.0))
        """
    )
    assert "threads" not in said


def test_an_unknown_jax_runs_on_lax_and_says_how_to_upgrade():
    said = run(
        """
        from jax._src.lax import parallel
        groups, parallel.groups_before = parallel._replica_groups, parallel._replica_groups
        del parallel._replica_groups
        from jaxcoll import _compat
        assert "is not known" in _compat.problem()
        parallel._replica_groups = groups  # lax itself needs it
        jaxcoll.simulate_cpu_devices(2)
        print("SUM", total()(np.arange(4.0)))
        """
    )
    assert "SUM [2. 4.]" in said
    assert said.count("is not known to this version of jaxcoll") == 1
    assert "Upgrade with: pip install -U jaxcoll" in said

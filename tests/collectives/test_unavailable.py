"""Where the extension can't be had: lax with the reason logged, and an error for "native"."""

import os
import subprocess
import sys
import textwrap

import pytest

# Every script sums on two devices, first with what the environment says, then natively.
SUM = """
    import logging
    logging.basicConfig(format="LOG %(levelname)s %(name)s: %(message)s")
    import jaxcoll
    jaxcoll.simulate_cpu_devices(2)
    import jax
    import numpy as np

    def total(backend=None):
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        f = lambda x: jaxcoll.all_reduce(x, "x", backend=backend)
        g = jax.shard_map(f, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())
        return np.asarray(jax.jit(g)(np.arange(4.0))).tolist()

    print("SUM", total(), total())
    try:
        print("NATIVE", total("native"))
    except jaxcoll.NativeUnavailableError as error:
        print("REFUSED", error)
"""

MISSING = """
    import sys
    sys.modules["jaxcoll._core"] = None
"""

OTHER_ABI = """
    import sys, types
    core = types.ModuleType("jaxcoll._core")
    core.types = lambda: {}
    core.targets = lambda: {"jaxcoll_all_reduce": {"execute": object()}}
    core.set_timeout = core.set_compile_timeout = lambda seconds: None
    core.num_calls = lambda: 0
    sys.modules["jaxcoll._core"] = core
"""

LINKER = """
    import sys, types
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "jaxcoll._core":
                raise ImportError("_core.so: undefined symbol: _ZN3xla3ffi")
    sys.meta_path.insert(0, Finder)
"""


def run(*parts: str, backend: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "JAXCOLL_BACKEND"}
    if backend:
        environment["JAXCOLL_BACKEND"] = backend
    command = [sys.executable, "-c", "".join(textwrap.dedent(part) for part in parts)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("extension", "reason"),
    [
        (MISSING, "jaxcoll was installed without its native extension for this Python"),
        (LINKER, "the native extension can't be loaded (_core.so: undefined symbol"),
        (OTHER_ABI, "XLA refused the native extension, which was built for another jaxlib ("),
    ],
    ids=["missing", "linker", "other_abi"],
)
def test_lax_serves_and_the_reason_is_logged_once(extension: str, reason: str):
    result = run(extension, SUM)
    assert result.returncode == 0, result.stderr
    assert "SUM [2.0, 4.0] [2.0, 4.0]" in result.stdout
    logged = [line for line in result.stderr.splitlines() if line.startswith("LOG WARNING jaxcoll")]
    assert len(logged) == 1
    assert reason in logged[0]
    assert logged[0].endswith("collectives run on jax.lax.")
    refused = next(line for line in result.stdout.splitlines() if line.startswith("REFUSED"))
    assert 'all_reduce: backend="native" can\'t be served: ' in refused
    assert reason in refused
    assert 'Use backend="auto"' in refused


def test_nothing_is_logged_where_lax_was_asked_for():
    result = run(MISSING, SUM.replace('total("native")', "None"), backend="lax")
    assert result.returncode == 0, result.stderr
    assert "LOG" not in result.stderr


def test_the_environment_may_insist_on_native():
    result = run(MISSING, SUM, backend="native")
    assert result.returncode == 1
    assert 'NativeUnavailableError: all_reduce: backend="native" can\'t be served' in result.stderr


def test_an_unknown_jax_is_served_with_lax():
    forget = """
        import jax._src.lax.parallel as parallel
        original = parallel._replica_groups
        import jaxcoll._compat as compat
        del parallel._replica_groups
        assert "_replica_groups" in compat.problem()
        parallel._replica_groups = original  # lax needs it
    """
    result = run(forget, SUM)
    assert result.returncode == 0, result.stderr
    assert "SUM [2.0, 4.0] [2.0, 4.0]" in result.stdout
    assert "is not known to this version of jaxcoll" in result.stdout

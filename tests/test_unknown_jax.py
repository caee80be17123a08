"""On a JAX without the private names that we use, everything runs on lax, and says so."""

import importlib
import os
import socket
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from jaxcoll import _compat, _coordination

CHECKS = {
    _compat.problem: _compat.PRIVATE_NAMES,
    _compat.distributed_problem: _compat.DISTRIBUTED_NAMES,
    _compat.door_problem: _compat.DOOR_NAMES,
}
NAMES = [
    (check, module, name)
    for check, table in CHECKS.items()
    for module, names in table.items()
    for name in names
]


@pytest.mark.parametrize("check", CHECKS)
def test_this_jax_has_them_all(check: Any):
    assert check() is None


@pytest.mark.parametrize(("check", "module", "name"), NAMES, ids=[name for *_, name in NAMES])
def test_each_missing_name_is_a_problem(
    check: Any, module: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    holder = importlib.import_module(module)
    *owner, last = name.split(".")
    for part in owner:
        holder = getattr(holder, part)
    if hasattr(holder, last):
        monkeypatch.delattr(holder, last)
    if last in getattr(holder, "__annotations__", {}):
        monkeypatch.delitem(holder.__annotations__, last)
    problem = check.__wrapped__()
    monkeypatch.undo()
    assert problem is not None
    assert problem.endswith(f"({module}.{name} is missing)")


def test_a_jaxlib_without_the_service_that_the_launcher_runs(monkeypatch: pytest.MonkeyPatch):
    from jaxlib import _jax

    assert _coordination.problem() is None
    monkeypatch.delattr(_jax, "get_distributed_runtime_service")
    problem = _coordination.problem()
    assert problem is not None
    assert problem.endswith("(jaxlib._jax.get_distributed_runtime_service is missing)")


# Whatever of _compat is still used fails, as if JAX had nothing of it.
FORGET = """
    import logging
    logging.basicConfig(format="LOG %(message)s")
    import types
    import jaxcoll
    from jaxcoll import _compat

    def missing(*_, **__):
        raise AttributeError("a private name of JAX")

    for name, value in vars(_compat).copy().items():
        if isinstance(value, types.FunctionType) and value.__module__ == "jaxcoll._compat":
            setattr(_compat, name, missing)
    _compat.problem = lambda: "jax 99 is not known to this version of jaxcoll (x is missing)"
"""
UNKNOWN = (
    FORGET
    + """
    jaxcoll.simulate_cpu_devices(4)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    ring = [(i, (i + 1) % 4) for i in range(4)]
    xs = np.arange(16.0, dtype=np.float32).reshape(4, 4) + 1
    at_3 = lambda x: lax.psum(jnp.where(lax.axis_index("x") == 3, x, 0), "x")
    PAIRS = {
        "sum": (lambda x, **k: jaxcoll.all_reduce(x, "x", **k), lambda x: lax.psum(x, "x")),
        "mean": (
            lambda x, **k: jaxcoll.all_reduce(x, "x", op="mean", **k),
            lambda x: lax.pmean(x, "x"),
        ),
        "gather": (
            lambda x, **k: jaxcoll.all_gather(x, "x", **k), lambda x: lax.all_gather(x, "x")
        ),
        "scatter": (
            lambda x, **k: jaxcoll.reduce_scatter(x, "x", tiled=True, op="mean", **k),
            lambda x: lax.psum_scatter(x, "x", tiled=True) / 4,
        ),
        "all_to_all": (
            lambda x, **k: jaxcoll.all_to_all(x, "x", 0, 0, tiled=True, **k),
            lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True),
        ),
        # lax's own untiled forms have a wrong transpose and a wrong rule for vmap.
        "scatter untiled": (
            lambda x, **k: jaxcoll.reduce_scatter(x, "x", **k),
            lambda x: lax.psum_scatter(x, "x", tiled=True)[0],
        ),
        "all_to_all untiled": (
            lambda x, **k: jaxcoll.all_to_all(x[:, None] + jnp.zeros(3), "x", 0, 1, **k),
            lambda x: lax.all_to_all(x[None] + jnp.zeros((3, 1)), "x", 1, 1, tiled=True),
        ),
        "ppermute": (
            lambda x, **k: jaxcoll.ppermute(x, "x", ring, **k),
            lambda x: lax.ppermute(x, "x", ring),
        ),
        "broadcast": (lambda x, **k: jaxcoll.broadcast(x, "x", root=3, **k), at_3),
    }

    def mapped(f, check_vma=True):
        body = lambda x: f(x[0])[None]
        spec = jax.P("x")
        return jax.shard_map(
            body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
        )
"""
)


def run(script: str) -> str:
    """Runs a script after UNKNOWN; returns what it printed and logged."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(UNKNOWN) + textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_values_and_gradients_are_those_of_lax():
    said = run(
        """
        for name, (ours, twin) in PAIRS.items():
            for check_vma in (True, False):
                for transform in (
                    lambda f: f,
                    lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum()),
                    lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x + 1])),
                ):
                    got, want = (
                        np.asarray(jax.jit(mapped(transform(f), check_vma))(xs))
                        for f in (ours, twin)
                    )
                    np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)
        print("DONE")
        """
    )
    assert "DONE" in said
    assert said.count("LOG") == 1
    assert "LOG jaxcoll: jax 99 is not known" in said
    assert "collectives run on jax.lax. Upgrade with: pip install -U jaxcoll" in said


def test_what_lax_has_not():
    run(
        """
        ints = np.arange(16).reshape(4, 4)
        for op, expected in (
            ("max", ints.max(0)),
            ("min", ints.min(0)),
            ("prod", (ints + 1).prod(0)),
            ("and", np.bitwise_and.reduce(ints)),
            ("or", np.bitwise_or.reduce(ints)),
        ):
            def total(x):
                return jaxcoll.all_reduce(x[0] + (op == "prod"), "x", op=op)

            f = jax.shard_map(total, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())
            np.testing.assert_array_equal(jax.jit(f)(ints), expected, err_msg=op)
        far = np.array([[-np.inf, 1.0], [np.inf, 3e38], [np.inf, 3e38], [0.0, 3e38]], np.float32)
        highest = mapped(lambda x: jaxcoll.all_reduce(x, "x", op="max"))(far)
        np.testing.assert_array_equal(highest, [[np.inf, np.float32(3e38)]] * 4)
        tied = np.array([[1.0], [3.0], [3.0], [2.0]])
        grad = jax.grad(lambda x: jaxcoll.all_reduce(x, "x", op="max").sum())
        shares = np.asarray(mapped(grad)(tied))[:, 0]
        np.testing.assert_array_equal(shares, [0, 0.5, 0.5, 0])
        """
    )


def test_native_is_refused_and_everything_says_why():
    said = run(
        """
        for name, (ours, _) in PAIRS.items():
            try:
                jax.jit(mapped(lambda x: ours(x, backend="native")))(xs)
            except jaxcoll.NativeUnavailableError as error:
                assert "jax 99 is not known" in str(error)
            else:
                print("NOT REFUSED", name)
        jaxcoll.accelerate_lax()
        f = jax.jit(mapped(lambda x: lax.psum(x, "x")))
        np.testing.assert_array_equal(f(xs), [xs.sum(0)] * 4)
        print("EXPLAINED", jaxcoll.explain(f, xs))
        print("OFF", jaxcoll.info().off["native path"])
        """
    )
    assert "NOT REFUSED" not in said
    assert "EXPLAINED no collectives could be listed" in said
    assert "OFF jax 99 is not known" in said


SCATTERS = (
    FORGET
    + """
    import sys
    import jax
    import jax.numpy as jnp
    import numpy as np

    jax.distributed.initialize(sys.argv[1], 4, int(sys.argv[2]))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))

    def check(f, xs, expected, check_vma=True):
        x = jax.make_array_from_callback(xs.shape, sharding, lambda at: xs[at])
        program = jax.jit(jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=jax.P("x"),
                                        out_specs=jax.P("x"), check_vma=check_vma))
        assert "reduce-scatter" not in program.lower(x).compile().as_text()
        (shard,) = program(x).addressable_shards
        assert shard.data.dtype == expected.dtype, shard.data.dtype
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])

    for dtype in (np.float32, jnp.bfloat16, np.int8):
        xs = np.arange(4 * 24).reshape(4, 3, 8).astype(dtype)
        sums = xs.sum(0, dtype=dtype)
        tiled = np.moveaxis(sums.reshape(3, 4, 2), 1, 0)
        check(lambda x: jaxcoll.reduce_scatter(x, "x", scatter_dimension=1, tiled=True), xs, tiled)
        xs = np.swapaxes(xs, 1, 2)[:, :4]
        check(lambda x: jaxcoll.reduce_scatter(x, "x"), xs, xs.sum(0, dtype=dtype))
    ones = np.ones((4, 8), np.float32)
    slope = jax.grad(lambda x: (jaxcoll.reduce_scatter(x, "x", tiled=True, op="mean") ** 2).sum())
    check(slope, ones, ones / 2)
    groups = [[3, 0], [1, 2]]
    within = lambda x: jaxcoll.reduce_scatter(x, "x", axis_index_groups=groups)
    xs = np.arange(8, dtype=np.float32).reshape(4, 2)
    expected = np.empty(4, np.float32)
    for group in groups:
        expected[group] = xs[group].sum(0)
    check(within, xs, expected, check_vma=False)  # with typed axes lax's psum takes no groups
    check(jax.vmap(within), np.stack([xs, xs], 1), np.stack([expected, expected], 1), False)
    print("DONE", flush=True)
"""
)


def test_sums_of_several_processes_are_not_scattered_by_gloo():
    """Which loses parts of them at times."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCATTERS), address, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        )
        for rank in range(4)
    ]
    try:
        for rank in ranks:
            said, _ = rank.communicate(timeout=200)
            assert rank.returncode == 0, said
            assert "DONE" in said
    finally:
        for rank in ranks:
            rank.kill()

"""`accelerate_lax`: programs that know jax.lax alone, with the switch off and on."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_same, auto_is_native, counted_calls, mapped, mesh, native_missing
from flax import nnx
from helpers import EXAMPLES, OPS, SIZES, Op, blocks
from jax import lax
from programs import DERIVATIVES, TRANSFORMATIONS

import jaxcoll

needs_native = pytest.mark.skipif(native_missing() is not None, reason="needs the native extension")


def assert_accelerated(f: Any, *arguments: Any, native: bool = True) -> Any:
    """Asserts that `f`, compiled, gives the same with the switch on, through native calls."""
    with counted_calls() as off:
        plain = jax.block_until_ready(f(*arguments))
    with jaxcoll.accelerate_lax(), counted_calls() as on:
        fast = jax.block_until_ready(f(*arguments))
    assert_same(fast, plain)
    assert jax.tree.map(jax.typeof, fast) == jax.tree.map(jax.typeof, plain)
    assert off.calls == 0
    assert (on.calls > 0) == (native and auto_is_native()), on.calls
    return fast


@pytest.mark.product(op=EXAMPLES, program=list(TRANSFORMATIONS), check_vma=(True, False))
def test_values(op: Op, program: str, check_vma: bool):
    twin = op.over("x")["twin"]
    f = mapped(lambda x: TRANSFORMATIONS[program](twin, x), mesh(4), check_vma=check_vma)
    assert_accelerated(jax.jit(f), blocks(op, 4))


SMOOTH = [op for op in EXAMPLES if op.differentiable]


@pytest.mark.slow
@pytest.mark.product(op=SMOOTH, program=list(DERIVATIVES), check_vma=(True, False))
def test_derivatives(op: Op, program: str, check_vma: bool):
    twin = op.over("x", smooth=True)["twin"]

    def derivatives(x: Any) -> Any:
        return [derivative(twin, x) for derivative in DERIVATIVES[program]]

    f = jax.jit(mapped(derivatives, mesh(3), check_vma=check_vma))
    with counted_calls() as off:
        plain = jax.block_until_ready(f(blocks(op, 3, np.float64)))
    with jaxcoll.accelerate_lax(), counted_calls() as on:
        fast = jax.block_until_ready(f(blocks(op, 3, np.float64)))
    assert_same(fast, plain, rtol=1e-12)
    assert off.calls == 0
    assert (on.calls > 0) == auto_is_native()


@pytest.mark.alike
@pytest.mark.product(op=OPS, size=SIZES)
def test_under_pmap(op: Op, size: int):
    f = jax.pmap(op.over("ranks")["twin"], axis_name="ranks", devices=jax.devices()[:size])
    assert_accelerated(f, blocks(op, size), native=size > 1)


@pytest.mark.parametrize("op", [op for op in EXAMPLES if op.grouped], ids=lambda op: op.name)
def test_groups(op: Op):
    groups = [[3, 0], [1, 2]]
    twin = op.over("x", axis_index_groups=groups)["twin"]
    xs = np.concatenate([blocks(op, 2)] * 2)
    assert_accelerated(jax.jit(mapped(twin, mesh(4), check_vma=False)), xs)


@pytest.mark.parametrize("axes", [("x", "y"), "y"], ids=str)
@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_tuples_of_axes(op: Op, axes: Any):
    over = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    xs = blocks(op, 4)

    def body(x: Any) -> Any:
        return op.over(axes)["twin"](x[0])[None]

    f = jax.shard_map(body, mesh=over, in_specs=jax.P(("x", "y")), out_specs=jax.P(("x", "y")))
    if isinstance(axes, str):
        xs = np.stack([blocks(op, 2)[i] for i in (0, 1, 0, 1)])
    assert_accelerated(jax.jit(f), xs)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "bfloat16", "complex64"])
def test_dtypes(dtype: str):
    xs = (np.arange(12).reshape(4, 3) % 3).astype(jnp.dtype(dtype))

    def f(x: Any) -> Any:
        extrema = [] if dtype == "complex64" else [lax.pmax(x, "x"), lax.pmin(x, "x")]
        return [lax.psum(x, "x"), lax.all_gather(x, "x"), *extrema]

    assert_accelerated(jax.jit(mapped(f, mesh(4))), xs)


def test_nothing_at_all():
    def f(x: Any) -> Any:
        return lax.psum(x, "x"), lax.ppermute(x, "x", [(0, 1), (1, 0)])

    # XLA drops calls that make nothing.
    assert_accelerated(jax.jit(mapped(f, mesh(2))), np.zeros((2, 0, 3)), native=False)


def test_dimensions_of_the_array_are_laxs_own():
    with jaxcoll.accelerate_lax():
        total = jax.jit(lambda x: jax.vmap(lambda x: lax.psum(x, "v"), axis_name="v")(x))
        assert_same(total(np.arange(6.0).reshape(3, 2)), np.array([[6.0, 9.0]] * 3))


# ---- The switch ----------------------------------------------------------------------------------


@pytest.fixture
def auto() -> Iterator[None]:
    before = jaxcoll.config.backend
    jaxcoll.config.backend = "auto"
    yield
    jaxcoll.config.backend = before


def program() -> Any:
    return jax.jit(mapped(lambda x: lax.psum(x, "x"), mesh(2)))


def calls_of(f: Any) -> int:
    with counted_calls() as count:
        jax.block_until_ready(f(np.ones((2, 3))))
    return count.calls


@needs_native
@pytest.mark.usefixtures("auto")
def test_a_call_counts_until_it_is_undone():
    f = program()
    assert calls_of(f) == 0
    jaxcoll.accelerate_lax()
    try:
        assert calls_of(f) == 2
        with jaxcoll.accelerate_lax(False):
            assert calls_of(f) == 0
        assert calls_of(f) == 2
    finally:
        jaxcoll.accelerate_lax(False)
    assert calls_of(f) == 0


@needs_native
@pytest.mark.usefixtures("auto")
def test_a_block_counts_in_its_thread_alone():
    f, elsewhere = program(), []
    with jaxcoll.accelerate_lax():
        thread = threading.Thread(target=lambda: elsewhere.append(calls_of(program())))
        thread.start()
        thread.join()
        assert calls_of(f) == 2
    assert elsewhere == [0]
    assert calls_of(f) == 0


@needs_native
@pytest.mark.usefixtures("auto")
def test_a_call_counts_in_all_threads():
    elsewhere = []
    jaxcoll.accelerate_lax()
    try:
        thread = threading.Thread(target=lambda: elsewhere.append(calls_of(program())))
        thread.start()
        thread.join()
    finally:
        jaxcoll.accelerate_lax(False)
    assert elsewhere == [2]


@needs_native
@pytest.mark.usefixtures("auto")
def test_the_backend_counts_too():
    f = program()
    with jaxcoll.accelerate_lax():
        with jaxcoll.using(backend="lax"):
            assert calls_of(f) == 0
        assert calls_of(f) == 2


@needs_native
@pytest.mark.usefixtures("auto")
def test_our_functions_keep_their_backend():
    f = jax.jit(mapped(lambda x: jaxcoll.all_reduce(x, "x", backend="lax"), mesh(2)))
    g = jax.jit(mapped(lambda x: jaxcoll.all_gather(x, "x", backend="lax"), mesh(2)))
    with jaxcoll.accelerate_lax():
        assert calls_of(f) == calls_of(g) == 0


def test_an_argument_that_is_no_bool():
    with pytest.raises(TypeError, match="accelerate_lax: enabled: expected a bool, got 'yes'"):
        jaxcoll.accelerate_lax("yes")


@needs_native
@pytest.mark.parametrize(("value", "calls"), [("1", 2), ("0", 0), ("", 0)])
def test_the_environment(value: str, calls: int, monkeypatch: pytest.MonkeyPatch):
    script = """
import jaxcoll
jaxcoll.simulate_cpu_devices(2)
import jax
f = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
jax.block_until_ready(f(jax.numpy.ones((2, 3))))
import jaxcoll._native
print(jaxcoll._native.num_calls())
"""
    monkeypatch.setenv("JAXCOLL_ACCELERATE_LAX", value)
    monkeypatch.delenv("JAXCOLL_BACKEND", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=120, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(calls)]


def test_a_misspelt_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXCOLL_ACCELERATE_LAX", "yes")
    done = subprocess.run(
        [sys.executable, "-c", "import jaxcoll"], timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert 'JAXCOLL_ACCELERATE_LAX: expected one of "0", "1", got \'yes\'' in done.stderr


def test_one_switch_used_twice_and_a_call_in_between():
    from jaxcoll._config import accelerates_lax

    switch = jaxcoll.accelerate_lax()
    with switch, switch:
        assert accelerates_lax()
    assert not accelerates_lax()
    switch = jaxcoll.accelerate_lax()
    jaxcoll.accelerate_lax(True)  # somebody's own call, which stays
    with switch:
        pass
    assert accelerates_lax()
    jaxcoll.accelerate_lax(False)


def test_half_precision_is_rounded_once():
    """As the functions of this package do it: lax rounds at each step."""
    xs = np.array([[2048], [1], [1], [1]], np.float16)
    f = jax.jit(mapped(lambda x: lax.psum(x, "x"), mesh(4)))
    assert np.asarray(f(xs)).max() == 2048
    with jaxcoll.accelerate_lax():
        assert np.asarray(f(xs)).max() == (2052 if auto_is_native() else 2048)


# ---- Libraries -----------------------------------------------------------------------------------


def assert_native_in(library: str, f: Any, *arguments: Any) -> None:
    """Asserts that the library's own calls of lax are native while lax is accelerated."""
    with jaxcoll.accelerate_lax():
        rows = jaxcoll.explain(f, *arguments).rows
    own = [row for row in rows if f"/{library}/" in row.source]
    assert own
    assert {row.path for row in own} == {"native" if auto_is_native() else "lax"}


BATCH = np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)


def test_batch_norm_of_linen():
    norm = nn.BatchNorm(use_running_average=False, axis_name="x", momentum=0.9)
    variables = norm.init(jax.random.key(0), BATCH[0])

    def step(x: Any) -> Any:
        def loss(params: Any) -> Any:
            y, updates = norm.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return (y**3).sum(), updates

        (_, updates), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        return grads, updates

    f = jax.jit(mapped(step, mesh(4), check_vma=False))
    with jaxcoll.accelerate_lax():
        fast = jax.block_until_ready(f(BATCH))
    for got, want in zip(jax.tree.leaves(fast), jax.tree.leaves(f(BATCH)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert_native_in("flax", f, BATCH)


def test_batch_norm_of_nnx():
    norm = nnx.BatchNorm(3, axis_name="x", rngs=nnx.Rngs(0))
    graph, state = nnx.split(norm)

    def step(x: Any) -> Any:
        module = nnx.merge(graph, state, copy=True)
        return module(x), jax.tree.leaves(nnx.state(module, nnx.BatchStat))

    f = jax.jit(mapped(step, mesh(4), check_vma=False))
    with jaxcoll.accelerate_lax():
        fast = jax.block_until_ready(f(BATCH))
    for got, want in zip(jax.tree.leaves(fast), jax.tree.leaves(f(BATCH)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert_native_in("flax", f, BATCH)


def test_sharpness_aware_minimization_of_optax():
    optimizer = optax.contrib.sam(
        optax.sgd(0.125), optax.sgd(0.25), opaque_mode=True, batch_axis_name="x"
    )

    def steps(x: Any) -> Any:
        def grad(w: Any, _: int) -> Any:
            return jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

        w = jnp.arange(3, dtype=jnp.float32)
        state = optimizer.init(w)
        for _ in range(2):
            grads = lax.pmean(grad(w, 0), "x")
            updates, state = optimizer.update(grads, state, w, grad_fn=grad)
            w = optax.apply_updates(w, updates)
        return w

    f = jax.jit(mapped(steps, mesh(4), check_vma=False))
    with jaxcoll.accelerate_lax():
        fast = jax.block_until_ready(f(BATCH))
    np.testing.assert_allclose(fast, f(BATCH), rtol=1e-5, atol=1e-6)
    assert_native_in("optax", f, BATCH)

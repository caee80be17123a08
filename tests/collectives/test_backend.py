"""Which path runs: `backend=`, `using`, `config.backend`, and switches after compilation."""

import re
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import numpy as np
import pytest
from checks import assert_same, counted_calls, mapped, mesh, native_missing
from helpers import EXAMPLES, OPS, Op, blocks

import jaxcoll

needs_native = pytest.mark.skipif(native_missing() is not None, reason="needs the native extension")


@pytest.fixture(autouse=True)
def restored_backend() -> Iterator[None]:
    before = jaxcoll.config.backend
    yield
    jaxcoll.config.backend = before


def calls_of(f: Any, *arguments: Any) -> int:
    """Runs `f` and returns how many native calls that made."""
    with counted_calls() as count:
        jax.block_until_ready(f(*arguments))
    return count.calls


@needs_native
@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
@pytest.mark.parametrize("backend", ["native", "lax"])
def test_an_argument_goes_before_everything(op: Op, backend: Any):
    other: Any = "lax" if backend == "native" else "native"
    jaxcoll.config.backend = other
    xs = blocks(op, 4)
    f = jax.jit(mapped(op.over("x", backend=backend)["ours"], mesh(4)))
    with jaxcoll.using(backend=other):
        assert calls_of(f, xs) == (4 if backend == "native" else 0)
        assert_same(f(xs), op.reference(xs))


@needs_native
@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_a_switch_takes_effect_on_compiled_functions(op: Op):
    xs = blocks(op, 4)
    f = jax.jit(mapped(op.over("x")["ours"], mesh(4)))
    jaxcoll.config.backend = "auto"
    assert calls_of(f, xs) == 4
    jaxcoll.config.backend = "lax"
    assert calls_of(f, xs) == 0
    with jaxcoll.using(backend="native"):
        assert calls_of(f, xs) == 4
        with jaxcoll.using(backend="lax"):
            assert calls_of(f, xs) == 0
        assert calls_of(f, xs) == 4
    assert calls_of(f, xs) == 0
    jaxcoll.config.backend = "native"
    assert calls_of(f, xs) == 4


@needs_native
def test_a_switch_takes_effect_on_eager_maps_and_gradients():
    f = mapped(lambda x: jaxcoll.all_reduce(x, "x"), mesh(2))
    xs = np.ones((2, 3))
    for backend, expected in (("native", 2), ("lax", 0), ("native", 2)):
        with jaxcoll.using(backend=backend):
            assert calls_of(f, xs) == expected
    slope = jax.jit(jax.grad(lambda xs: (jax.jit(f)(xs) ** 2).sum()))
    for backend, expected in (("native", 2), ("lax", 0), ("native", 2)):
        with jaxcoll.using(backend=backend):
            assert calls_of(slope, xs) == expected


@needs_native
@pytest.mark.parametrize("op", [op for op in OPS if op.differentiable], ids=lambda op: op.name)
def test_lax_never_calls_native(op: Op):
    xs = blocks(op, 2, np.float64)

    def loss(xs: Any) -> Any:
        y = mapped(op.over("x", backend="lax")["ours"], mesh(2), check_vma=False)(xs)
        return (y * y).sum()

    f = jax.jit(jax.value_and_grad(loss))
    assert "jaxcoll_" not in f.lower(xs).as_text()
    assert calls_of(f, xs) == 0


@needs_native
@pytest.mark.parametrize("op", [op for op in OPS if op.differentiable], ids=lambda op: op.name)
def test_the_backward_pass_takes_the_path_of_the_call(op: Op):
    xs = blocks(op, 2, np.float64)

    def loss(xs: Any) -> Any:
        y = mapped(op.over("x", backend="native")["ours"], mesh(2), check_vma=False)(xs)
        return (y * y).sum()

    def num_calls(f: Any) -> int:
        return len(re.findall("custom_call @jaxcoll_(?!token)", jax.jit(f).lower(xs).as_text()))

    jaxcoll.config.backend = "lax"
    assert num_calls(loss) == 1
    assert num_calls(jax.grad(loss)) > 1


@needs_native
def test_using_is_a_matter_of_one_thread():
    xs = np.ones((2, 2))
    f = jax.jit(mapped(lambda x: jaxcoll.all_reduce(x, "x"), mesh(2)))
    jaxcoll.config.backend = "native"
    text = []
    with jaxcoll.using(backend="lax"):
        other = threading.Thread(target=lambda: text.append(f.lower(xs).as_text()))
        other.start()
        other.join()
        assert "jaxcoll_" not in f.lower(xs).as_text()
    assert "jaxcoll_" in text[0]


@pytest.mark.parametrize("wrong", ["naitve", "NATIVE", "", 3, None], ids=str)
@pytest.mark.parametrize("way", ["config", "using", "argument"])
def test_unknown_backends(way: str, wrong: Any):
    if way == "argument" and wrong is None:
        pytest.skip("None means config.backend")
    names = {"config": "jaxcoll.config: backend", "using": "jaxcoll.using: backend"}
    text = names.get(way, "all_reduce: backend")
    text = rf'{text}: expected one of "auto", "native", "lax", got {wrong!r}\.'
    text += r' Did you mean "native"\?' if wrong == "naitve" else ""

    def switch() -> None:
        if way == "config":
            jaxcoll.config.backend = wrong
        elif way == "using":
            with jaxcoll.using(backend=wrong):
                pass
        else:
            f = mapped(lambda x: jaxcoll.all_reduce(x, "x", backend=wrong), mesh(2))
            jax.eval_shape(f, np.zeros(2))

    with pytest.raises(ValueError, match=text):
        switch()


# ---- Where native can't serve --------------------------------------------------------------------


def partial_manual(op: Op, backend: Any) -> tuple[Any, Any]:
    """Returns a function that leaves one mesh axis to the compiler, and its operand."""

    def body(x: Any) -> Any:
        return op.ours(x[0], "x", backend=backend)[None]

    over = mesh(2, 2)
    f = jax.shard_map(body, mesh=over, in_specs=jax.P("x"), out_specs=jax.P("x"), axis_names={"x"})
    return jax.jit(f), blocks(op, 2)


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_native_refuses_a_partly_manual_mesh(op: Op):
    f, xs = partial_manual(op, "native")
    reason = r"shard_map leaves the mesh axes \['y'\] to the compiler"
    reason = reason if native_missing() is None else "."
    with pytest.raises(
        jaxcoll.NativeUnavailableError, match=rf'backend="native" .*{reason}'
    ) as info:
        f.lower(xs)
    assert 'Use backend="auto"' in str(info.value)


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_auto_serves_a_partly_manual_mesh_with_lax(op: Op):
    f, xs = partial_manual(op, "auto")
    with counted_calls() as count:
        assert_same(f(xs), op.reference(xs))
    assert count.calls == 0


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_exported_programs_run_on_lax(op: Op):
    xs = blocks(op, 2)
    operand = jax.ShapeDtypeStruct(
        xs.shape, xs.dtype, sharding=jax.NamedSharding(mesh(2), jax.P("x"))
    )
    f = jax.jit(mapped(op.over("x", backend="auto")["ours"], mesh(2)))
    exported = jax.export.export(f)(operand)
    assert "jaxcoll_" not in exported.mlir_module()
    sharded = jax.device_put(xs, operand.sharding)
    assert_same(exported.call(sharded), op.reference(xs))
    native = jax.jit(mapped(op.over("x", backend="native")["ours"], mesh(2)))
    with pytest.raises(jaxcoll.NativeUnavailableError, match=r"export|extension"):
        jax.export.export(native)(operand)

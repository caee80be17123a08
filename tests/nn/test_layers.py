"""Tensor-parallel layers: values and gradients are those of plain mathematics on one device."""

import functools as ft
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import auto_is_native
from helpers import SIZES
from layers import LAYERS, Layer, pure
from training import mesh_of

import jaxcoll
from jaxcoll.models import TransformerLM
from jaxcoll.parallel.regions import reduce_from


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def spec_of(ndim: int, split: int | None, *, batch: bool) -> jax.P:
    names: list[Any] = [None] * ndim
    if batch:
        names[0] = "data"
    if split is not None:
        names[split] = "tensor"
    return jax.P(*names)


def assert_close(actual: Any, expected: Any) -> None:
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10, err_msg=str(path))


def loss_of(y: Any, weights: Any) -> Any:
    """Gives each value of the result another weight."""
    return (jnp.sin(y) * weights).sum()


def weights_of(y: Any) -> np.ndarray:
    return np.random.default_rng(2).normal(size=y.shape)


def argnums(row: Layer) -> tuple[int, ...]:
    return (0,) if row.tokens else (0, 1)


@ft.cache
def expected(row: Layer) -> Any:
    """Returns value, result and gradients on a single device."""
    params = pure(row, "linen", mesh_of(tensor=1)).params

    def f(params: Any, x: Any) -> Any:
        y = row.plain(params, x)
        return loss_of(y, weights_of(y)), y

    return jax.jit(jax.value_and_grad(f, argnums(row), has_aux=True))(params, row.x())


OPTIONS = {
    "plain": {},
    "sequence": {"sequence_parallel": True},
    "overlap": {"sequence_parallel": True, "overlap": True},
}


@pytest.mark.slow("size")
@pytest.mark.product(
    library=("linen", "nnx"),
    place=("typed", "untyped", "global"),
    options=list(OPTIONS),
    size=SIZES,
)
def test_values_and_gradients(library: str, place: str, options: str, size: int):
    """Of all layers, inside a map, with and without typed axes, and on global arrays."""
    data = 2 if size < 8 and place != "untyped" else 1
    mesh = mesh_of(data=data, tensor=size)
    layers, specs, functions = {}, {}, {}
    for row in LAYERS:
        chosen = OPTIONS[options] if row.has_sequence else {}
        layer = layers[row.name] = pure(row, library, mesh, **chosen)
        split_in, split_out = row.splits(sequence_parallel=bool(chosen))
        of_x = spec_of(row.x().ndim, split_in, batch=data > 1)
        of_y = spec_of(expected(row)[0][1].ndim, split_out, batch=data > 1)
        specs[row.name] = (layer.specs, of_x, of_y)

        def f(params: Any, x: Any, weights: Any, layer: Any = layer, split: Any = split_out) -> Any:
            y = layer.apply(params, x)
            loss = loss_of(y, weights)
            if place == "global":
                return loss, y
            loss = loss if split is None else reduce_from(loss, "tensor")
            return reduce_from(loss, "data") if data > 1 else loss, y

        functions[row.name] = jax.value_and_grad(f, argnums(row), has_aux=True)

    def all_of(operands: Any) -> Any:
        return {name: f(*operands[name]) for name, f in functions.items()}

    operands = {
        row.name: (layers[row.name].params, row.x(), weights_of(expected(row)[0][1]))
        for row in LAYERS
    }
    if place != "global":
        out_specs = {
            row.name: ((jax.P(), specs[row.name][2]), specs[row.name][: len(argnums(row))])
            for row in LAYERS
        }
        all_of = jax.shard_map(
            all_of,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=out_specs,
            check_vma=place == "typed",
        )
    assert_close(jax.jit(all_of)(operands), {row.name: expected(row) for row in LAYERS})


# What layers call over the tensor axis, forwards, where communication is to overlap with matmuls.
OVERLAPPED = {
    "column": {"all_gather_matmul"},
    "column_gathered": {"all_gather_matmul", "all_gather"},
    "row": {"matmul_reduce_scatter"},
    "row_without_bias": {"matmul_reduce_scatter"},
    "embed": {"reduce_scatter"},
    "attend": {"all_gather_matmul"},
    "attention": {"all_gather_matmul", "matmul_reduce_scatter"},
    "attention_of_groups": {"all_gather_matmul", "matmul_reduce_scatter"},
    "mlp": {"all_gather_matmul", "matmul_reduce_scatter"},
    "mlp_gated": {"all_gather_matmul", "matmul_reduce_scatter"},
}


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_overlapping_layers_call_collective_matmuls(library: str):
    mesh = mesh_of(tensor=2)
    found = {}
    for row in LAYERS:
        if not row.has_sequence:
            continue
        layer = pure(row, library, mesh, **OPTIONS["overlap"])
        split_in, split_out = row.splits(sequence_parallel=True)
        f = jax.shard_map(
            layer.apply,
            mesh=mesh,
            in_specs=(layer.specs, spec_of(row.x().ndim, split_in, batch=False)),
            out_specs=spec_of(3, split_out, batch=False),
        )
        found[row.name] = {call.op for call in jaxcoll.explain(f, layer.params, row.x()).rows}
    assert found == OVERLAPPED


@pytest.mark.slow
@pytest.mark.product(place=("map", "global"), options=list(OPTIONS))
def test_every_collective_is_ours(place: str, options: str):
    """None is left to the sums that JAX would insert in the backward pass."""
    mesh = mesh_of(data=2, tensor=2)
    split: Any = {"mesh": mesh, **OPTIONS[options]}
    model = TransformerLM(8, 1, 16, 4, num_kv_heads=1, axis_name="tensor", **split)
    tokens = np.zeros((2, 4), int)
    boxed = jax.eval_shape(model.init, jax.random.key(0), tokens)
    specs, params = nn.get_partition_spec(boxed), nn.unbox(boxed)

    def loss(params: Any, tokens: Any) -> Any:
        logits = model.apply(params, tokens)
        return jaxcoll.vocab_parallel_cross_entropy(logits, tokens, mesh=mesh).mean()

    def on_rank(params: Any, tokens: Any) -> Any:
        params = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params)
        return jaxcoll.all_reduce(jax.grad(loss)(params, tokens), "data")

    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=(specs, jax.P("data")), out_specs=specs)
    rows = jaxcoll.explain(mapped if place == "map" else jax.grad(loss), params, tokens).rows
    assert {row.called for row in rows} == {"jaxcoll"}
    assert {row.axes for row in rows} == {("data",), ("tensor",)}
    if auto_is_native():
        assert {row.path for row in rows} <= {"native", "two-step"}

"""Tensor-parallel layers: values and gradients are those of plain mathematics on one device."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SIZES
from layers import LAYERS, Layer, pure
from training import mesh_of

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

"""Tensor-parallel layers: values and gradients of the layer on one device."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcoll
from jaxcoll import ShardedLinear, TPAsyncDense, TPDense

SIZES = (1, 2, 3, 4, 8)
IN, OUT = 24, 48


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def tensor_mesh(size: int, data: int = 1) -> Any:
    axes = {"data": data, "tensor": size}
    return jaxcoll.make_mesh(axes, devices=jax.devices()[: size * data])


def inputs(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(*shape, IN))


def loss(apply: Any, params: Any, x: Any) -> Any:
    return jnp.sin(apply({"params": params}, x)).sum()


def assert_close(actual: Any, expected: Any) -> None:
    actual = nn.meta.unbox(actual)
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-11, err_msg=str(path))


@pytest.mark.product(
    layer=(TPDense, TPAsyncDense),
    mode=("gather", "scatter", "none"),
    size=SIZES,
    bias=(True, False),
)
def test_on_global_arrays(layer: Any, mode: Any, size: int, bias: bool):
    x = inputs(5)
    plain = nn.Dense(OUT, use_bias=bias, param_dtype=jnp.float64)
    ours = layer(OUT, mesh=tensor_mesh(size), tp_mode=mode, use_bias=bias, param_dtype=jnp.float64)
    params: Any = plain.init(jax.random.key(1), x)["params"]
    assert_close(ours.init(jax.random.key(1), x)["params"], params)
    if bias:
        params["bias"] += jnp.arange(OUT)
    assert_close(jax.jit(ours.apply)({"params": params}, x), plain.apply({"params": params}, x))
    grads = jax.jit(jax.grad(lambda p, x: loss(ours.apply, p, x), argnums=(0, 1)))(params, x)
    assert_close(grads, jax.grad(lambda p, x: loss(plain.apply, p, x), argnums=(0, 1))(params, x))


@pytest.mark.slow("size")
@pytest.mark.product(layer=(TPDense, TPAsyncDense), first=("gather", "scatter"), size=SIZES)
def test_two_layers_inside_a_map(layer: Any, first: Any, size: int):
    """A rank holds its part of global weights; parts initialized there are those of the whole."""
    over = tensor_mesh(size)
    modes = (first, {"gather": "scatter", "scatter": "gather"}[first])
    x = inputs(3, 2)

    class Two(nn.Module):
        make: Any

        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = jnp.tanh(self.make(OUT, modes[0], "a")(x))
            return self.make(IN, modes[1], "b")(x)

    def ours(features: int, mode: Any, name: str) -> Any:
        return layer(features, tp_mode=mode, name=name, param_dtype=jnp.float64)

    def plain(features: int, mode: Any, name: str) -> Any:
        return nn.Dense(features, name=name, param_dtype=jnp.float64)

    params = Two(plain).init(jax.random.key(0), x)["params"]

    def body(params: Any, x: Any) -> Any:
        made = Two(ours).init(jax.random.key(0), x)["params"]
        y = Two(ours).apply({"params": params}, x)
        grads = jax.grad(lambda p: loss(Two(ours).apply, p, x))(params)
        return y, grads, nn.meta.unbox(made)

    spec = jax.tree.map(lambda _: jax.P(), params)
    for name, mode in zip("ab", modes, strict=True):
        spec[name] = {
            "kernel": jax.P(None, "tensor") if mode == "gather" else jax.P("tensor", None),
            "bias": jax.P("tensor"),
        }
    on_features = jax.P(None, None, "tensor")
    f = jax.shard_map(
        body, mesh=over, in_specs=(spec, on_features), out_specs=(on_features, spec, spec)
    )
    y, grads, made = jax.jit(f)(params, x)
    assert_close(y, Two(plain).apply({"params": params}, x))
    assert_close(grads, jax.grad(lambda p: loss(Two(plain).apply, p, x))(params))
    assert_close(made, params)


@pytest.mark.parametrize("batch", [4, 3])
def test_beside_data_parallelism(batch: int):
    """A batch that the mesh's other axes don't divide is computed whole by each."""
    over = tensor_mesh(2, data=4)
    x = inputs(batch)
    ours = TPDense(OUT, mesh=over)
    variables = ours.init(jax.random.key(0), x)
    y = jax.jit(ours.apply)(variables, x)
    batch_axis = ("data",) if batch == 4 else None
    assert y.sharding.spec in (jax.P(batch_axis, "tensor"), jax.P("data", "tensor"))
    plain = nn.Dense(OUT)
    unboxed: Any = nn.meta.unbox(variables)
    alone: Any = plain.apply(unboxed, x)
    np.testing.assert_allclose(y, alone, rtol=1e-6)
    grads = jax.jit(jax.grad(lambda p: loss(ours.apply, p, x)))(unboxed["params"])
    expected = jax.grad(lambda p: loss(plain.apply, p, x))(unboxed["params"])
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_specs():
    layer = TPDense(OUT, mesh=tensor_mesh(2), tp_mode="scatter")
    variables = jax.eval_shape(layer.init, jax.random.key(0), inputs(2))
    specs = nn.get_partition_spec(variables)["params"]
    assert specs == {"kernel": jax.P("tensor", None), "bias": jax.P("tensor")}


def test_errors():
    x, key = inputs(2), jax.random.key(0)
    with pytest.raises(ValueError, match=r"tp_mode: expected one of .gather.*got 'gathr'.*Did you"):
        TPDense(OUT, tp_mode="gathr").init(key, x)
    with pytest.raises(ValueError, match='TPAsyncDense: mesh: axis "tensor" is not mapped here'):
        TPAsyncDense(OUT).init(key, x)
    with pytest.raises(ValueError, match="TPDense: features: 10 can't be split over the 4 ranks"):
        TPDense(10, mesh=tensor_mesh(4)).init(key, x)
    with pytest.raises(ValueError, match="in_features: 25 can't be split over the 2 ranks"):
        TPDense(OUT, mesh=tensor_mesh(2)).init(key, np.ones((2, 25)))
    with pytest.raises(ValueError, match="axis_name: 'model' is not an axis of the mesh"):
        TPDense(OUT, mesh=tensor_mesh(2), axis_name="model").init(key, x)


# ---- NNX -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sharded_linear_equals_an_unsharded_layer(size: int):
    over = jaxcoll.make_mesh({"data": 8 // size, "model": size})
    x = inputs(8).astype(np.float32)
    ours = ShardedLinear(IN, OUT, rngs=nnx.Rngs(3), mesh=over)
    plain = nnx.Linear(IN, OUT, rngs=nnx.Rngs(3))
    assert ours.weight[...].sharding.spec == jax.P(None, "model")
    assert ours.bias[...].sharding.spec == jax.P("model")
    np.testing.assert_array_equal(ours.weight[...], plain.kernel[...])

    def objective(layer: Any, x: Any) -> Any:
        return jnp.sin(layer(x)).sum()

    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(ours, x), plain(x), rtol=1e-5, atol=1e-6)
    grads = nnx.jit(nnx.grad(objective, argnums=(0, 1)))(ours, x)
    expected = nnx.grad(objective, argnums=(0, 1))(plain, x)
    np.testing.assert_allclose(grads[0].weight[...], expected[0].kernel[...], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads[0].bias[...], expected[0].bias[...], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads[1], expected[1], rtol=1e-4, atol=1e-5)


def test_sharded_linear_errors():
    over = jaxcoll.make_mesh({"data": 2, "model": 4})
    with pytest.raises(ValueError, match="out_features: 6 can't be split over the 4 ranks"):
        ShardedLinear(4, 6, rngs=nnx.Rngs(0), mesh=over)
    with pytest.raises(ValueError, match="axis_name: 'model' is not an axis"):
        ShardedLinear(4, 8, rngs=nnx.Rngs(0), mesh=jaxcoll.make_mesh({"data": 8}))

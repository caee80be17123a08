"""xlstm-jax's page on data parallelism: five functions, whose signatures and texts it shows."""

import functools as ft
import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from training import mesh_of

import jaxcoll

# The page's are `xlstm_jax.distributed.data_parallel`.
from jaxcoll import (
    gather_array_with_mean_grads,
    gather_params,
    shard_module_params,
    shard_params,
    sync_gradients,
)

SIGNATURES = {
    "shard_params": "params, axis_name, min_weight_size=2**18",
    "gather_array_with_mean_grads": "x, axis, axis_name, gather_dtype=None, "
    "grad_scatter_dtype=None",
    "gather_params": "params, axis_name, gather_dtype=None, grad_scatter_dtype=None",
    "shard_module_params": "target, axis_name, min_weight_size=2**18, gather_dtype=None, "
    "grad_scatter_dtype=None",
    "sync_gradients": "grads, axis_names",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str):
    documented = inspect.signature(eval(f"lambda {SIGNATURES[name]}: None"))
    ours = inspect.signature(getattr(jaxcoll, name))
    assert [(p.name, p.default) for p in ours.parameters.values()] == [
        (p.name, p.default) for p in documented.parameters.values()
    ]


class Mlp(nn.Module):
    """Two dense layers, each by `dense`."""

    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.tanh(self.dense(24, name="first", param_dtype=jnp.float64)(x))
        return self.dense(8, name="second", param_dtype=jnp.float64)(x)


def loss(module: nn.Module, params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((module.apply({"params": params}, x) - y) ** 2)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_functions_together(size: int):
    """A module initialized, trained and gathered in parts is the module on one device."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(24, 16)), rng.normal(size=(24, 8))
        shard = ft.partial(shard_module_params, axis_name="data", min_weight_size=8)
        module, plain = Mlp(shard(nn.Dense)), Mlp()

        def train(x: Any, y: Any) -> Any:
            # The same key on every rank, so that they make parts of the same parameters.
            params = module.init(lax.pcast(jax.random.key(0), "data", to="varying"), x)["params"]
            held = params["first"]["kernel"].value.shape
            assert held == (16, 24 // size)
            for _ in range(4):
                grads = jax.grad(lambda p: loss(module, p, x, y))(params)
                grads = sync_gradients(grads, ("data",))
                params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
            return jax.tree.map(lambda leaf: leaf[None], gather_params(params, "data"))

        mapped = jax.shard_map(
            train,
            mesh=mesh_of(data=size),
            in_specs=(jax.P("data"), jax.P("data")),
            out_specs=jax.P("data"),
        )
        trained = jax.jit(mapped)(x, y)
        params = plain.init(jax.random.key(0), x)["params"]
        for _ in range(4):
            grads = jax.grad(lambda p: loss(plain, p, x, y))(params)
            params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
        for (path, got), want in zip(
            jax.tree_util.tree_leaves_with_path(trained), jax.tree.leaves(params), strict=True
        ):
            for rank in got:
                np.testing.assert_allclose(rank, want, rtol=0, atol=1e-10, err_msg=str(path))


def test_min_weight_size():
    """Parameters with fewer values will not be sharded."""

    def f(x: Any) -> Any:
        tree = {"fewer": jnp.zeros(2**18 - 2), "exactly": jnp.zeros(2**18)}
        parts = shard_params(tree, "data")
        assert isinstance(parts["exactly"], nn.Partitioned)
        assert not isinstance(parts["fewer"], nn.Partitioned)
        return x

    jax.shard_map(f, mesh=mesh_of(data=2), in_specs=jax.P(), out_specs=jax.P())(1.0)


@pytest.mark.product(gather_dtype=(None, jnp.bfloat16), grad_scatter_dtype=(None, jnp.bfloat16))
def test_dtypes(gather_dtype: Any, grad_scatter_dtype: Any):
    """Without: no casting, and the dtype of x for gradients."""

    def f(x: Any) -> Any:
        gather = ft.partial(
            gather_array_with_mean_grads,
            axis=0,
            axis_name="data",
            gather_dtype=gather_dtype,
            grad_scatter_dtype=grad_scatter_dtype,
        )
        whole = gather(x)
        assert whole.dtype == (gather_dtype or jnp.float32)
        return jax.grad(lambda x: (gather(x).astype(jnp.float32) * 1.01).sum())(x)

    mapped = jax.shard_map(f, mesh=mesh_of(data=4), in_specs=jax.P("data"), out_specs=jax.P("data"))
    grads = mapped(np.ones(8, np.float32))
    assert grads.dtype == np.float32
    rounded = gather_dtype is not None or grad_scatter_dtype is not None
    want = np.float32(jnp.bfloat16(1.01)) if rounded else np.float32(1.01)
    np.testing.assert_array_equal(grads, np.full(8, want))

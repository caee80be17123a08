"""What a pipeline computes for nobody is not seen: in bubbles, for layers that a stage lacks."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pipelines import SCHEDULES, WIDTH
from training import assert_trained_as, batch, mesh_of, start, train

from jaxcoll import data_parallel_train_step, pipelined, sequential


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
@pytest.mark.product(name=("gpipe", "1f1b", "interleaved 2"), communicates=(False, True))
def test_nothing_of_the_bubbles_comes_through(name: str, communicates: bool):
    """A layer that makes NaN of what never was a micro-batch's: zeros, which slots begin with."""

    class Poisoned(nn.Module):
        @nn.compact
        def __call__(self, x: Any, pipeline: Any = sequential) -> Any:
            kernels = self.param("kernels", nn.initializers.normal(), (12, WIDTH, WIDTH), x.dtype)

            def layer(kernel: Any, x: Any) -> Any:
                y = x + jnp.tanh(x @ kernel)
                # As a tensor-parallel layer: then bubbles are computed, too.
                if communicates and jax.sharding.get_abstract_mesh().manual_axes:
                    y = lax.psum(lax.pcast(y, "tensor", to="varying") / 2, "tensor")
                is_real = jnp.any(x[:, 0] != 0)
                return jnp.where(is_real, y, jnp.nan) * jnp.where(is_real, 1.0, jnp.nan)

            x = jnp.concatenate([jnp.ones((len(x), 1)), x[:, 1:WIDTH]], axis=1)
            x = pipeline(layer, kernels, x)
            return nn.Dense(4, param_dtype=x.dtype)(x)

    data = batch()
    mesh = mesh_of(data=2, pipe=2, tensor=2)
    model = pipelined(Poisoned(), 3, **SCHEDULES[name])
    state = start(model, data, mesh)
    first = jax.device_get(state.unpadded().params)
    state, metrics = train(data_parallel_train_step(model), state, data, mesh, state.specs)
    assert all(np.isfinite(m["loss"]) for m in metrics)
    alone = start(pipelined(Poisoned(), 3), data, mesh_of(data=1, pipe=1, tensor=2))
    jax.tree.map(np.testing.assert_array_equal, alone.params, first)
    step = data_parallel_train_step(pipelined(Poisoned(), 3))
    expected, _ = train(step, alone, data, mesh_of(data=1, pipe=1, tensor=2), alone.specs)
    assert_trained_as(state.unpadded().params, expected.params)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved 2"])
def test_layers_that_a_stage_lacks_make_no_nan(name: str):
    """Where it has room for one: what a layer makes of zeros may have no derivative."""

    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x: Any, pipeline: Any = sequential) -> Any:
            kernels = self.param("kernels", nn.initializers.normal(), (5, WIDTH, WIDTH), x.dtype)

            def layer(kernel: Any, x: Any) -> Any:
                y = jnp.tanh(x @ (kernel / jnp.linalg.norm(kernel)))
                if jax.sharding.get_abstract_mesh().manual_axes:  # as a tensor-parallel layer
                    y = lax.psum(lax.pcast(y, "tensor", to="varying") / 2, "tensor")
                return x + y

            return nn.Dense(4, param_dtype=x.dtype)(pipeline(layer, kernels, x[:, :WIDTH]))

    data, trained = batch(), []
    for pipe in (2, 1):
        mesh = mesh_of(data=2, pipe=pipe, tensor=2)
        model = pipelined(Normalized(), 3, **(SCHEDULES[name] if pipe == 2 else {}))
        state = start(model, data, mesh)
        state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
        trained.append(state.unpadded().params)
    assert_trained_as(*trained)


def test_layers_that_a_stage_lacks_see_no_other_layers_input():
    """Where a stage has one, each layer is made for what the one before it returns alone."""

    def init(rng: Any, x: Any) -> Any:
        out = 0.1 * jax.random.normal(rng, (WIDTH, 4), x.dtype)
        return {"shifts": jnp.array([100.0, 50.0, -5.0]), "out": out}

    def apply(params: Any, x: Any, pipeline: Any = sequential) -> Any:
        def layer(shift: Any, x: Any) -> Any:
            y = jnp.sqrt(x + shift)
            if jax.sharding.get_abstract_mesh().manual_axes:  # as a tensor-parallel layer
                y = lax.psum(lax.pcast(y, "tensor", to="varying") / 2, "tensor")
            return y

        return pipeline(layer, params["shifts"], x[:, :WIDTH] ** 2) @ params["out"]

    data, trained = batch(), []
    for pipe in (2, 1):
        mesh = mesh_of(data=1, pipe=pipe, tensor=2)
        model = pipelined((init, apply), 3)
        state = start(model, data, mesh)
        state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
        trained.append(state.unpadded().params)
    assert_trained_as(*trained)

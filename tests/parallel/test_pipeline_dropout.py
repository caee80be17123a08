"""Dropout in pipelines: the same masks as without, also where a stage is computed again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pipelines import OPTIMIZERS, SCHEDULES, OfLinen, on_one_device
from training import assert_trained_as, batch, mesh_of, start, train

from jaxcoll import data_parallel_train_step, pipelined, sequential


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    ("name", "over", "layers"),
    [
        ("1f1b", {"data": 2}, 4),
        ("interleaved 2", {"data": 2, "tensor": 2}, 4),
        # Of which a stage has fewer.
        pytest.param("1f1b", {"data": 2, "tensor": 2}, 3, marks=pytest.mark.full),
        pytest.param("gpipe", {"data": 1, "tensor": 2}, 3, marks=pytest.mark.full),
        pytest.param("interleaved 2", {"data": 1, "tensor": 2}, 5, marks=pytest.mark.full),
    ],
)
def test_dropout_is_that_of_micro_batches(name: str, over: dict[str, int], layers: int):
    """The same masks as without a pipeline: forward, and when a stage is computed again."""
    data = batch()
    split = {"axis": "tensor"} if "tensor" in over else {}
    results = []
    for pipe in (1, 2):
        mesh = mesh_of(pipe=pipe, **over)
        model = OfLinen(layers, mesh=mesh if split else None, drop=0.5, **split)
        if pipe == 1:
            state = start(model, data, mesh, OPTIMIZERS["sgd"])
            step = data_parallel_train_step(model, accumulate=3)
        else:
            model = pipelined(model, 3, **SCHEDULES[name])
            state = start(model, data, mesh, OPTIMIZERS["sgd"])
            step = data_parallel_train_step(model)
        state, metrics = train(step, state, data, mesh, state.specs)
        results.append((state.unpadded().params, metrics))
    assert_trained_as(results[1][0], results[0][0])
    losses = [[m["loss"] for m in metrics] for _, metrics in results]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-10)
    _, plain, _ = on_one_device("linen", layers, "sgd")  # nothing dropped: something else
    with pytest.raises(AssertionError):
        assert_trained_as(results[1][0], plain)


class DroppingNnx(nnx.Module):
    def __init__(self, drop: float) -> None:
        self.rngs = nnx.Rngs(0)
        kernels = jax.random.normal(self.rngs(), (3, 16, 16), jnp.float64)
        self.kernel, self.drop = nnx.Param(0.3 * kernels), drop

    def __call__(self, x: Any, pipeline: Any = sequential) -> Any:
        def layer(kernel: Any, x: Any, key: Any) -> Any:
            y = jnp.tanh(x @ kernel)
            return x + nnx.Dropout(self.drop)(y, rngs=nnx.Rngs(dropout=key))

        return pipeline(layer, self.kernel, x, self.rngs.dropout())[:, :4]


@pytest.mark.parametrize("name", ["1f1b", pytest.param("gpipe", marks=pytest.mark.full)])
def test_dropout_of_nnx_when_a_stage_is_computed_again(name: str):
    """The masks of the way there: those of a single stage, which is computed once."""
    data, trained = batch(), []
    for pipe, drop in ((1, 0.5), (2, 0.5), (1, 0.0)):
        mesh = mesh_of(data=2, pipe=pipe)
        model = pipelined(DroppingNnx(drop), 3, **SCHEDULES[name])
        state = start(model, data, mesh)
        state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
        trained.append(state.unpadded().params)
    assert_trained_as(trained[1], trained[0])
    with pytest.raises(AssertionError):
        assert_trained_as(trained[2], trained[0])  # nothing dropped: something else

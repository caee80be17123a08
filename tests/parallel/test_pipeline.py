"""Pipelines: the training of one device, in every schedule, beside every other axis.

In float64, leaf by leaf, to 1e-10: with plain gradient descent, which shows every wrong factor of a
gradient, and with AdamW.
"""

import functools as ft
from typing import Any

import jax
import numpy as np
import optax
import pytest
from pipelines import LIBRARIES, OPTIMIZERS, SCHEDULES, WIDTH, OfLinen, on_one_device
from training import assert_trained_as, batch, mesh_of, start, train

import jaxcoll
from jaxcoll import data_parallel_train_step, fully_shard, pipelined


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
@pytest.mark.product(
    schedule=tuple(SCHEDULES),
    grid=((1, 1), (2, 2), (1, 5), (2, 4), (1, 8)),
    micro=(1, 3, 12),
    more=(0, 3),
    library=tuple(LIBRARIES),
    optimizer=tuple(OPTIMIZERS),
)
def test_trains_as_on_one_device(
    schedule: str, grid: tuple[int, int], micro: int, more: int, library: str, optimizer: str
):
    """With as many layers as chunks of layers, and with some more; with few micro-batches."""
    assert_trains_as_on_one_device(schedule, grid, micro, more, library, optimizer)


@pytest.mark.parametrize("ranks", [3, pytest.param(7, marks=pytest.mark.full)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_odd_numbers_of_ranks(schedule: str, ranks: int):
    """Alone; neither their layers nor their micro-batches are a multiple of them."""
    assert_trains_as_on_one_device(schedule, (1, ranks), 4, 1, "functions", "sgd")


def assert_trains_as_on_one_device(
    schedule: str, grid: tuple[int, int], micro: int, more: int, library: str, optimizer: str
) -> None:
    data, mesh = batch(), mesh_of(data=grid[0], pipe=grid[1])
    options = SCHEDULES[schedule]
    chunks = jaxcoll.PipelineSchedule(options["schedule"], 1, options.get("num_chunks", 0))
    layers = grid[1] * chunks.num_chunks + more
    model = pipelined(LIBRARIES[library](layers), micro, **options)
    state = start(model, data, mesh, OPTIMIZERS[optimizer])
    first, expected, losses = on_one_device(library, layers, optimizer)
    close = ft.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-15)
    jax.tree.map(close, state.unpadded().params, first)
    state, metrics = train(data_parallel_train_step(model), state, data, mesh, state.specs)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-10)
    assert_trained_as(state.unpadded().params, expected)


@pytest.mark.slow
def test_uneven_stages_as_asked():
    data, mesh = batch(), mesh_of(pipe=2)
    model = pipelined(OfLinen(5), 4, stage_sizes=(1, 4))
    state = start(model, data, mesh, OPTIMIZERS["sgd"])
    kernel = state.params["blocks"]["ColumnParallelDense_0"]["kernel"]
    assert kernel.shape == (8, WIDTH, 12)
    assert kernel.sharding.spec == jax.P("pipe")
    _, expected, _ = on_one_device("linen", 5, "sgd")
    step = data_parallel_train_step(model, axis_name=())
    state, _ = train(step, state, data, mesh, state.specs, None)
    assert_trained_as(state.unpadded().params, expected)


@pytest.mark.slow
def test_weights_that_differ_between_micro_batches():
    """A sum with its weight is exact, with micro-batches and devices that have nothing at all."""
    inputs, labels = batch()
    valid = np.zeros(48)
    valid[[0, 1, 5, 30, 47]] = 1.0

    def loss_fn(outputs: Any, part: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, part["labels"])
        weights = part["valid"]
        return {
            "loss": ((losses * weights).sum(), weights.sum()),
            "square": ((losses**2 * weights).sum(), weights.sum()),
        }

    data = {"inputs": inputs, "labels": labels, "valid": valid}
    found = []
    for pipe in (1, 2):
        mesh = mesh_of(data=2, pipe=pipe)
        plain = OfLinen(4)
        model: Any = pipelined(plain, 4) if pipe > 1 else plain
        state = start(model, data, mesh)
        step = data_parallel_train_step(model, loss_fn=loss_fn)
        state, metrics = train(step, state, data, mesh, state.specs)
        found.append((state.unpadded().params, metrics))
    assert_trained_as(found[1][0], found[0][0])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert other == pytest.approx(one, rel=1e-10)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param("1f1b", 1, marks=pytest.mark.full),
        pytest.param("interleaved 2", 2, marks=pytest.mark.full),
        ("interleaved 2", 3),
    ],
)
def test_with_a_state_in_parts(name: str, stage: int):
    data, mesh = batch(), mesh_of(pipe=2, data=2, fsdp=2)
    model = pipelined(OfLinen(5), 3, **SCHEDULES[name])
    model = fully_shard(model, "fsdp", stage=stage, min_weight_size=16)
    clipped = optax.chain(jaxcoll.clip_by_global_norm(0.3), optax.adamw(0.05))
    state = start(model, data, mesh, clipped)
    moments = state.opt_state[1][0].mu["blocks"]["RowParallelDense_0"]["kernel"]
    assert moments.sharding.spec[0] == "pipe"
    assert "fsdp" in moments.sharding.spec
    kernel = state.params["blocks"]["RowParallelDense_0"]["kernel"]
    assert ("fsdp" in kernel.sharding.spec) == (stage == 3)
    first = jax.device_get(state.unpadded().params)
    close = ft.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-15)
    step = data_parallel_train_step(model, axis_name=("data", "fsdp"))
    state, _ = train(step, state, data, mesh, state.specs, ("data", "fsdp"))
    plain = OfLinen(5)
    expected = start(plain, data, mesh_of(data=1), clipped)
    jax.tree.map(close, expected.params, first)
    expected, _ = train(data_parallel_train_step(plain), expected, data, mesh_of(data=1))
    assert_trained_as(state.unpadded().params, expected.params)
    moved = jaxcoll.reshard(state, start(plain, data, mesh_of(data=2), clipped).specs)
    assert_trained_as(moved.params, expected.params)

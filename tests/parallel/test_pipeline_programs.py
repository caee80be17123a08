"""What a pipeline's compiled step holds: memory as predicted, and no call too many."""

import functools as ft
import re
from typing import Any

import jax
import numpy as np
import pytest
from checks import auto_is_native
from pipelines import SCHEDULES, WIDTH, OfLinen
from training import batch, mesh_of, start

import jaxcoll
from jaxcoll import data_parallel_train_step, fully_shard, pipelined


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    with jax.enable_x64(True):
        yield


def compiled(axes: dict[str, int], micro: int, examples: int, name: str, model: Any) -> Any:
    """Returns a compiled step, with so many examples in a micro-batch."""
    mesh = mesh_of(**axes)
    over = tuple(axis for axis in axes if axis not in ("pipe", "tensor"))
    data = batch(micro * examples)
    model = pipelined(model, micro, **SCHEDULES[name])
    if "fsdp" in axes:
        model = fully_shard(model, "fsdp", min_weight_size=16)
    state = start(model, data, mesh)
    step = data_parallel_train_step(model, axis_name=over)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(state.specs, jax.P(over)), out_specs=(state.specs, jax.P())
    )
    return jax.jit(mapped).lower(state, data).compile()


EXAMPLES = 256  # of a micro-batch
INPUT_BYTES = EXAMPLES * WIDTH * 8


@ft.cache
def memory(name: str, p: int, micro: int) -> tuple[int, int]:
    """Returns what the compiler says that a step needs, and what its schedule predicts of that."""
    step = compiled({"pipe": p}, micro, EXAMPLES, name, OfLinen(3 * p))
    options = SCHEDULES[name]
    schedule = jaxcoll.PipelineSchedule(options["schedule"], p, options.get("num_chunks", 0))
    return step.memory_analysis().temp_size_in_bytes, schedule.peak_bytes(micro, INPUT_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "p"),
    [
        pytest.param("1f1b", 2, marks=pytest.mark.full),
        ("gpipe", 2),
        ("1f1b", 4),
        pytest.param("interleaved 2", 2, marks=pytest.mark.full),
    ],
)
def test_memory_is_as_predicted(name: str, p: int):
    """Between 16 and 32 micro-batches, GPipe's grows by their inputs, and no other's does.

    As predicted to half an input of a stage.
    """
    grown, predicted = np.subtract(memory(name, p, 32), memory(name, p, 16))
    assert grown == pytest.approx(predicted, abs=0.5 * INPUT_BYTES)
    assert predicted == (16 * INPUT_BYTES if name == "gpipe" else 0)


@pytest.mark.slow
def test_1f1b_needs_less_than_gpipe():
    """As predicted to two inputs: in what they need for a tick they differ by about one."""
    less, predicted = np.subtract(memory("gpipe", 2, 16), memory("1f1b", 2, 16))
    assert less == pytest.approx(predicted, abs=2 * INPUT_BYTES)
    assert predicted == (16 - 3) * INPUT_BYTES


@pytest.mark.skipif(not auto_is_native(), reason="counts the native calls")
@pytest.mark.parametrize("axes", [{"pipe": 2}, {"pipe": 2, "data": 2}, {"pipe": 2, "fsdp": 2}])
def test_what_is_communicated(axes: dict[str, int]):
    """Two permutations in each tick; beside them each parameter meets its like once in a step."""
    text = compiled(axes, 4, 8, "1f1b", OfLinen(4)).as_text()
    count = {
        op: len(re.findall(rf'custom_call_target="jaxcoll_{op}"', text))
        for op in ("ppermute", "all_reduce", "all_gather", "reduce_scatter")
    }
    assert count["ppermute"] == 2  # in the one loop that there is
    # What is outside of the layers, over the pipeline; gradients and metrics, over the batch.
    assert count["all_reduce"] == (1 if axes == {"pipe": 2} else 2)
    parts = 8 if "fsdp" in axes else 0
    assert count["all_gather"] == count["reduce_scatter"] == parts
    assert f"f64[4,{WIDTH},12]" not in text  # of no rank are all layers

"""`ParallelPlan`: every pair of axes, triples and all four, each the training of one device.

In float64, leaf by leaf, to 1e-10: with plain gradient descent, which shows every wrong factor of a
gradient, and with AdamW.
"""

import functools as ft
import re
from typing import Any, cast

import jax
import numpy as np
import optax
import pytest
import training
from plans import LAYERS, LIBRARIES, batch, loss_fn, of_linen
from training import assert_copies_are_equal, assert_trained_as, trained_alone

import jaxcoll
from jaxcoll import ParallelPlan
from jaxcoll.parallel.pure_model import as_pure

OPTIMIZERS = {"sgd": optax.sgd(0.3), "adamw": optax.adamw(0.02)}
AXES: dict[str, dict[str, int]] = {
    "data, fsdp": {"data": 2, "fsdp": 3},
    "data, tensor": {"data": 4, "tensor": 2},
    "data, pipe": {"data": 4, "pipe": 2},
    "fsdp, tensor": {"fsdp": 2, "tensor": 3},
    "fsdp, pipe": {"fsdp": 4, "pipe": 2},
    "tensor, pipe": {"tensor": 3, "pipe": 2},
    "data, fsdp, tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "data, fsdp, pipe": {"data": 2, "fsdp": 2, "pipe": 2},
    "data, tensor, pipe": {"data": 2, "tensor": 2, "pipe": 2},
    "fsdp, tensor, pipe": {"fsdp": 2, "tensor": 2, "pipe": 2},
    "all four": {"data": 1, "fsdp": 2, "tensor": 2, "pipe": 2},
}
# Of the pipeline, and of the state; all of them are in test_pipeline.py.
KINDS: dict[str, tuple[Any, int]] = {
    "1f1b, ZeRO-3": ("1f1b", 3),
    "interleaved": ("interleaved", 2),
    "gpipe": ("gpipe", 1),
}


@ft.cache
def on_one_device(library: str, optimizer: str, layers: int = LAYERS) -> Any:
    """Returns what `trained_alone` does, made once."""
    model = LIBRARIES[library](None, None, layers)
    return trained_alone(as_pure("test", model), batch(), OPTIMIZERS[optimizer])


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    with jax.enable_x64(True):
        yield


def plan_of(axes: dict[str, int], **options: Any) -> ParallelPlan:
    count = int(np.prod(list(axes.values())))
    return ParallelPlan(axes, devices=jax.devices()[:count], **options)


@pytest.mark.slow
@pytest.mark.product(
    axes=tuple(AXES),
    kind=tuple(KINDS),
    library=tuple(LIBRARIES),
    optimizer=tuple(OPTIMIZERS),
)
def test_trains_as_on_one_device(axes: str, kind: str, library: str, optimizer: str):
    sizes = AXES[axes]
    schedule, stage = KINDS[kind]
    fsdp = {"stage": stage, "min_weight_size": 16, "bucket_bytes": 1000}
    plan = plan_of(
        sizes,
        fsdp=fsdp if "fsdp" in sizes else None,
        accumulate=2 if axes == "fsdp, tensor, pipe" else 1,
        num_micro_batches=3,
        schedule=schedule,
    )
    axis = "tensor" if "tensor" in sizes else None
    model = LIBRARIES[library](axis, plan.mesh if axis else None)
    assert_trains_as_on_one_device(plan, model, library, optimizer)


@ft.cache
def in_two_stages() -> Any:
    """Returns the mesh and specs of a plan's state, its step, and the first loss of that."""
    plan = plan_of({"pipe": 2})
    state = plan.init(of_linen(None, None), OPTIMIZERS["sgd"], jax.random.key(0), batch())
    step = plan.build_train_step(ft.partial(loss_fn, None), donate=False)
    return plan.mesh, state.specs, step, float(step(state, batch())[1]["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options", "text"),
    [
        ({"pipe": 2}, {"schedule": "gpipe"}, r"that is pipelined over .*gpipe.*; .* is .*1f1b"),
        ({"data": 2}, {}, "plan that is not pipelined; this one is pipelined over"),
        ({"pipe": 4}, {}, r"blocks.*: expected shape \(6, 24, 24\), .* got \(8, 24, 24\)"),
        ({"data": 2, "pipe": 2}, {}, "it is on 4 devices, which are not the 2 of this plan's mesh"),
    ],
)
def test_a_state_of_another_plan(axes: dict[str, int], options: dict[str, Any], text: str):
    """It is refused, and the text says how it is moved."""
    mesh, specs, step, loss = in_two_stages()
    other = plan_of(axes, **options)
    state = other.init(of_linen(None, None), OPTIMIZERS["sgd"], jax.random.key(0), batch())
    with pytest.raises(ValueError, match=rf"{text}.*Move one .*reshard\("):
        step(state, batch())
    moved = jaxcoll.reshard(state, specs, mesh=mesh)
    assert float(step(moved, batch())[1]["loss"]) == loss


def test_parts_of_a_sequence_in_a_pipeline():
    plan = plan_of({"pipe": 2, "tensor": 2}, schedule="gpipe")
    model = of_linen("tensor", plan.mesh).clone(sequence_parallel=True)
    assert_trains_as_on_one_device(plan, model, "linen", "sgd")


@pytest.mark.parametrize(
    ("axes", "schedule", "layers"),
    [
        ({"pipe": 2, "tensor": 2}, "1f1b", LAYERS),
        ({"pipe": 4}, "interleaved", 9),
        pytest.param({"pipe": 4, "tensor": 2}, "interleaved", 9, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("library", ["nnx", pytest.param("linen", marks=pytest.mark.full)])
def test_uneven_stages_of_split_layers(
    axes: dict[str, int], schedule: Any, layers: int, library: str
):
    """A module of NNX is made where its parts lie."""
    plan = plan_of(axes, schedule=schedule, num_micro_batches=6)
    split = ("tensor", plan.mesh) if "tensor" in axes else (None, None)
    make = ft.partial(LIBRARIES[library], *split, layers)
    model = make() if library == "linen" else make
    state = assert_trains_as_on_one_device(plan, model, library, "sgd", layers)
    spec = state.specs.params["blocks"]["mlp"]["up"]["kernel"]
    assert {axis for axis in spec if axis} == {*axes}


def assert_trains_as_on_one_device(
    plan: ParallelPlan, model: Any, library: str, optimizer: str, layers: int = LAYERS
) -> Any:
    """Returns the state after training."""
    axis, data = "tensor" if "tensor" in plan.mesh.shape else None, batch()
    state = plan.init(model, OPTIMIZERS[optimizer], jax.random.key(0), data)
    first, expected, losses = on_one_device(library, optimizer, layers)
    for got, want in zip(*map(jax.tree.leaves, (state.unpadded().params, first)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-15)
    step = plan.build_train_step(ft.partial(loss_fn, axis))
    found = []
    for _ in range(4):
        state, metrics = step(state, data)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=1e-10)
    assert_trained_as(state.unpadded().params, expected)
    # What is called a copy is one.
    assert_copies_are_equal((state.params, state.opt_state))
    return state


@pytest.mark.parametrize(
    ("axes", "schedule", "layers"),
    [
        ({"pipe": 2}, "1f1b", 4),
        ({"pipe": 2, "data": 2, "tensor": 2}, "interleaved", 4),
        pytest.param({"pipe": 2, "fsdp": 2, "tensor": 2}, "1f1b", 5, marks=pytest.mark.full),
    ],
)
def test_initialized_in_parts(axes: dict[str, int], schedule: Any, layers: int):
    """No device makes a whole parameter that is split: the program of `init` has none.

    Neither as the model has it, nor as it is stored.
    """
    fsdp = {"min_weight_size": 16} if "fsdp" in axes else None
    plan = plan_of(axes, schedule=schedule, fsdp=fsdp)
    axis = "tensor" if "tensor" in axes else None
    # Of widths that no part of another parameter has.
    model = of_linen(axis, plan.mesh if axis else None)
    model = model.clone(vocab_size=20, num_layers=layers, mlp_ratio=3)

    def init() -> Any:
        return plan.init(model, OPTIMIZERS["adamw"], jax.random.key(0), batch())

    state = init()
    leaves = jax.tree.leaves((state.params, state.opt_state))
    parts = {leaf.sharding.shard_shape(leaf.shape) for leaf in leaves}
    whole = {leaf.shape for leaf in leaves} - parts
    assert len(whole) > 3
    whole |= {(layers, *shape[1:]) for shape in whole}
    text = str(jax.jit(init).lower().compile().as_text())
    made = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f64\[([\d,]+)\]", text)}
    assert not whole & made


@pytest.mark.slow
def test_without_axes_of_a_batch():
    plan, data = plan_of({"pipe": 2}, schedule="1f1b"), batch()
    state = plan.init(of_linen(None, None), OPTIMIZERS["sgd"], jax.random.key(0), data)
    step = plan.build_train_step(ft.partial(loss_fn, None), donate=False)
    after, metrics = step(state, plan.shard_batch(data))
    again, _ = step(state, data)  # the state was not donated
    jax.tree.map(np.testing.assert_array_equal, again.params, after.params)
    assert float(metrics["loss"]) == pytest.approx(on_one_device("linen", "sgd")[2][0], rel=1e-10)


def test_a_state_that_was_donated():
    plan, data = plan_of({"data": 2}), batch()
    state = plan.init(of_linen(None, None), OPTIMIZERS["sgd"], jax.random.key(0), data)
    kept = jaxcoll.reshard(state, state.specs)
    step = plan.build_train_step()
    after, _ = step(state, data)
    with pytest.raises(ValueError, match="state: it was donated to an earlier step"):
        step(state, data)
    again, _ = step(kept, data)  # a copy, which shares no memory
    jax.tree.map(np.testing.assert_array_equal, again.params, after.params)


@pytest.mark.slow
def test_a_state_of_another_size():
    """Of as many leaves, and of the same optimizer: their shapes alone tell."""
    data, optimizer = training.batch(), OPTIMIZERS["sgd"]

    def state_of(plan: ParallelPlan, layers: int, width: int) -> Any:
        model = jaxcoll.models.PPClassifier(4, layers, width, split=False)
        return plan.init(model, optimizer, jax.random.key(0), data)

    for axes, stored in (({"data": 2}, 5), ({"pipe": 2}, 6)):
        plan = plan_of(axes)
        state_of(plan, 5, 12)
        step = plan.build_train_step()
        text = rf"params\['bias'\]: expected shape \({stored}, 12\), as of .*, got \({{}}\)\. Make"
        for layers, width, got in ((7, 12, rf"{stored + 2}, 12"), (5, 8, rf"{stored}, 8")):
            with pytest.raises(ValueError, match=f"train_step: state: {text.format(got)}"):
                step(state_of(plan_of(axes), layers, width), data)


def test_calls_of_a_step_stand_where_it_is_first_called():
    """Where all of it is ours, JAX keeps no line of the user."""
    plan, data = plan_of({"pipe": 2, "fsdp": 2}, schedule="1f1b"), batch()
    state = plan.init(of_linen(None, None), OPTIMIZERS["sgd"], jax.random.key(0), data)
    step = plan.build_train_step(ft.partial(loss_fn, None), donate=False)

    def train() -> jaxcoll.Report:
        return jaxcoll.explain(step, state, plan.shard_batch(data))

    (source,) = {row.source for row in train().rows}
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ \(\S*train\)", source)


def test_described():
    plan = plan_of({"tensor": 2, "data": 2, "pipe": 2})
    assert plan.mesh.axis_names == ("pipe", "data", "tensor")
    assert repr(plan) == "ParallelPlan({'pipe': 2, 'data': 2, 'tensor': 2})"
    model = of_linen("tensor", plan.mesh)
    state = plan.init(model, OPTIMIZERS["sgd"], jax.random.key(0), batch())
    text = plan.describe(state)
    assert text.startswith("mesh of 8 devices: pipe 2 x data 2 x tensor 2\n")
    (line,) = [line for line in text.split("\n") if "'up'" in line or "['up']" in line][:1]
    # 5 layers are 6 on 2 stages, 24 features are 12 on 2 ranks.
    assert "PartitionSpec('pipe', None, 'tensor')" in line.replace("P(", "PartitionSpec(")
    assert "(3, 24, 12)" in line


def test_errors():
    data, key = batch(), jax.random.key(0)
    with pytest.raises(ValueError, match=r"axes: expected names out of .* 'tensr'\. Did you mean"):
        ParallelPlan({"data": 2, "tensr": 2})
    with pytest.raises(TypeError, match=r"axes: expected a dict, such as .*, got list"):
        ParallelPlan(cast("Any", ["data"]))
    with pytest.raises(TypeError, match=r"fsdp: expected a dict, such as .*, got int"):
        plan_of({"fsdp": 2}, fsdp=2)
    with pytest.raises(ValueError, match='fsdp: options, but there is no axis "fsdp"'):
        plan_of({"data": 2}, fsdp={"stage": 2})
    with pytest.raises(ValueError, match=r'stage_sizes: an option .* no axis "pipe"'):
        plan_of({"data": 2}, stage_sizes=(9, 9))
    with pytest.raises(ValueError, match=r'num_chunks: an option .* no axis "pipe"'):
        plan_of({"data": 2}, num_chunks=2)
    with pytest.raises(ValueError, match="build_train_step: no model yet: call init"):
        plan_of({"data": 2}).build_train_step()
    with pytest.raises(ValueError, match='splits nothing over "tensor", whose ranks would all'):
        plan_of({"tensor": 2}).init(of_linen(None, None), optax.sgd(0.1), key, data)
    with pytest.raises(
        TypeError, match=r"ParallelPlan\.init: model: expected one whose __call__ t"
    ):
        plan_of({"pipe": 2}).init(jaxcoll.models.SimpleClassifier(), optax.sgd(0.1), key, data)
    with pytest.raises(ValueError, match=r"fsdp: expected options .* 'stages'\. Did you"):
        plan_of({"fsdp": 2}, fsdp={"stages": 2})
    with pytest.raises(ValueError, match=r"ParallelPlan: schedule: expected one of .* '1b1f'"):
        plan_of({"fsdp": 2}, schedule="1b1f")
    with pytest.raises(ValueError, match=r"ParallelPlan: accumulate: expected at least 1, got 0"):
        plan_of({"fsdp": 2}, accumulate=0)
    with pytest.raises(TypeError, match=r"ParallelPlan: accumulate: expected a whole .* got '2'"):
        plan_of({"fsdp": 2}, accumulate="2")
    plan = plan_of({"tensor": 2, "pipe": 2})
    text = r"params\['blocks'\].* of shape \(6, 24, 24\): .*'pipe', 'pipe'.* over \"pipe\" twice\. "
    with pytest.raises(ValueError, match=text):
        plan.init(of_linen("pipe", plan.mesh), optax.sgd(0.1), key, data)
    plan = plan_of({"tensor": 2, "data": 2})
    state = plan.init(of_linen("tensor", plan.mesh), optax.sgd(0.1), key, data)
    with pytest.raises(ValueError, match='loss_fn: its loss differs between the ranks of "tensor"'):
        plan.build_train_step()(state, data)
    plan = plan_of({"pipe": 8})
    with pytest.raises(ValueError, match="model: 5 layers can't be spread over 8 stages"):
        plan.init(of_linen(None, None), optax.sgd(0.1), key, data)
    plan = plan_of({"data": 2, "pipe": 2}, num_micro_batches=5)
    state = plan.init(of_linen(None, None), optax.sgd(0.1), key, data)
    step = plan.build_train_step()
    other = plan_of({"data": 2}).init(of_linen(None, None), optax.sgd(0.1), key, data)
    with pytest.raises(ValueError, match="state: expected one of this plan's last init"):
        step(other, data)
    text = r"12 examples on .* into 5 micro-batches \(batch\[0\] of shape \(12.*\)\. Use a number"
    with pytest.raises(ValueError, match=text):
        plan.build_train_step(ft.partial(loss_fn, None))(state, data)
    text = r"train_step: batch\[0\]: dimension 0 of shape \(7, .* over 2 devices \(data\)\. Make it"
    with pytest.raises(ValueError, match=text):
        step(state, jax.tree.map(lambda leaf: leaf[:7], data))
    with pytest.raises(ValueError, match=r"batch\[0\]: expected an array .* of shape \(0, 4\)"):
        step(state, jax.tree.map(lambda leaf: leaf[:0], data))
    with pytest.raises(
        ValueError, match=r"train_step: batch\['t'\]: expected an array .* Repeat it"
    ):
        step(state, {"inputs": data[0], "labels": data[1], "t": 1.0})

"""Train steps of every family: the parameters of the model on one device, after several steps."""

import functools as ft
import itertools as it
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from training import (
    STEPS,
    assert_copies_are_equal,
    assert_trained_as,
    batch,
    mesh_of,
    reference,
    start,
    train,
)

import jaxcoll
from jaxcoll import (
    create_train_state,
    data_parallel_train_step,
    fully_shard,
    pipeline_parallel_train_step,
)
from jaxcoll.models import PPClassifier, SimpleClassifier, TPClassifier


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(("size", "accumulate"), [(1, 1), (2, 3), (3, 1), (4, 3), (8, 1), (8, 3)])
def test_data_parallel(size: int, accumulate: int):
    data = batch()
    model = SimpleClassifier(num_classes=4, hidden=12)
    state = start(model, data)
    expected, losses = reference(model, state.params, data)
    step = data_parallel_train_step(model, accumulate=accumulate if 48 // size % 3 == 0 else 2)
    state, metrics = train(step, state, data, mesh_of(data=size))
    assert_trained_as(state.params, expected)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-10)
    assert int(state.step) == STEPS


def test_without_typed_axes():
    data = batch()
    model = SimpleClassifier(num_classes=4, hidden=12)
    state = start(model, data)
    expected, _ = reference(model, state.params, data)
    step = jax.shard_map(
        data_parallel_train_step(model),
        mesh=mesh_of(data=4),
        in_specs=(jax.P(), jax.P("data")),
        out_specs=jax.P(),
        check_vma=False,
    )
    for _ in range(STEPS):
        state, _ = jax.jit(step)(state, data)
    assert_trained_as(state.params, expected)
    assert_copies_are_equal(state.params)


GRIDS = ((1, 1), (1, 2), (2, 2), (2, 4), (1, 8))


@pytest.mark.parametrize(("grid", "overlap"), [*zip(GRIDS, (True, False) * 3, strict=False)])
def test_tensor_parallel(grid: tuple[int, int], overlap: bool):
    batches = batch()
    data, tensor = grid
    mesh = mesh_of(data=data, tensor=tensor)
    model = TPClassifier(num_classes=4, hidden=24, overlap=overlap, mesh=mesh)
    state = start(model, batches, mesh)
    plain = SimpleClassifier(num_classes=4, hidden=24)
    assert_trained_as(state.params, start(plain, batches).params)
    expected, losses = reference(plain, jax.device_get(state.params), batches)
    assert state.specs.params["hidden_layer"]["kernel"] == jax.P(None, "tensor")
    step = data_parallel_train_step(model)
    state, metrics = train(step, state, batches, mesh, state.specs)
    assert_trained_as(state.params, expected)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.product(grid=((1, 1), (2, 2), (2, 4), (1, 8)), micro=(1, 2, 6), num_layers=(8, 10, 9))
def test_pipeline_parallel(grid: tuple[int, int], micro: int, num_layers: int):
    """Layers that the axis does not divide are all there, and run once."""
    batches = batch()
    data, pipe = grid
    split = num_layers == 8
    mesh = mesh_of(data=data, pipe=pipe)
    model = PPClassifier(num_classes=4, num_layers=num_layers, width=12, split=split)
    state = start(model, batches, mesh)
    expected, losses = reference(model, jax.device_get(state.params), batches)
    assert state.params["kernel"].shape == (num_layers, 12, 12)
    step = pipeline_parallel_train_step(model, num_micro_batches=micro)
    state, metrics = train(step, state, batches, mesh, state.specs)
    assert_trained_as(state.params, expected)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.product(stage=(None, 1, 2, 3), accumulate=(1, 2))
def test_weights_that_differ_between_devices(stage: Any, accumulate: int):
    """A sum with its weight is exact, with a device that has nothing at all."""
    inputs, labels = batch(16)
    valid = np.array([1.0] * 3 + [0.0] * 9 + [1.0] * 4)
    model = SimpleClassifier(num_classes=4, hidden=12)

    def loss_fn(outputs: Any, part: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, part["labels"])
        return (losses * part["valid"]).sum(), part["valid"].sum()

    data, mesh = {"inputs": inputs, "labels": labels, "valid": valid}, mesh_of(data=4)
    sharded: Any = fully_shard(model, stage=stage, min_weight_size=16) if stage else model
    state = start(sharded, data, mesh)
    keep = valid > 0
    params = jax.device_get(state.params)
    expected, losses = reference(model, params, (inputs[keep], labels[keep]))
    step = data_parallel_train_step(sharded, loss_fn=loss_fn, accumulate=accumulate)
    state, metrics = train(step, state, data, mesh, state.specs)
    assert_trained_as(state.params, expected)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-10)


def test_an_nnx_module_and_a_pair_of_functions():
    data = batch()
    plain = SimpleClassifier(num_classes=4, hidden=12)
    params = start(plain, data).params
    expected, _ = reference(plain, params, data)

    class Classifier(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.a = nnx.Linear(16, 12, rngs=rngs, param_dtype=jnp.float64)
            self.b = nnx.Linear(12, 4, rngs=rngs, param_dtype=jnp.float64)
            self.a.kernel[...] = params["hidden_layer"]["kernel"]
            self.b.kernel[...] = params["output_layer"]["kernel"]

        def __call__(self, x: Any) -> Any:
            return self.b(nnx.relu(self.a(x)))

    def apply(params: Any, x: Any) -> Any:
        return plain.apply({"params": params}, x)

    def init(rng: Any, x: Any) -> Any:
        del rng, x
        return params

    for model in (Classifier(), (init, apply)):
        state, _ = train(data_parallel_train_step(model), start(model, data), data, mesh_of(data=4))
        got = jax.tree.leaves(jax.tree.map(jnp.asarray, state.params))
        want = jax.tree.leaves(expected)
        for leaf in got:
            assert any(
                leaf.shape == w.shape and np.allclose(leaf, w, rtol=0, atol=1e-10) for w in want
            )


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        return nn.Dense(4)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))


class NormedNnx(nnx.Module):
    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(16, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.dense(self.norm(x))


@pytest.mark.slow
@pytest.mark.product(accumulate=(1, 2), model=(Normed, NormedNnx), stage=(None, 3))
def test_batch_statistics_are_averaged(model: Any, accumulate: int, stage: Any):
    """A BatchNorm that knows of no axis: each device moves its own mean, all take the average.

    The next micro-batch goes on from where the one before has left it.
    """
    inputs, labels = batch(16)
    data, mesh = (inputs.astype(np.float32), labels), mesh_of(data=4)
    made: Any = fully_shard(model(), stage=stage, min_weight_size=1) if stage else model()
    state = start(made, data, mesh)
    step = data_parallel_train_step(made, accumulate=accumulate)
    after, _ = train(step, state, data, mesh, state.specs)
    (mean,) = means_of(state)
    for _ in range(STEPS):
        for part in np.split(data[0].reshape(4, 4, 16), accumulate, axis=1):
            mean = (mean + part.mean((0, 1))) / 2
    np.testing.assert_allclose(means_of(after)[0], mean, rtol=1e-5, atol=1e-6)


def means_of(state: Any) -> list[Any]:
    """Returns the running means among what a model keeps beside its parameters."""
    named = jax.tree_util.tree_leaves_with_path(state.variables)
    return [leaf for path, leaf in named if "mean" in jax.tree_util.keystr(path)]


@pytest.mark.parametrize("stage", [None, pytest.param(1, marks=pytest.mark.full), 2, 3])
def test_a_parameter_that_two_layers_of_nnx_share(stage: Any):
    """It has one gradient, the sum of both, and is still one when it is back in the module."""

    class Shared(nnx.Module):
        def __init__(self) -> None:
            self.a = nnx.Linear(16, 16, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
            self.b = self.a

        def __call__(self, x: Any) -> Any:
            return self.b(jnp.tanh(self.a(x)))[:, :4]

    module: Any = Shared()
    data, mesh = batch(8), mesh_of(data=4)
    params = {"w": module.a.kernel[...], "b": module.a.bias[...]}

    class Plain:
        def apply(self, variables: Any, x: Any) -> Any:
            w, b = variables["params"]["w"], variables["params"]["b"]
            return (jnp.tanh(x @ w + b) @ w + b)[:, :4]

    expected, _ = reference(Plain(), params, data)
    model: Any = fully_shard(module, stage=stage, min_weight_size=1) if stage else module
    state = start(model, data, mesh)
    assert len(jax.tree.leaves(state.params)) == 2
    state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
    nnx.update(module, state.params)
    assert module.a is module.b
    got = {"w": module.b.kernel[...], "b": module.b.bias[...]}
    assert_trained_as(got, expected)


class SowsLinen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        self.sow("losses", "aux", jnp.mean(x))
        return nn.Dense(4)(x)


class SowsNnx(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(16, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        self.sow(nnx.Intermediate, "aux", jnp.mean(x))
        return self.dense(x)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("model", [SowsLinen, SowsNnx])
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")  # Flax's own
def test_what_a_model_sows_is_no_state(model: Any, accumulate: int):
    data, mesh = batch(16), mesh_of(data=2)
    state = start(model(), data, mesh)
    step = data_parallel_train_step(model(), accumulate=accumulate)
    text = r"model: \w+ Sows\w+ has .*'aux'.*, float64\[\], after a step.* Return it beside"
    with pytest.raises(ValueError, match=text):
        train(step, state, data, mesh, state.specs)


def test_streams_of_random_numbers_by_any_name():
    """Each has numbers of its own, which differ between devices and steps."""

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            self.param("w", nn.initializers.zeros, (1,))
            names = ("dropout", "noise", "params")
            return jnp.stack([jax.random.uniform(self.make_rng(name)) for name in names])

    data, mesh = (np.ones((2, 1)), np.zeros(2)), mesh_of(data=2)
    seen: list[Any] = []

    def loss_fn(outputs: Any, part: Any) -> Any:
        del part
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), outputs)
        return outputs.sum() * 0, 1.0

    state = start(Noisy(), data, mesh)
    train(data_parallel_train_step(Noisy(), loss_fn=loss_fn), state, data, mesh, state.specs)
    jax.effects_barrier()
    assert np.unique(np.stack(seen)).size == 3 * 2 * STEPS


@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_optimizer_that_needs_the_loss(is_sharded: bool):
    data, mesh = batch(8), mesh_of(data=2)
    model: Any = lambda rng, x: jnp.ones((16, 4)), lambda w, x: x @ w
    model = fully_shard(model, min_weight_size=1) if is_sharded else model
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    call = "create_train_state" if is_sharded else "data_parallel_train_step"
    text = rf"{call}: optimizer: .* its update needs more: .* 'value'\. Use one that does not"

    def run() -> None:
        state = create_train_state(model, optimizer, jax.random.key(0), data, mesh)
        train(data_parallel_train_step(model), state, data, mesh, state.specs)

    with pytest.raises(TypeError, match=text):
        run()


class Dropped(nnx.Module):
    """An NNX module with a Dropout, whose key it keeps itself."""

    def __init__(self) -> None:
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.scale = nnx.Param(jnp.ones(64))

    def __call__(self, x: Any) -> Any:
        return self.dropout(jnp.tile(x, (1, 4)) * self.scale)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_dropout_differs_between_devices_steps_and_micro_batches(kind: str):
    data = (np.ones((16, 16)), np.zeros(16, int))
    model = (
        SimpleClassifier(num_classes=4, hidden=64, dropout=0.5) if kind == "linen" else Dropped()
    )

    def loss_fn(outputs: Any, part: Any) -> Any:
        del part
        rank = jax.lax.axis_index("data")
        code = (outputs[0] * np.sqrt(np.arange(2, outputs.shape[1] + 2))).sum()
        of_rank = {f"{i}": jnp.where(rank == i, code, 0.0) for i in range(8)}
        squares = {f"{name} squared": value**2 for name, value in of_rank.items()}
        return {"loss": 0.0 * outputs.sum(), **of_rank, **squares}

    once = data_parallel_train_step(model, loss_fn=loss_fn)
    _, metrics = train(once, start(model, data), data, mesh_of(data=8))
    seen = {m[str(rank)] for m in metrics for rank in range(8)}
    assert len(seen) == STEPS * 8
    twice = data_parallel_train_step(model, loss_fn=loss_fn, accumulate=2)
    _, metrics_of_two = train(twice, start(model, data), data, mesh_of(data=8))
    # With one key for both micro-batches, their mean would be that of the first.
    assert not seen & {m[str(rank)] for m in metrics_of_two for rank in range(8)}
    for m, rank in it.product(metrics_of_two, range(8)):
        # Means over eight ranks, of which seven give nothing. The codes of both differ.
        assert 8 * m[f"{rank} squared"] > (8 * m[f"{rank}"]) ** 2 * (1 + 1e-10)


class TwiceLinen(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        scale = self.param("scale", nn.initializers.ones, (64,))
        x = jnp.tile(x, (1, 4)) * scale
        return [nn.Dropout(0.5, deterministic=not train)(x) for _ in range(2)]


class TwiceNnx(nnx.Module):
    """Its dropouts were made with the same key, and count their calls alike."""

    def __init__(self) -> None:
        self.dropouts = nnx.List([nnx.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(2)])
        self.scale = nnx.Param(jnp.ones(64))

    def __call__(self, x: Any) -> Any:
        return [dropout(jnp.tile(x, (1, 4)) * self.scale) for dropout in self.dropouts]


@pytest.mark.parametrize("model", [TwiceLinen, TwiceNnx])
def test_each_layer_drops_its_own(model: Any):
    data = (np.ones((4, 16)), np.zeros(4, int))

    def loss_fn(outputs: Any, part: Any) -> Any:
        del part
        first, second = outputs
        return {"loss": 0.0 * (first + second).sum(), "alike": (first == second).mean()}

    step = data_parallel_train_step(model(), loss_fn=loss_fn)
    _, metrics = train(step, start(model(), data), data, mesh_of(data=2))
    assert all(0.25 < m["alike"] < 0.75 for m in metrics)


def test_losses_that_are_none():
    data = batch(8)
    model = SimpleClassifier(num_classes=4, hidden=12)
    state = start(model, data)

    def run(loss_fn: Any, data: Any = data, axis: str = "data") -> Any:
        step = data_parallel_train_step(model, loss_fn=loss_fn, axis_name=axis)
        return train(step, state, data, mesh_of(data=2))

    with pytest.raises(TypeError, match=r"loss_fn: loss: expected a scalar.* array of shape \(4"):
        run(lambda outputs, part: outputs.sum(axis=1))
    with pytest.raises(TypeError, match=r"expected a scalar, or a pair .* got \{'x': 1\}"):
        run(lambda outputs, part: (outputs.sum(), {"x": 1}))
    with pytest.raises(TypeError, match="got None"):
        run(lambda outputs, part: None)
    with pytest.raises(TypeError, match=r"expected a scalar, or a pair .* got a tuple of 3\."):
        run(lambda outputs, part: (outputs.sum(), 1, 2))
    with pytest.raises(ValueError, match="expected a 'loss' in its dict, got \\['los'\\]"):
        run(lambda outputs, part: {"los": outputs.sum()})
    with pytest.raises(TypeError, match=r"expected integer labels, got float64\(4, 4\).* loss_fn="):
        run(None, (data[0], np.eye(4)[data[1]]))
    with pytest.raises(
        ValueError, match=r"labels of shape \(4,\).*batch\[0\] \[4, 16\], batch\[1\] \[2\]"
    ):
        run(None, (data[0], data[1][:4]))
    with pytest.raises(NameError, match=r'"dat" is not a mapped axis here.*Did you mean "data"'):
        run(None, axis="dat")
    with pytest.raises(TypeError, match=r"optimizer: expected one of Optax.* got str"):
        start(model, data, optimizer="sgd")


def test_arguments_of_other_types():
    data, mesh = batch(8), mesh_of(data=2)
    model = SimpleClassifier(num_classes=4, hidden=12)
    wrong: dict[str, tuple[Any, str]] = {
        "accumulate": (2.5, r"expected a whole number, at least 1, got 2\.5"),
        "bucket_bytes": ("1", "expected a whole number, at least 1, got '1'"),
        "axis_name": (None, 'expected the name of a mesh axis, such as "data", .* got None'),
        "loss_fn": (lambda outputs: 0.0, r"function \(outputs, batch\), got one of \(outputs\)"),
    }
    for name, (value, text) in wrong.items():
        with pytest.raises(TypeError, match=f"data_parallel_train_step: {name}: .*{text}"):
            data_parallel_train_step(model, **{name: value})
    with pytest.raises(TypeError, match=r"loss_fn: expected a function .*, got 'mse'"):
        data_parallel_train_step(model, loss_fn=cast("Any", "mse"))
    with pytest.raises(TypeError, match=r"data_axis: expected the name of a mesh axis.* got 1\."):
        pipeline_parallel_train_step(PPClassifier(), data_axis=cast("str", 1))
    with pytest.raises(TypeError, match=r"model: init: expected a function \(rng, inputs\), got"):
        data_parallel_train_step((lambda rng: {}, lambda params, x: x))
    with pytest.raises(TypeError, match=r"model: apply: expected a function \(params, inputs\)"):
        data_parallel_train_step((lambda rng, x: {}, lambda params: params))
    pair = jax.random.split(jax.random.key(0))
    keys = {r"0\.": 0, r"key<fry>\[2\]": pair, r"uint32\[3\]": np.zeros(3, np.uint32)}
    for got, rng in keys.items():
        with pytest.raises(TypeError, match=rf"rng: expected one key, .*key\(0\), got {got}"):
            create_train_state(model, optax.sgd(0.1), cast("Any", rng), data, mesh)
    with pytest.raises(TypeError, match=r"batch: its inputs\[0\]: expected an array .* got 'abc'"):
        start(model, (["abc"], data[1]), mesh)


def test_batches_without_examples():
    data, mesh = batch(8), mesh_of(data=2)
    model = SimpleClassifier(num_classes=4, hidden=12)
    state = start(model, data, mesh)
    step = data_parallel_train_step(model)
    with pytest.raises(ValueError, match=r"batch: expected examples, got batch\[0\] \[0, 16\], "):
        train(step, state, batch(0), mesh, state.specs)
    with pytest.raises(ValueError, match="batch: expected examples, got no arrays"):
        train(step, state, ((), ()), mesh, state.specs)


def test_a_batch_that_the_ranks_do_not_divide():
    """JAX refuses it, before the step is called; with what is needed to mend it."""
    data, mesh = batch(8), mesh_of(data=4)
    model = SimpleClassifier(num_classes=4, hidden=12)
    state = start(model, data, mesh)
    text = r"(?s)batch.*P\('data',\), which maps array axis 0 \(of size 7\) to mesh axis 'data'"
    with pytest.raises(ValueError, match=text):
        train(data_parallel_train_step(model), state, batch(7), mesh, state.specs)


def test_losses_that_are_reduced_already():
    """A mean of means is divided twice: refused, by its type."""
    data = batch(8)
    model = SimpleClassifier(num_classes=4, hidden=12)
    state = start(model, data)
    for reduce in (jax.lax.pmean, ft.partial(jaxcoll.all_reduce, op="mean")):
        step = data_parallel_train_step(
            model, loss_fn=lambda outputs, part, reduce=reduce: reduce(outputs.mean(), "data")
        )
        with pytest.raises(ValueError, match=r'loss is typed as the same on all ranks of "data"'):
            train(step, state, data, mesh_of(data=2))
    step = data_parallel_train_step(model, loss_fn=lambda outputs, part: outputs.argmax())
    with pytest.raises(TypeError, match="loss: expected a float, got int"):
        train(step, state, data, mesh_of(data=2))


def test_axes_of_parameters_do_not_split_the_batch():
    data, mesh = batch(8), mesh_of(data=2, tensor=2)
    model = TPClassifier(num_classes=4, hidden=24, mesh=mesh)
    state = start(model, data, mesh)
    for axes in (("data", "tensor"), "tensor"):
        step = data_parallel_train_step(model, axis_name=axes)
        with pytest.raises(ValueError, match=r'model splits parameters over "tensor", whose ranks'):
            train(step, state, data, mesh, state.specs, axes)
    with pytest.raises(ValueError, match='data_axis: "pipe" is the pipeline'):
        pipeline_parallel_train_step(PPClassifier(), data_axis="pipe")


def test_a_pipeline_without_a_data_axis():
    data, mesh = batch(8), mesh_of(pipe=4)
    model = PPClassifier(num_classes=4, num_layers=4, width=12)
    state = start(model, data, mesh)
    expected, _ = reference(model, jax.device_get(state.params), data)
    step = pipeline_parallel_train_step(model, 2, data_axis=())
    state, _ = train(step, state, data, mesh, state.specs, None)
    assert_trained_as(state.params, expected)


@pytest.mark.parametrize("kind", ["tensor", "zero1", "zero3"])
def test_a_state_in_parts_that_came_in_whole(kind: str):
    data, mesh = batch(8), mesh_of(data=2, tensor=2)
    plain = SimpleClassifier(num_classes=4, hidden=24)
    model = {
        "tensor": TPClassifier(num_classes=4, hidden=24, mesh=mesh),
        "zero1": fully_shard(plain, stage=1, min_weight_size=1),
        "zero3": fully_shard(plain, stage=3, min_weight_size=1),
    }[kind]
    state = start(model, data, mesh, optax.sgd(0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"came in whole.* write in_specs=\(state.specs, \.\.\.\)"):
        train(data_parallel_train_step(model), state, data, mesh)
    with pytest.raises(
        TypeError, match=r"state: expected one of jaxcoll.create_train_state, got dict"
    ):
        train(data_parallel_train_step(model), {"params": 1.0}, data, mesh)


def test_nothing_counted_is_no_gradient():
    data = batch(8)
    model = SimpleClassifier(num_classes=4, hidden=12)
    state = start(model, data)
    step = data_parallel_train_step(model, loss_fn=lambda outputs, part: (0 * outputs.sum(), 0))
    after, metrics = train(step, state, data, mesh_of(data=2))
    assert_trained_as(after.params, state.params)
    assert np.isnan(metrics[0]["loss"])


def test_errors():
    data = batch()
    model = SimpleClassifier(num_classes=4, hidden=12)
    with pytest.raises(TypeError, match=r"model: expected a Flax linen or NNX module.* got int"):
        data_parallel_train_step(3)
    with pytest.raises(ValueError, match="accumulate: expected at least 1, got 0"):
        data_parallel_train_step(model, accumulate=0)
    state = start(model, data)
    step = data_parallel_train_step(model, accumulate=5)
    with pytest.raises(ValueError, match=r"accumulate: 12 examples .* into 5 .*\[0\] of shape"):
        train(step, state, data, mesh_of(data=4))
    with pytest.raises(
        TypeError, match=r"batch: expected \(inputs, labels\), a dict with 'inputs'"
    ):
        start(model, {"x": data[0]})
    with pytest.raises(ValueError, match='step: schedule: expected one of "gpipe", "1f1b", '):
        pipeline_parallel_train_step(PPClassifier(), schedule="1f2b")
    with pytest.raises(TypeError, match=r"expected one whose __call__ takes pipeline=, .* got a"):
        pipeline_parallel_train_step(model)
    mesh = mesh_of(data=2, pipe=2)
    with pytest.raises(
        ValueError, match=r"params.*'bias'.* shape \(5, 12\) can't be split.*split=F"
    ):
        start(PPClassifier(num_classes=4, num_layers=5, width=12), data, mesh)
    pp = PPClassifier(num_classes=4, num_layers=4, width=12)
    state = start(pp, data, mesh)
    step = pipeline_parallel_train_step(pp, 5)
    with pytest.raises(ValueError, match="24 examples on each device can't be split into 5"):
        train(step, state, data, mesh, state.specs)
    unchecked = ft.partial(jax.shard_map, mesh=mesh, check_vma=False)
    f = unchecked(
        pipeline_parallel_train_step(pp),
        in_specs=(state.specs, jax.P("data")),
        out_specs=(state.specs, jax.P()),
    )
    with pytest.raises(ValueError, match="remove check_vma=False"):
        f(state, data)

"""Pipelines: the training of one device, in every schedule, beside every other axis.

In float64, leaf by leaf, to 1e-10: with plain gradient descent, which shows every wrong factor of a
gradient, and with AdamW.
"""

import functools as ft
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import native_missing
from flax import nnx
from jax import lax
from training import assert_trained_as, batch, mesh_of, reference, start, train, trained_alone

import jaxcoll
from jaxcoll import (
    data_parallel_train_step,
    fully_shard,
    pipelined,
    sequential,
    stacked_layers,
)
from jaxcoll.parallel.pure_model import as_pure

WIDTH = 8
OPTIMIZERS = {"sgd": optax.sgd(0.2), "adamw": optax.adamw(0.05)}
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved 2": {"schedule": "interleaved"},
    "interleaved 3": {"schedule": "interleaved", "num_chunks": 3},
}


class Block(nn.Module):
    axis: str | None = None
    mesh: Any = None
    drop: float = 0.0

    @nn.compact
    def __call__(self, x: Any, *, deterministic: bool = True) -> Any:
        options: dict[str, Any] = {"param_dtype": jnp.float64, "mesh": self.mesh}
        options["axis_name"] = self.axis
        y = nn.LayerNorm(param_dtype=jnp.float64)(x)
        y = nn.tanh(jaxcoll.ColumnParallelDense(12, **options)(y))
        y = jaxcoll.RowParallelDense(WIDTH, **options)(y)
        return x + nn.Dropout(self.drop)(y, deterministic=deterministic)


class OfLinen(nn.Module):
    """Its first weights are its last ones too."""

    layers: int
    axis: str | None = None
    mesh: Any = None
    drop: float = 0.0

    @nn.compact
    def __call__(self, x: Any, pipeline: Any = sequential, train: bool = False) -> Any:
        embed = self.param("embed", nn.initializers.normal(0.5), (16, WIDTH), jnp.float64)
        dropping = train and self.drop > 0
        x = x @ embed
        block = Block(self.axis, self.mesh, self.drop, parent=None)
        layer, stacked = stacked_layers(
            self, "blocks", block, self.layers, x, deterministic=not dropping
        )
        x = pipeline(layer, stacked, x, *([self.make_rng("dropout")] if dropping else []))
        return nn.Dense(4, param_dtype=jnp.float64)(x @ embed.T)


class OfNnx(nnx.Module):
    """What passes between its stages is a tree, of which a part has no derivative."""

    def __init__(self, layers: int) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(16, WIDTH, param_dtype=jnp.float64, rngs=rngs)
        kernels = jax.random.normal(rngs(), (layers, WIDTH, WIDTH), jnp.float64)
        self.kernel = nnx.Param(0.3 * kernels)
        self.bias = nnx.Param(jnp.zeros((layers, WIDTH)))
        self.out = nnx.Linear(WIDTH, 4, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x: Any, pipeline: Any = sequential) -> Any:
        def layer(params: Any, tree: Any) -> Any:
            x, sign, count = tree["x"], tree["sign"], tree["count"]
            y = jnp.tanh(x @ params["kernel"] + params["bias"]) * sign[:, None]
            y = {"x": x + y, "sign": -sign, "count": count + 1.0}
            return {**tree, **y, "number": tree["number"] + 1}

        stacked = {"kernel": self.kernel, "bias": self.bias}
        tree = {"x": self.embed(x), "sign": jnp.where(x[:, 0] > 0, 1, -1), "count": x[:, 1]}
        # Of no example, and of nothing at all.
        tree |= {"number": jnp.zeros((), int), "mask": jnp.ones(WIDTH, bool)}
        tree = pipeline(layer, stacked, tree)
        return self.out(tree["x"] * tree["mask"]) * (1 + 0.01 * tree["count"][:, None])


def of_functions(layers: int) -> Any:
    def init(rng: Any, inputs: Any) -> Any:
        del inputs
        keys = jax.random.split(rng, 3)
        draw = ft.partial(jax.random.normal, dtype=jnp.float64)
        return {
            "in": 0.3 * draw(keys[0], (16, WIDTH)),
            "layers": 0.3 * draw(keys[1], (layers, WIDTH, WIDTH)),
            "out": 0.3 * draw(keys[2], (WIDTH, 4)),
            "scale": jnp.ones(()),
        }

    def apply(params: Any, x: Any, pipeline: Any = sequential) -> Any:
        # Outside of the layers, and read by each of them.
        y = pipeline(
            lambda kernel, y: y + params["scale"] * jnp.tanh(y @ kernel),
            params["layers"],
            x @ params["in"],
        )
        return y @ params["out"] + x[:, :4]  # and what comes before them, after them

    return init, apply


LIBRARIES = {"linen": OfLinen, "nnx": OfNnx, "functions": of_functions}


@ft.cache
def on_one_device(library: str, layers: int, optimizer: str) -> Any:
    """Returns what `trained_alone` does, made once."""
    return trained_alone(
        as_pure("test", LIBRARIES[library](layers)), batch(), OPTIMIZERS[optimizer]
    )


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    with jax.enable_x64(True):
        yield


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


@pytest.mark.parametrize(
    ("name", "over"), [("1f1b", {"data": 2}), ("interleaved 2", {"data": 2, "tensor": 2})]
)
def test_dropout_is_that_of_micro_batches(name: str, over: dict[str, int]):
    """The same masks as without a pipeline: forward, and when a stage is computed again."""
    data, chunks = batch(), 2
    split = {"axis": "tensor"} if "tensor" in over else {}
    results = []
    for pipe in (1, 2):
        mesh = mesh_of(pipe=pipe, **over)
        model = OfLinen(2 * chunks, mesh=mesh if split else None, drop=0.5, **split)
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
    _, plain, _ = on_one_device("linen", 2 * chunks, "sgd")  # nothing dropped: something else
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


@pytest.mark.parametrize("name", ["1f1b", "interleaved 2"])
@pytest.mark.parametrize("communicates", [False, True])
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


# ---- What a compiled step holds ------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "p"),
    [
        pytest.param("1f1b", 2, marks=pytest.mark.full),
        ("gpipe", 2),
        ("1f1b", 4),
        ("interleaved 2", 2),
    ],
)
def test_memory_is_as_predicted(name: str, p: int):
    """Between 16 and 32 micro-batches, GPipe's grows by their inputs, and no other's does.

    As predicted to half an input of a stage.
    """
    grown, predicted = np.subtract(memory(name, p, 32), memory(name, p, 16))
    assert grown == pytest.approx(predicted, abs=0.5 * INPUT_BYTES)
    assert predicted == (16 * INPUT_BYTES if name == "gpipe" else 0)


def test_1f1b_needs_less_than_gpipe():
    """As predicted to two inputs: in what they need for a tick they differ by about one."""
    less, predicted = np.subtract(memory("gpipe", 2, 16), memory("1f1b", 2, 16))
    assert less == pytest.approx(predicted, abs=2 * INPUT_BYTES)
    assert predicted == (16 - 3) * INPUT_BYTES


@pytest.mark.skipif(native_missing() is not None, reason="counts the native calls")
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


# ---- Where a model's layers are made -------------------------------------------------------------


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + nn.tanh(nn.Dense(x.shape[-1], param_dtype=jnp.float64)(x))


class WithSetup(nn.Module):
    """A model without `nn.compact`, which makes its layers in one of two places."""

    in_setup: bool

    def setup(self) -> None:
        if self.in_setup:
            self.layer, self.stacked = self.layers(jnp.zeros((1, 16)))

    def layers(self, x: Any) -> Any:
        return stacked_layers(self, "blocks", Residual(parent=None), 3, x)

    def __call__(self, x: Any, pipeline: Any = sequential) -> Any:
        layer, stacked = (self.layer, self.stacked) if self.in_setup else self.layers(x)
        return pipeline(layer, stacked, x)[:, :4]


def test_layers_made_in_setup():
    data, mesh = batch(), mesh_of(data=1, pipe=2)
    model = pipelined(WithSetup(in_setup=True), 3)
    state = start(model, data, mesh)
    assert state.specs.params["blocks"]["Dense_0"]["kernel"] == jax.P("pipe")
    first = jax.device_get(state.unpadded().params)
    state, metrics = train(data_parallel_train_step(model), state, data, mesh, state.specs)
    expected, losses = reference(WithSetup(in_setup=True), first, data)
    assert_trained_as(state.unpadded().params, expected)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-10)


def test_layers_made_in_a_call_that_is_not_compact():
    text = (
        r"module: WithSetup makes parameters in a method .* Put @nn.compact on the method, or call"
    )
    with pytest.raises(ValueError, match=text):
        WithSetup(in_setup=False).init(jax.random.key(0), batch()[0])


# ---- Bad input -----------------------------------------------------------------------------------


class Odd(nn.Module):
    """A model that a test makes wrong in some way."""

    how: str

    @nn.compact
    def __call__(self, x: Any, pipeline: Any = sequential) -> Any:
        kernels = self.param("kernels", nn.initializers.normal(), (4, 16, 16), x.dtype)
        layer = lambda kernel, x: x + jnp.tanh(x @ kernel)  # noqa: E731
        if self.how == "statistics":
            x = nn.BatchNorm(use_running_average=False)(x)
        elif self.how == "another shape":
            layer = lambda kernel, x: (x @ kernel)[:, :8]  # noqa: E731
        elif self.how == "twice":
            x = pipeline(layer, kernels, x)
        elif self.how == "not a parameter":
            kernels = 2 * kernels
        elif self.how == "read elsewhere":
            x = x + kernels[0, 0]
        elif self.how == "other counts":
            more = self.param("more", nn.initializers.normal(), (5, 16), x.dtype)
            kernels, layer = (kernels, more), lambda params, x: x + x @ params[0] + params[1]
        if self.how == "under jit":
            x = jax.jit(lambda x: pipeline(layer, kernels, x))(x)
        elif self.how != "never":
            x = pipeline(layer, kernels, x)
        return nn.Dense(4, param_dtype=x.dtype)(x)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("statistics", r"it keeps \['batch_stats'\].*mean.*can't be kept in a pipeline"),
        ("another shape", r"a layer must return what it takes, float64\[48, 16\], but .*\[48, 8\]"),
        ("twice", "expected it to call pipeline= once, got 2 times"),
        ("not a parameter", "must be parameters of its own"),
        (
            "read elsewhere",
            r"params\['kernels'\] holds layers of the pipeline, but the model reads",
        ),
        ("other counts", r"must have the same first dimension, which counts layers, got \[4, 5\]"),
        ("under jit", r"calls pipeline= inside of a jax.jit, jax.checkpoint or loop of its own"),
        ("never", "it takes pipeline=, but does not call it"),
    ],
)
def test_models_that_cannot_be_cut(how: str, text: str):
    data, mesh = batch(), mesh_of(data=1, pipe=2)
    model = pipelined(Odd(how), 2)

    def trained() -> None:
        state = start(model, data, mesh)
        train(data_parallel_train_step(model), state, data, mesh, state.specs)

    with pytest.raises(ValueError, match=text):
        trained()


def test_errors():
    data, mesh = batch(), mesh_of(data=2, pipe=2)
    deep = OfLinen(5)
    with pytest.raises(TypeError, match=r"pipelined: model: expected one whose __call__ takes pip"):
        pipelined(nn.Dense(3))
    with pytest.raises(ValueError, match="pipelined: model: it is pipelined already, over 'pipe'"):
        pipelined(pipelined(deep))
    with pytest.raises(ValueError, match='pipelined: schedule: expected one of "gpipe", "1f1b"'):
        pipelined(deep, schedule="1f2b")
    with pytest.raises(ValueError, match="num_micro_batches: expected at least 1, got 0"):
        pipelined(deep, 0)
    with pytest.raises(ValueError, match="num_chunks: expected 2 or more"):
        pipelined(deep, schedule="interleaved", num_chunks=1)
    with pytest.raises(ValueError, match=r"stage_sizes: expected 2 numbers .* make 5 .* \(1, 2\)"):
        start(pipelined(deep, stage_sizes=(1, 2)), data, mesh)
    with pytest.raises(ValueError, match="1 layers can't be spread over 2 stages"):
        start(pipelined(OfLinen(1)), data, mesh)
    with pytest.raises(ValueError, match=r"pipelined: axis_name: 'stages' is not an axis"):
        start(pipelined(deep, axis_name="stages"), data, mesh)
    of_five = jaxcoll.models.PPClassifier(num_classes=4, num_layers=5, width=12)
    with pytest.raises(ValueError, match=r"it splits 5 layers over .pipe. itself, which 2 ranks"):
        start(pipelined(of_five), data, mesh)
    with pytest.raises(ValueError, match="mesh: pipelined needs one"):
        start(pipelined(deep), data)
    state = start(pipelined(deep), data, mesh)
    step = data_parallel_train_step(deep)
    with pytest.raises(ValueError, match=r"state: it was made pipelined over .* is not pipelined"):
        train(step, state, data, mesh, state.specs)
    step = data_parallel_train_step(pipelined(deep))
    with pytest.raises(ValueError, match=r"batch\[0\]: it is split over .pipe., as the"):
        train(step, state, data, mesh, state.specs, ("data", "pipe"))
    step = data_parallel_train_step(pipelined(deep), axis_name=("data", "pipe"))
    with pytest.raises(ValueError, match='splits parameters over "pipe", whose ranks'):
        train(step, state, data, mesh, state.specs, ("data", "pipe"))
    # The layers of a model that splits them itself are in its own order.
    model = jaxcoll.models.PPClassifier(num_classes=4, num_layers=4, width=12)
    step = jaxcoll.pipeline_parallel_train_step(model, 2, schedule="interleaved")
    state = start(model, data, mesh)
    with pytest.raises(ValueError, match="its layers lie on the ranks in the model's order, but"):
        train(step, state, data, mesh, state.specs)

"""Which models a pipeline can cut, and what it says of the others."""

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import OfLinen
from training import assert_trained_as, batch, mesh_of, reference, start, train

import jaxcoll
from jaxcoll import data_parallel_train_step, pipelined, sequential, stacked_layers


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    with jax.enable_x64(True):
        yield


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
        (
            "another shape",
            r"a layer must return what it takes, float64\[48, 16\], but .*\[48, 8\] \(x\)",
        ),
        ("twice", "expected it to call pipeline= once, got 2 times"),
        (
            "not a parameter",
            r"parameters of its own, as they are, got stacked, float64\[4, 16, 16\]\. Cast or",
        ),
        (
            "read elsewhere",
            r"params\['kernels'\] holds layers of the pipeline, but the model reads",
        ),
        (
            "other counts",
            r"dimension, 0, .* stacked\[0\] of shape \(4, 16, 16\) and stacked\[1\] of shape \(5,",
        ),
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


@pytest.mark.slow
def test_constants_between_stages():
    """Such as a table that each layer reads: what no trace has made."""
    table = np.linspace(0.5, 1, 4)

    def init(key: Any, x: Any) -> Any:
        del x
        return 0.3 * jax.random.normal(key, (3, 4, 4), np.float64)

    def apply(kernels: Any, x: Any, pipeline: Any = jaxcoll.sequential) -> Any:
        def layer(kernel: Any, tree: Any) -> Any:
            scaled = tree["x"] * tree["table"] + tree["more"]
            return {**tree, "x": tree["x"] + jnp.tanh(scaled @ kernel)}

        tree = {"x": x[:, :4], "table": table, "more": jnp.asarray(table)}
        return pipeline(layer, kernels, tree)["x"]

    data, trained = batch(), []
    for pipe in (1, 2):
        mesh = mesh_of(data=2, pipe=pipe)
        model = pipelined((init, apply), 3)
        state = start(model, data, mesh)
        state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
        trained.append(state.unpadded().params)
    assert_trained_as(trained[1], trained[0])


@pytest.mark.slow
def test_errors_of_a_pipeline_in_code_of_ones_own():
    def run(layers: int, examples: int) -> Any:
        x = {"a": jnp.ones((examples, 3))}
        return run_on(lambda w, x: {"a": x["a"] * w["w"]}, {"w": jnp.ones(layers)}, x)

    def run_on(layer: Any, stacked: Any, x: Any, micro: int = 4) -> Any:
        def program(stacked: Any, x: Any) -> Any:
            return jaxcoll.pipeline(layer, stacked, x, num_micro_batches=micro)

        mapped = jax.shard_map(program, mesh=mesh_of(pipe=2), in_specs=jax.P(), out_specs=jax.P())
        return mapped(stacked, x)

    text = r"6 examples .* into 4 micro-batches \(x\['a'\] of shape \(6, 3\)\)"
    with pytest.raises(ValueError, match=text):
        run(2, 6)
    text = r"1 layers can't .* over 2 .* 0 of stacked\['w'\] of shape \(1,\), over \"pipe\""
    with pytest.raises(ValueError, match=text):
        run(1, 8)
    kernels, x = jnp.ones(2), {"a": jnp.ones(8), "b": jnp.ones(8)}
    with pytest.raises(ValueError, match="pipeline: num_micro_batches: expected at least 1, got 0"):
        run_on(jnp.multiply, kernels, jnp.ones(8), micro=0)
    with pytest.raises(ValueError, match=r"num_micro_batches: x is a scalar, which .* Repeat it"):
        run_on(jnp.multiply, kernels, jnp.ones(()))
    text = (
        r"takes, float64\[2\], but it returns float32\[2\] \(x\['b'\]\)\. Cast at the layer's end"
    )
    with pytest.raises(ValueError, match=text):
        run_on(lambda w, x: {"a": w * x["a"], "b": x["b"].astype(np.float32)}, kernels, x)
    text = r"takes, a tree .*'a': \*, 'b': .*, but it returns .*'a': \*}\)\. Let it return what it"
    with pytest.raises(ValueError, match=text):
        run_on(lambda w, x: {"a": w * x["a"]}, kernels, x)


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
    with pytest.raises(ValueError, match="num_chunks: expected a number of chunks, got '2'"):
        pipelined(deep, schedule="interleaved", num_chunks=cast("Any", "2"))
    for wrong in ((2.5, 1.5), "22", ()):
        with pytest.raises(ValueError, match=r"stage_sizes: expected numbers .* as \(2, 3\), got"):
            pipelined(deep, stage_sizes=cast("Any", wrong))
    with pytest.raises(ValueError, match=r"stage_sizes: expected 2 numbers .* make 5 .* \(1, 2\)"):
        start(pipelined(deep, stage_sizes=(1, 2)), data, mesh)
    text = r"1 layers can't be spread over 2 .* 0 of params\['blocks'\].* of shape \(1,.*\"pipe\""
    with pytest.raises(ValueError, match=text):
        start(pipelined(OfLinen(1)), data, mesh)
    with pytest.raises(ValueError, match=r"pipelined: axis_name: 'stages' is not an axis"):
        start(pipelined(deep, axis_name="stages"), data, mesh)
    of_five = jaxcoll.models.PPClassifier(num_classes=4, num_layers=5, width=12)
    with pytest.raises(
        ValueError, match=r"it splits 5 layers over .pipe. itself.* 0 of params\['b"
    ):
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

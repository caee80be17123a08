"""Stage 3 of `fully_shard`: parameters are whole only where the model computes with them.

And stage 2: so are their gradients.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import auto_is_native
from equations import SUMS, equations
from flax import nnx
from jax import lax
from training import assert_trained_as, batch, mesh_of, start, train

from jaxcoll import create_train_state, data_parallel_train_step, fully_shard

WIDTH, LAYERS = 24, 3


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


# ---- Models --------------------------------------------------------------------------------------
# Of 16 features and four classes, in many forms. Each is a pair (init, apply). No example depends
# on others: ranks have different ones.


def init(rng: Any, x: Any) -> Any:
    """Returns layers in a list, what goes into them and what comes out, and a scalar."""
    keys = iter(jax.random.split(rng, 2 * LAYERS + 2))

    def weights(*shape: int) -> Any:
        return 0.15 * jax.random.normal(next(keys), shape, x.dtype)

    return {
        "in": weights(16, WIDTH),
        "layers": [{"up": weights(WIDTH, 48), "down": weights(48, WIDTH)} for _ in range(LAYERS)],
        "out": weights(WIDTH, 4),
        "scale": jnp.ones((), x.dtype),
    }


def layer(x: Any, params: Any) -> Any:
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def in_a_row(params: Any, x: Any) -> Any:
    x = x @ params["in"]
    for each in params["layers"]:
        x = layer(x, each)
    return params["scale"] * x @ params["out"]


def stacked(init: Callable[..., Any]) -> Callable[..., Any]:
    def make(rng: Any, x: Any) -> Any:
        params = init(rng, x)
        return {**params, "layers": jax.tree.map(lambda *a: jnp.stack(a), *params["layers"])}

    return make


def scanned(params: Any, x: Any, **options: Any) -> Any:
    """What is carried is a tree, with a counter; what all layers read is a parameter, too."""

    def body(carry: Any, each: Any) -> Any:
        x, count = carry
        params_of, factor = each
        x = layer(x, params_of) * factor + 0.01 * jnp.tanh(jnp.sum(params["out"]))
        return (x, count + 1), (jnp.mean(x, -1, keepdims=True), count)

    factors = jnp.linspace(0.5, 1, LAYERS)
    first = (x @ params["in"], jnp.int32(0))
    (x, count), (means, counts) = lax.scan(body, first, (params["layers"], factors), **options)
    more = jnp.sum(means, 0) + count + counts[0]
    return (params["scale"] * x + 0.1 * more) @ params["out"]


def read_by_all(params: Any, x: Any) -> Any:
    """Layers in a scan, each of which reads all of them, too; as does what comes after them."""
    up, down = params["layers"]["up"], params["layers"]["down"]

    def body(x: Any, each: Any) -> Any:
        return layer(x, each) * (1 + jnp.mean(up)), None

    x, _ = lax.scan(body, x @ params["in"], params["layers"])
    return x @ params["out"] * (1 + jnp.mean(down))


def branching(x: Any, params: Any) -> Any:
    condition = jnp.sum(params["up"]) > 0
    return lax.cond(condition, layer, lambda x, params: 2 * layer(x, params), x, params)


@jax.custom_vjp
def doubled(x: Any, w: Any) -> Any:
    return 2 * x @ w


doubled.defvjp(lambda x, w: (doubled(x, w), (x, w)), lambda r, y: (2 * y @ r[1].T, 2 * r[0].T @ y))


def with_own_gradient(x: Any, params: Any) -> Any:
    return x + jnp.tanh(doubled(x, params["up"])) @ params["down"]


@jax.jit
def nested(params: Any, x: Any) -> Any:
    """Layers inside functions of JAX that have parameters of their own."""
    x = x @ params["in"]
    for wrapped in (jax.jit(layer), jax.checkpoint(layer), branching, with_own_gradient):
        x = wrapped(x, params["layers"][0])
    return jax.checkpoint(lambda x, params: x @ params["out"] * params["scale"])(x, params)


def tied(params: Any, x: Any) -> Any:
    """The first parameter comes again at the end, transposed."""
    h = in_a_row(params, x) @ params["out"].T
    return (h @ params["in"].T)[:, :4]


def prepared_first(params: Any, x: Any) -> Any:
    """As a library does that casts all parameters at once, or arranges them anew."""
    return in_a_row(jax.tree.map(lambda leaf: (2 * leaf.T).T.astype(x.dtype) / 2, params), x)


def of_parameters_alone(params: Any, x: Any) -> Any:
    """What is not cheap, an integer, and one without a derivative."""
    count = jnp.int32(jnp.sum(params["in"]) > 0)
    factor = jnp.tanh(jnp.sum(params["out"] @ params["out"].T))
    stopped = lax.stop_gradient(params["layers"][0]["up"]).sum()
    return x @ params["in"] @ params["out"] * (1 + count) * factor + stopped


MODELS = {
    "in a row": (init, in_a_row),
    "nested": (init, nested),
    "scanned": (stacked(init), scanned),
    "scanned backwards": (stacked(init), ft.partial(scanned, reverse=True, unroll=2)),
    "scanned in a checkpoint": (stacked(init), jax.checkpoint(scanned)),
    "read by all": (stacked(init), read_by_all),
    "tied": (init, tied),
    "prepared first": (init, prepared_first),
    "of parameters alone": (init, of_parameters_alone),
}


def loss_of(apply: Callable[..., Any], params: Any, data: Any) -> Any:
    logits = apply(params, data[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, data[1]).mean()


def trained_alone(model: Any, params: Any, data: Any) -> Any:
    step = jax.jit(jax.grad(ft.partial(loss_of, model[1])))
    for _ in range(4):
        params = jax.tree.map(lambda p, g: p - 0.02 * g, params, step(params, data))
    return params


# ---- Values --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.product(
    model=tuple(MODELS),
    size=(1, 2, 3, 4, 8),
    bucket_bytes=(1, 2**13, 2**22),
    prefetch=(None, 0, 2),
    reshard_after_forward=(False, True),
    accumulate=(1, 2),
)
def test_trains_as_on_one_device(
    model: str,
    size: int,
    accumulate: int,
    bucket_bytes: int,
    prefetch: int | None,
    reshard_after_forward: bool,
):
    data, mesh = batch(), mesh_of(data=size)
    sharded = fully_shard(
        MODELS[model],
        min_weight_size=16,
        bucket_bytes=bucket_bytes,
        prefetch=prefetch,
        reshard_after_forward=reshard_after_forward,
    )
    state = start(sharded, data, mesh, optax.sgd(0.02))
    expected = trained_alone(MODELS[model], jax.device_get(state.unpadded().params), data)
    step = data_parallel_train_step(sharded, accumulate=accumulate)
    state, _ = train(step, state, data, mesh, state.specs)
    assert_trained_as(state.unpadded().params, expected)


@pytest.mark.slow
@pytest.mark.product(model=tuple(MODELS), size=(2, 3, 4))
def test_gradients_of_whole_parameters(model: str, size: int):
    data, mesh = batch(), mesh_of(data=size)
    sharded = fully_shard(MODELS[model], stage=2, min_weight_size=16)
    state = start(sharded, data, mesh, optax.sgd(0.02))
    expected = trained_alone(MODELS[model], jax.device_get(state.params), data)
    state, _ = train(data_parallel_train_step(sharded), state, data, mesh, state.specs)
    assert_trained_as(state.params, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_layers_are_never_split_among_ranks(stage: Any):
    """Even where their number is the largest dimension that the ranks divide."""

    def init(rng: Any, x: Any) -> Any:
        return {"w": 0.01 * jax.random.normal(rng, (64, 16, 16), x.dtype)}

    def apply(params: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (x + x @ w, None), x, params["w"])[0][:, :4]

    model = fully_shard((init, apply), stage=stage, min_weight_size=1)
    state = start(model, batch(), mesh_of(data=4), optax.trace(0.9))
    assert state.opt_state.trace["w"].sharding.spec == jax.P(None, None, "data")


def test_the_same_program_each_time():
    """In every process of a job: values that go from piece to piece keep their order."""

    def init(rng: Any, x: Any) -> Any:
        return [0.1 * jax.random.normal(key, (16, 16)) for key in jax.random.split(rng, 4)]

    def apply(params: Any, x: Any) -> Any:
        parts = [jnp.sin((i + 1) * x) for i in range(12)]
        for w in params:
            parts = [part @ w for part in parts]
        return jnp.sum(jnp.stack(parts), axis=0)[:, :4]

    data, mesh = batch(), mesh_of(data=2)
    texts = set()
    for _ in range(3):
        model = fully_shard((init, apply), min_weight_size=1, bucket_bytes=1)
        state = start(model, data, mesh)
        mapped = jax.shard_map(
            data_parallel_train_step(model),
            mesh=mesh,
            in_specs=(state.specs, jax.P("data")),
            out_specs=(state.specs, jax.P()),
        )
        texts.add(jax.jit(mapped).lower(state, data).as_text())
    assert len(texts) == 1


# ---- Memory --------------------------------------------------------------------------------------

WIDE = 512


class Unrolled(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(self.depth):
            x = nn.tanh(nn.Dense(WIDE, use_bias=False)(x))
        return x[:, :4]


class Scanned(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x: Any, _: Any) -> Any:
                return nn.tanh(nn.Dense(WIDE, use_bias=False)(x)), None

        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Layer, length=self.depth, **axes)()(x, None)[0][:, :4]


class OfNnx(nnx.Module):
    def __init__(self, depth: int) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            [nnx.Linear(WIDE, WIDE, use_bias=False, rngs=rngs) for _ in range(depth)]
        )

    def __call__(self, x: Any) -> Any:
        for each in self.layers:
            x = nnx.tanh(each(x))
        return x[:, :4]


class ScannedNnx(nnx.Module):
    def __init__(self, depth: int) -> None:
        @nnx.vmap
        def make(key: Any) -> Any:
            return nnx.Linear(WIDE, WIDE, use_bias=False, rngs=nnx.Rngs(key))

        self.layers = make(jax.random.split(jax.random.key(0), depth))

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: Any, one: Any) -> Any:
            return nnx.tanh(one(x))

        return run(x, self.layers)[:, :4]


def dense(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def normalised(x: Any, w: Any) -> Any:
    return dense(x, w / jnp.linalg.norm(w, axis=0))


def pair(depth: int, layer: Callable[..., Any] = dense) -> Any:
    def init(rng: Any, x: Any) -> Any:
        del x
        return [jax.random.normal(key, (WIDE, WIDE)) for key in jax.random.split(rng, depth)]

    def apply(params: Any, x: Any) -> Any:
        for w in params:
            x = layer(x, w)
        return x[:, :4]

    return init, apply


@ft.cache
def temporary_bytes(make: Any, depth: int, **options: Any) -> int:
    """Returns what the compiler says that a step of so many layers needs on each of 8 devices."""
    data, mesh = (np.zeros((8, WIDE), np.float32), np.zeros(8, np.int32)), mesh_of(data=8)
    model = fully_shard(make(depth), bucket_bytes=1, **options)
    with jax.enable_x64(False):
        state = create_train_state(model, optax.sgd(0.1), jax.random.key(0), data, mesh)
        step = jax.shard_map(
            data_parallel_train_step(model),
            mesh=mesh,
            in_specs=(state.specs, jax.P("data")),
            out_specs=(state.specs, jax.P()),
        )
        compiled = jax.jit(step, donate_argnums=0).lower(state, data).compile()
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes


WHOLE = WIDE * WIDE * 4


FORMS = [
    *(Unrolled, ScannedNnx),
    *(pytest.param(make, marks=pytest.mark.full) for make in (Scanned, OfNnx, pair)),
]


@pytest.mark.slow
@pytest.mark.parametrize("make", FORMS)
def test_memory_for_one_layer_whatever_the_depth(make: Any):
    """Beside it, each layer has its part of a gradient."""
    few, many = (temporary_bytes(make, depth, prefetch=0) for depth in (4, 16))
    assert many - few < 1.2 * 12 * WHOLE / 8
    assert many < 2.3 * WHOLE + 16 * WHOLE / 8  # a layer and its gradient


@pytest.mark.slow
def test_memory_where_a_layer_makes_something_of_its_parameter():
    """It is kept for the way back, unless it is made again there."""

    def growth(layer: Any) -> float:
        make = ft.partial(pair, layer=layer)
        few, many = (temporary_bytes(make, depth, prefetch=0) for depth in (4, 16))
        return (many - few) / (12 * WHOLE / 8)

    assert growth(jax.checkpoint(normalised)) < 1.2
    assert growth(normalised) > 4


@pytest.mark.slow
@pytest.mark.parametrize("make", FORMS)
def test_memory_for_two_layers_whatever_the_depth(make: Any):
    """The next one may be there ahead of its time; out of a scan, the compiler keeps it waiting."""
    few, many = (temporary_bytes(make, depth, prefetch=1) for depth in (4, 16))
    assert many - few < 1.2 * 12 * WHOLE / 8
    assert many < 4.5 * WHOLE + 16 * WHOLE / 8
    if make in (Scanned, ScannedNnx):
        assert temporary_bytes(make, 16, prefetch=0) < many


@pytest.mark.slow
@pytest.mark.parametrize("make", FORMS)
def test_memory_for_one_gradient_whatever_the_depth(make: Any):
    """Beside it, each layer has its part of a gradient, and of what is updated."""
    if make in (Scanned, ScannedNnx) and not auto_is_native():
        pytest.skip("on jax.lax a compiled scan holds the whole gradients of all its layers")
    few, many = (temporary_bytes(make, depth, stage=2) for depth in (4, 16))
    assert many - few < 1.2 * 12 * 2 * WHOLE / 8
    assert many < 2.3 * WHOLE + 16 * 2 * WHOLE / 8


@pytest.mark.slow
def test_memory_for_all_layers():
    for make in (Unrolled, Scanned):
        assert temporary_bytes(make, 16, reshard_after_forward=False) > 15 * WHOLE


# ---- Programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reshard", "expected"), [(True, 2 * 4 - 1), (False, 4)])
def test_gathers_and_scatters(reshard: bool, expected: int):
    """Of four layers: one each, again but for the last one; and no full gradient is summed."""
    model = fully_shard(Unrolled(4), bucket_bytes=1, reshard_after_forward=reshard)
    jaxpr = step_of(model)
    assert len(equations(jaxpr, "all_gather")) == expected
    assert len(equations(jaxpr, "reduce_scatter")) == 4
    sums = equations(jaxpr, *SUMS)
    assert sums
    assert all(WIDE not in v.aval.shape for equation in sums for v in equation.outvars)


@pytest.mark.parametrize(("accumulate", "shape"), [(1, (WIDE, WIDE)), (2, (4, WIDE, WIDE))])
def test_scatters_of_a_scan(accumulate: int, shape: tuple[int, ...]):
    """A layer's gradient as it is made, or that of all layers once, after micro-batches."""
    jaxpr = step_of(fully_shard(Scanned(4), stage=2), accumulate)
    (scatter,) = equations(jaxpr, "reduce_scatter")
    assert scatter.invars[0].aval.shape == shape


def step_of(model: Any, accumulate: int = 1) -> Any:
    """Returns the jaxpr of a step on four ranks."""
    data, mesh = (np.zeros((8, WIDE)), np.zeros(8, np.int32)), mesh_of(data=4)
    state = create_train_state(model, optax.sgd(0.1), jax.random.key(0), data, mesh)
    mapped = jax.shard_map(
        data_parallel_train_step(model, accumulate=accumulate),
        mesh=mesh,
        in_specs=(state.specs, jax.P("data")),
        out_specs=(state.specs, jax.P()),
    )
    return jax.make_jaxpr(mapped)(state, data).jaxpr


@pytest.mark.parametrize(
    ("reshard", "prefetch", "expected"),
    # Ahead: the first layer before the scan, the others in it.
    [(True, None, 2), (False, None, 1), (True, 0, 2), (True, 1, 4), (False, 1, 2)],
)
def test_gathers_of_a_scan(reshard: bool, prefetch: int | None, expected: int):
    model = fully_shard(Scanned(4), reshard_after_forward=reshard, prefetch=prefetch)
    jaxpr = step_of(model)
    assert len(equations(jaxpr, "all_gather")) == expected
    assert len(equations(jaxpr, "reduce_scatter")) == 1

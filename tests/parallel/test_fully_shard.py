"""`fully_shard`: parts of the state on each rank, and the parameters of training on one device."""

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equations import GATHERS, SUMS, equations
from flax import nnx
from jax import lax
from training import (
    assert_copies_are_equal,
    assert_same,
    assert_trained_as,
    batch,
    mesh_of,
    reference,
    start,
    train,
)

from jaxcoll import (
    clip_by_global_norm,
    create_train_state,
    data_parallel_train_step,
    fully_shard,
    global_norm,
    reshard,
    with_partitioning,
)
from jaxcoll.models import SimpleClassifier, TPClassifier

# 12 divides by all sizes but 8, which splits the input's 16.
PLAIN = SimpleClassifier(num_classes=4, hidden=12)
ADAM, MOMENTUM = optax.adamw(0.1), optax.sgd(0.5, momentum=0.9)


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_each_rank_holds(stage: Any):
    mesh = mesh_of(data=4)
    state = start(fully_shard(PLAIN, stage=stage, min_weight_size=16), batch(), mesh, ADAM)
    hidden, output = state.params["hidden_layer"], state.params["output_layer"]
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state.opt_state[0].mu)
    assert specs["hidden_layer"] == {"kernel": jax.P("data", None), "bias": jax.P()}
    assert specs["output_layer"] == {"kernel": jax.P("data", None), "bias": jax.P()}
    assert state.opt_state[0].count.sharding.spec == jax.P()
    held = {leaf.shape: leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(hidden)}
    assert held == {(16, 12): (4, 12) if stage == 3 else (16, 12), (12,): (12,)}
    assert output["bias"].sharding.is_fully_replicated
    assert [dim and dim.index for dim in state.split] == [None, 0, None, 0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_beside_tensor_parallelism(stage: Any):
    """A parameter that one axis splits already is split along its other dimension."""
    mesh = mesh_of(data=2, tensor=2)
    inner = TPClassifier(num_classes=4, hidden=24, mesh=mesh)
    state = start(fully_shard(inner, stage=stage, min_weight_size=16), batch(), mesh, ADAM)
    assert state.opt_state[0].mu["hidden_layer"]["kernel"].sharding.spec == jax.P("data", "tensor")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_dimensions_that_the_ranks_do_not_divide(stage: Any):
    """Zeros are stored at the end, and stay zeros; they are not seen in `unpadded`."""
    data, mesh = batch(), mesh_of(data=8)
    model = fully_shard(PLAIN, stage=stage, min_weight_size=16)
    state = start(model, data, mesh, ADAM)
    state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
    moment = state.opt_state[0].mu["output_layer"]["kernel"]
    assert moment.shape == (16, 4)
    assert moment.addressable_shards[0].data.shape == (2, 4)
    np.testing.assert_array_equal(moment[12:], 0)
    kernel = state.params["output_layer"]["kernel"]
    assert kernel.shape == ((16, 4) if stage == 3 else (12, 4))
    np.testing.assert_array_equal(kernel[12:], 0)
    plain = state.unpadded()
    assert plain.params["output_layer"]["kernel"].shape == (12, 4)
    assert plain.opt_state[0].mu["output_layer"]["kernel"].shape == (12, 4)
    assert plain.params["hidden_layer"]["kernel"] is state.params["hidden_layer"]["kernel"]
    PLAIN.apply({"params": plain.params}, data[0])
    assert plain.unpadded() is plain


@pytest.mark.slow
def test_from_zeros_at_the_end_to_others():
    """Training goes on with the same values on more ranks, fewer, and in other stages."""
    data = batch()
    state: Any = None
    for size, stage in ((8, 3), (3, 3), (8, 1), (2, 3), (8, 3)):
        mesh = mesh_of(data=size)
        model = fully_shard(PLAIN, stage=stage, min_weight_size=16)
        target = start(model, data, mesh, MOMENTUM)
        state = target if state is None else reshard(state, target.specs, mesh=mesh)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, target)
        state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
    plain = start(PLAIN, data, None, MOMENTUM)
    step = jax.jit(
        jax.shard_map(
            data_parallel_train_step(PLAIN),
            mesh=mesh_of(data=1),
            in_specs=(jax.P(), jax.P("data")),
            out_specs=jax.P(),
        )
    )
    for _ in range(20):
        plain, _ = step(plain, data)
    assert_trained_as(state.unpadded().params, plain.params)


@pytest.mark.parametrize(
    ("stage", "accumulate", "sums", "scatters", "gathers"),
    [
        *((0, 1, 1, 0, 0), (1, 1, 1, 0, 2), (2, 1, 1, 2, 2), (3, 1, 1, 2, 2)),
        # The first micro-batch, and all others in one loop: they add before they meet.
        *((0, 3, 1, 0, 0), (1, 3, 1, 0, 2), (2, 3, 1, 2, 2), (3, 3, 1, 4, 4)),
    ],
)
def test_how_often_ranks_communicate(
    stage: Any, accumulate: int, sums: int, scatters: int, gathers: int
):
    """Of two kernels that are split: all that is summed whole is one call."""
    data, mesh = batch(), mesh_of(data=4)
    model: Any = fully_shard(PLAIN, stage=stage, min_weight_size=16) if stage else PLAIN
    state = start(model, data, mesh, ADAM)
    mapped = jax.shard_map(
        data_parallel_train_step(model, accumulate=accumulate),
        mesh=mesh,
        in_specs=(state.specs, jax.P("data")),
        out_specs=(state.specs, jax.P()),
    )
    jaxpr = jax.make_jaxpr(mapped)(state, data).jaxpr
    assert len(equations(jaxpr, *SUMS)) == sums
    assert len(equations(jaxpr, "reduce_scatter")) == scatters
    assert len(equations(jaxpr, *GATHERS)) == gathers


def test_parts_are_no_replicas():
    """A state in parts that is called replicated is refused by its types."""
    data, mesh = batch(), mesh_of(data=4)
    model = fully_shard(PLAIN, min_weight_size=16)
    state = start(model, data, mesh)
    step = data_parallel_train_step(model)
    for specs in ((state.specs, jax.P()), (jax.P(), state.specs)):
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(specs[0], jax.P("data")), out_specs=(specs[1], jax.P())
        )
        with pytest.raises(Exception, match=r"replicat|came in whole"):
            jax.jit(mapped)(state, data)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_typed_axes(stage: Any):
    data, mesh = batch(), mesh_of(data=4)
    model = fully_shard(PLAIN, stage=stage, min_weight_size=16)
    state = start(model, data, mesh, MOMENTUM)
    params = jax.device_get(state.unpadded().params)
    expected, _ = reference(PLAIN, params, data, MOMENTUM)
    step = jax.shard_map(
        data_parallel_train_step(model),
        mesh=mesh,
        in_specs=(state.specs, jax.P("data")),
        out_specs=(state.specs, jax.P()),
        check_vma=False,
    )
    for _ in range(4):
        state, _ = jax.jit(step)(state, data)
    assert_trained_as(state.unpadded().params, expected)
    assert_copies_are_equal((state.params, state.opt_state))


def test_an_nnx_module():
    class Classifier(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.a = nnx.Linear(16, 12, rngs=rngs, param_dtype=jnp.float64)
            self.b = nnx.Linear(12, 4, rngs=rngs, param_dtype=jnp.float64)

        def __call__(self, x: Any) -> Any:
            return self.b(nnx.relu(self.a(x)))

    data, mesh = batch(), mesh_of(data=4)
    module: Any = Classifier()
    plain = {
        "hidden_layer": {"kernel": module.a.kernel[...], "bias": module.a.bias[...]},
        "output_layer": {"kernel": module.b.kernel[...], "bias": module.b.bias[...]},
    }
    expected, _ = reference(PLAIN, plain, data)
    model = fully_shard(module, min_weight_size=16)
    state = start(model, data, mesh)
    state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
    nnx.update(module, state.params)
    assert module.a.kernel[...].addressable_shards[0].data.shape == (4, 12)
    trained = [module.a.bias[...], module.a.kernel[...], module.b.bias[...], module.b.kernel[...]]
    assert_trained_as(trained, jax.tree.leaves(expected))


class Dropped(nn.Module):
    """Layers with dropout: in a row, of which one is computed again, and in a scan."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x: Any, _: Any = None) -> Any:
                x = nn.tanh(nn.Dense(16, param_dtype=jnp.float64)(x))
                return nn.Dropout(0.5, deterministic=not train)(x), None

        x, _ = Layer()(x)
        x, _ = nn.remat(Layer)()(x)
        splits = {"split_rngs": {"params": True, "dropout": True}}
        x, _ = nn.scan(Layer, variable_axes={"params": 0}, length=3, **splits)()(x, None)
        return x[:, :4]


class DroppedNnx(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(16, 16, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        self.dropouts = nnx.List([nnx.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        for dropout in self.dropouts:
            x = dropout(nnx.tanh(self.dense(x)))
        return x[:, :4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "bucket_bytes", "accumulate"),
    [
        (Dropped, 1, 1),
        (DroppedNnx, 2**22, 2),
        pytest.param(Dropped, 2**22, 2, marks=pytest.mark.full),
        pytest.param(DroppedNnx, 1, 1, marks=pytest.mark.full),
    ],
)
def test_what_is_dropped_where_parameters_are_gathered(
    make: Any, bucket_bytes: int, accumulate: int
):
    """The same as where they stay, on the way back as on the way forth."""
    data, mesh, model = batch(16), mesh_of(data=4), make()
    step = data_parallel_train_step(model, accumulate=accumulate)
    expected, losses = train(step, start(model, data, mesh), data, mesh)
    sharded = fully_shard(model, min_weight_size=16, bucket_bytes=bucket_bytes)
    state = start(sharded, data, mesh)
    step = data_parallel_train_step(sharded, accumulate=accumulate)
    state, seen = train(step, state, data, mesh, state.specs)
    assert_trained_as(state.params, expected.params)
    np.testing.assert_allclose([m["loss"] for m in seen], [m["loss"] for m in losses], rtol=1e-10)


@pytest.mark.slow
def test_parameters_of_all_sizes():
    """From `min_weight_size` values on they are split; those without any, and scalars, are not."""

    def init(rng: Any, x: Any) -> Any:
        w = 0.1 * jax.random.normal(rng, (16, 4), x.dtype)
        parts = {"small": jnp.ones((3, 21)), "none": jnp.ones((0, 4)), "scalar": jnp.ones(())}
        return {"w": w, **parts, "one": jnp.ones((1, 1))}

    def apply(params: Any, x: Any) -> Any:
        factor = params["scalar"] * params["one"] * params["small"].mean()
        return x @ params["w"] * factor + params["none"].sum(0)

    class Plain:
        def apply(self, variables: Any, x: Any) -> Any:
            return apply(variables["params"], x)

    data, mesh = batch(16), mesh_of(data=4)
    for stage, least, split in ((1, 64, {"w"}), (3, 64, {"w"}), (3, 0, {"w", "small"})):
        model = fully_shard((init, apply), stage=stage, min_weight_size=least)
        state = start(model, data, mesh, MOMENTUM)
        moments = state.opt_state[0].trace
        specs = {name: leaf.sharding.spec for name, leaf in moments.items()}
        assert {name for name, spec in specs.items() if spec != jax.P()} == split
        params = jax.device_get(state.unpadded().params)
        expected, _ = reference(Plain(), params, data, MOMENTUM)
        state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
        assert_trained_as(state.unpadded().params, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_sums_beyond_sixteen_bits(stage: Any, dtype: str):
    """100,000 examples, whose count and sums float16 can't hold, nor bfloat16 add one by one."""

    def init(rng: Any, x: Any) -> Any:
        del rng, x
        return {"w": jnp.zeros((8, 8), dtype)}

    def apply(params: Any, x: Any) -> Any:
        return params["w"].astype(jnp.float32).mean(), x

    def loss_fn(outputs: Any, part: Any) -> Any:
        count = part[0].size
        return -64 * outputs[0] * count, count

    data, mesh = (np.zeros((104_000, 1), np.float32), np.zeros(104_000, int)), mesh_of(data=4)
    model: Any = fully_shard((init, apply), min_weight_size=1) if stage else (init, apply)
    state = start(model, data, mesh, optax.sgd(1.0))
    step = data_parallel_train_step(model, loss_fn=loss_fn, accumulate=1000)
    state, _ = train(step, state, data, mesh, state.specs)
    np.testing.assert_array_equal(state.params["w"].astype(np.float32), np.full((8, 8), 4.0))


def memory_of(stage: Any) -> Any:
    """Returns what the compiler says that a step of a deep model needs on a device."""

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(6):
                x = nn.tanh(nn.Dense(512, use_bias=False)(x))
            return nn.Dense(4)(x)

    data, mesh = (np.zeros((8, 512)), np.zeros(8, int)), mesh_of(data=8)
    model = fully_shard(Deep(), stage=stage) if stage else Deep()
    state = start(model, data, mesh, ADAM)
    step = jax.shard_map(
        data_parallel_train_step(model),
        mesh=mesh,
        in_specs=(state.specs, jax.P("data")),
        out_specs=(state.specs, jax.P()),
    )
    return jax.jit(step, donate_argnums=0).lower(state, data).compile().memory_analysis()


@pytest.mark.slow
def test_each_stage_needs_less_memory():
    """On a device: what it holds between steps, parameters and AdamW's two moments, and in all."""
    needs = [memory_of(stage) for stage in (0, 1, 2, 3)]
    held = [need.argument_size_in_bytes for need in needs]
    in_all = [need.argument_size_in_bytes + need.temp_size_in_bytes for need in needs]
    params = 6 * 512 * 512 * 4
    assert held[0] > 3 * params
    assert held[1] == held[2] < 1.3 * params
    assert held[3] < 0.4 * params
    assert in_all[0] > 1.5 * in_all[1]
    assert 1.01 * in_all[1] > in_all[2] > in_all[3]
    assert in_all[3] < in_all[0] / 1.9


class Scanned(nn.Module):
    """Three layers, from as many features to as many."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def layer(dense: Any, x: Any) -> Any:
            return dense(x), None

        over = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return over(nn.Dense(x.shape[1], use_bias=False), x)[0]


def normal(rng: Any, x: Any) -> Any:
    return {"w": jax.random.normal(rng, (x.shape[1], 24), jnp.float32)}


# A model, its features, and what a rank has of its one parameter.
BORN: dict[str, tuple[Any, int, tuple[int, ...]]] = {
    "pair": ((normal, lambda params, x: x @ params["w"]), 1024, (128, 24)),
    "linen": (nn.Dense(24, use_bias=False), 1024, (128, 24)),
    "linen scan": (Scanned(), 256, (3, 256, 32)),
    "uneven": (nn.Dense(23, use_bias=False), 1021, (128, 23)),
}


@pytest.mark.parametrize("name", BORN)
def test_initialized_in_parts(name: str):
    """No device makes a whole parameter: the program that makes the state has none."""
    model, features, part = BORN[name]
    data, mesh = (np.zeros((8, features)), np.zeros(8, int)), mesh_of(data=8)

    def make(mesh: Any) -> Any:
        used = fully_shard(model) if mesh else model
        return create_train_state(used, optax.sgd(0.1), jax.random.key(0), data, mesh)

    state, alone = make(mesh), make(None)
    (stored,), (w,) = jax.tree.leaves(state.params), jax.tree.leaves(state.unpadded().params)
    assert stored.addressable_shards[0].data.shape == part
    program = str(jax.jit(lambda: make(mesh)).lower().compile().as_text())
    for shape in (stored.shape[-2:], w.shape[-2:]):
        assert f"{shape[0]},{shape[1]}]" not in program
    np.testing.assert_array_equal(w, *jax.tree.leaves(alone.params))


@pytest.mark.slow
def test_from_one_layout_to_another():
    """Training goes on in another layout as if nothing had been moved."""
    data, mesh = batch(), mesh_of(data=4)
    sharded = fully_shard(PLAIN, min_weight_size=16)
    plain_state = start(PLAIN, data, mesh, ADAM)
    target = start(sharded, data, mesh, ADAM)
    moved = reshard(plain_state, target.specs)
    assert moved.split == target.split
    assert moved.specs == target.specs
    assert_trained_as(moved.params, plain_state.params)
    after, _ = train(data_parallel_train_step(sharded), moved, data, mesh, moved.specs)
    expected, _ = reference(PLAIN, plain_state.params, data, ADAM)
    assert_trained_as(after.params, expected)
    back = reshard(after, plain_state.specs)
    assert back.split == ()
    again, _ = train(data_parallel_train_step(PLAIN), back, data, mesh, back.specs)
    assert int(again.step) == 8
    other = mesh_of(data=2)
    smaller = reshard(after, start(sharded, data, other, ADAM).specs, mesh=other)
    assert len(smaller.params["hidden_layer"]["kernel"].devices()) == 2


def test_errors():
    data, mesh = batch(), mesh_of(data=4)
    with pytest.raises(
        ValueError, match=r"fully_shard: stage: expected one of 1, 2, 3, got '3'\.$"
    ):
        fully_shard(PLAIN, stage="3")
    with pytest.raises(
        TypeError, match=r"axis_name: expected the name of one axis, .* hold copies"
    ):
        fully_shard(PLAIN, ("replica", "data"))
    with pytest.raises(TypeError, match="fully_shard: model: expected a Flax linen or NNX module"):
        fully_shard(3)
    wrong: dict[str, Any] = {"min_weight_size": "a", "prefetch": 1.5, "bucket_bytes": None}
    for name, value in wrong.items():
        text = rf"fully_shard: {name}: expected a whole number, at least \d, got {value!r}"
        with pytest.raises(TypeError, match=text):
            fully_shard(PLAIN, **{name: value})
    with pytest.raises(TypeError, match="reshard_after_forward: expected True or False, got 8"):
        fully_shard(PLAIN, reshard_after_forward=cast("bool", 8))
    with pytest.raises(TypeError, match="max_norm: expected a number, got '1'"):
        clip_by_global_norm(cast("float", "1"))
    model = fully_shard(PLAIN, min_weight_size=cast("int", 1.6e1))
    with pytest.raises(ValueError, match="sharded already, over 'data'"):
        fully_shard(model)
    with pytest.raises(ValueError, match="create_train_state: mesh: fully_shard needs one"):
        start(model, data)
    with pytest.raises(ValueError, match="fully_shard: axis_name: 'dat' is not an axis"):
        start(fully_shard(PLAIN, "dat"), data, mesh)
    with pytest.raises(ValueError, match=r'sharded over "fsdp", which must be one of.*"data"'):
        data_parallel_train_step(fully_shard(PLAIN, "fsdp"))
    state = start(model, data, mesh)
    with pytest.raises(ValueError, match=r"made with Zero.*stage=3.* is without fully_shard"):
        train(data_parallel_train_step(PLAIN), state, data, mesh, state.specs)
    other = data_parallel_train_step(TPClassifier(num_classes=4, mesh=mesh_of(tensor=2)))
    with pytest.raises(
        ValueError, match=r"made for a linen SimpleClassifier.*a linen TPClassifier"
    ):
        train(other, state, data, mesh, state.specs)
    other = data_parallel_train_step(fully_shard(PLAIN, stage=2, min_weight_size=16))
    with pytest.raises(ValueError, match=r"made with Zero.*stage=3.* model is with Zero.*stage=2"):
        train(other, state, data, mesh, state.specs)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((None, "data"), r'the model splits it over "data" itself, .*, as fully_shard would'),
        (("tensor", "tensor"), r'splits it over "tensor" twice\. An axis splits one dimension'),
        (("tensor", None, None), r"has an entry for dimension 2, but the leaf has shape \(16, 4\)"),
    ],
    ids=["the axis of fully_shard", "an axis twice", "too long"],
)
def test_what_a_model_says_of_its_parameters(names: Any, text: str):
    init = with_partitioning(nn.initializers.lecun_normal(), names)
    model = fully_shard(nn.Dense(4, kernel_init=init), min_weight_size=1)
    text = r"create_train_state: params\['kernel'\].*" + text
    with pytest.raises(ValueError, match=text):
        start(model, batch(), mesh_of(data=2, tensor=2))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_without_a_gradient(stage: Any):
    def init(rng: Any, x: Any) -> Any:
        del rng, x
        return {"w": jnp.ones((16, 4)), "table": jnp.ones(3, int)}

    data, mesh = batch(), mesh_of(data=4)
    model: Any = (init, lambda params, x: x @ params["w"])
    model = fully_shard(model, stage=stage, min_weight_size=1) if stage else model
    state = start(model, data, mesh)
    with pytest.raises(TypeError, match=r"model: params\['table'\], int64\[3\], has no gradient"):
        train(data_parallel_train_step(model), state, data, mesh, state.specs)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 2, 3])
def test_complex_parameters(stage: Any):
    """Of which layers in a scan, too."""

    def init(rng: Any, x: Any) -> Any:
        del x
        keys = jax.random.split(rng)
        shapes = {"layers": (2, 16, 16), "out": (16, 4)}
        draw = lambda key, shape: 0.1 * jax.random.normal(key, shape, jnp.complex128)  # noqa: E731
        return {name: draw(key, shapes[name]) for name, key in zip(shapes, keys, strict=True)}

    def apply(params: Any, x: Any) -> Any:
        x = lax.scan(lambda x, w: (x + (x @ w).real, None), x, params["layers"])[0]
        return jnp.abs(x @ params["out"]) ** 2

    class Plain:
        def apply(self, variables: Any, x: Any) -> Any:
            return apply(variables["params"], x)

    data, mesh = batch(16), mesh_of(data=4)
    model = fully_shard((init, apply), stage=stage, min_weight_size=16)
    state = start(model, data, mesh)
    expected, _ = reference(Plain(), jax.device_get(state.params), data)
    state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
    assert_trained_as(state.params, expected)


def by_their_square() -> optax.GradientTransformation:
    """Divides the gradients of matrices; reads them as vectors."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        del params
        return jax.tree.map(lambda g: g / jnp.vdot(g, g) if g.ndim == 2 else g, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize(
    "optimizer",
    [
        by_their_square(),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        optax.adafactor(0.1),
        optax.lamb(0.1),
        optax.noisy_sgd(0.1, key=0),
    ],
)
def test_optimizers_that_mix_values_are_refused(optimizer: Any):
    """Whatever splits the parameters: norms of a part, or a choice by its shape, would be wrong."""
    text = r"optimizer: .* not element by element.* params\['hidden_layer'\]\['kernel'\], "
    instead = r".*jaxcoll.clip_by_global_norm for optax.clip_by_global_norm, or"
    mesh = mesh_of(data=2, tensor=2)
    with pytest.raises(
        ValueError, match=text + r"float64\[16, 12\], .*\('data',.* \[8, 12\]" + instead
    ):
        start(fully_shard(PLAIN, min_weight_size=16), batch(), mesh, optimizer)
    with pytest.raises(ValueError, match=r"optimizer: .* not element by element.*'tensor'"):
        start(TPClassifier(num_classes=4, hidden=24, mesh=mesh), batch(), mesh, optimizer)
    start(PLAIN, batch(), mesh, optimizer)


@pytest.mark.slow
@pytest.mark.product(stage=(1, 2, 3), tensor=(1, 2))
def test_clipping_by_the_norm_of_the_whole(stage: Any, tensor: int):
    """Of what is split over either axis, or both, and of what is the same on all; beside copies."""
    data, mesh = batch(), mesh_of(replica=2, data=2, tensor=tensor)
    model: Any = TPClassifier(num_classes=4, hidden=24, mesh=mesh)
    plain = SimpleClassifier(num_classes=4, hidden=24)
    clipped = optax.chain(clip_by_global_norm(0.05), optax.sgd(0.5))
    sharded = fully_shard(model, stage=stage, min_weight_size=16)
    state = start(sharded, data, mesh, clipped)
    alone = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5))
    expected, _ = reference(plain, jax.device_get(state.params), data, alone)
    axes = ("replica", "data")
    step = data_parallel_train_step(sharded, axis_name=axes)
    state, _ = train(step, state, data, mesh, state.specs, batch_axes=axes)
    assert_trained_as(state.unpadded().params, expected)


def test_global_norm():
    """Of complex numbers too; refused where nobody knows what is split."""
    assert float(global_norm({})) == 0
    tree = {"z": jnp.array([3j, 4.0]), "h": jnp.full(4, 200, jnp.float16)}
    np.testing.assert_allclose(global_norm(tree), np.sqrt(25 + 4 * 200**2), rtol=1e-6)

    def norm_of(check_vma: bool) -> Any:
        return jax.shard_map(
            global_norm,
            mesh=mesh_of(data=2),
            in_specs=jax.P("data"),
            out_specs=jax.P(),
            check_vma=check_vma,
        )(tree)

    np.testing.assert_allclose(norm_of(True), global_norm(tree), rtol=1e-6)
    with pytest.raises(ValueError, match=r"global_norm: which leaves are split .* can't be known"):
        norm_of(False)


def test_an_optimizer_that_looks_at_shapes_is_refused():
    def mask(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.size > 100, params)

    with pytest.raises(ValueError, match="what it does with a parameter depends on its shape"):
        start(
            fully_shard(PLAIN, min_weight_size=1),
            batch(),
            mesh_of(data=2),
            optax.adamw(0.1, mask=mask),
        )


def of_the_first(*, rows: bool) -> optax.GradientTransformation:
    """Keeps the gradients of three rows, or columns, of matrices, by a schedule that counts too."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        del params
        rate = jnp.where(jnp.arange(7) < 3, 0.1, 0.2).sum()
        kept = lambda g: lax.broadcasted_iota(int, g.shape, 0 if rows else 1) < 3  # noqa: E731
        return jax.tree.map(lambda g: g * kept(g) * rate if g.ndim == 2 else g, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def test_an_optimizer_that_counts_positions_is_refused():
    """Along a dimension that is split: rows here."""
    data, mesh = batch(), mesh_of(data=4)
    model = fully_shard(PLAIN, min_weight_size=64)
    text = r"not element by element: iota in .*, which counts positions, would be wrong .*'kernel'"
    with pytest.raises(ValueError, match=text):
        start(model, data, mesh, of_the_first(rows=True))
    start(model, data, mesh, of_the_first(rows=False))
    text = "what it does with a parameter depends on its shape, and"
    for count in (lambda g: np.ones((16, 1)), lambda g: np.arange(len(g))[:, None]):
        times = lambda g, _, count=count: g * count(g) if g.shape[1:] == (12,) else g  # noqa: E731
        with pytest.raises(ValueError, match=text):
            start(model, data, mesh, optax.stateless_with_tree_map(times))
    zeros = optax.stateless_with_tree_map(lambda g, _: g + np.zeros(g.shape))
    start(model, data, mesh, zeros)


def is_kernel(params: Any) -> Any:
    """Names parameters by the paths that they have in the model."""
    paths = {"['hidden_layer']['kernel']", "['output_layer']['kernel']"}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path) in paths, params
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(optax.warmup_cosine_decay_schedule(0, 0.1, 2, 8)),
        optax.chain(optax.clip(1.0), optax.lion(0.1)),
        optax.rmsprop(0.1, momentum=0.9),
        optax.sgd(optax.piecewise_interpolate_schedule("linear", 0.1, {2: 0.5, 5: 0.1})),
        optax.masked(optax.adam(0.1), {"hidden_layer": True, "output_layer": False}),
        optax.adamw(0.1, weight_decay=0.5, mask=is_kernel),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        optax.MultiSteps(optax.chain(optax.clip(1.0), optax.adam(0.1)), every_k_schedule=2),
    ],
)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_optimizers_that_work_element_by_element(optimizer: Any, stage: Any):
    """What they keep of a parameter lies as it does, however deep in their state."""
    data, mesh = batch(), mesh_of(data=4)
    model = fully_shard(PLAIN, stage=stage, min_weight_size=16)
    state = start(model, data, mesh, optimizer)
    of_kernels = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim == 2]
    assert {leaf.sharding.spec for leaf in of_kernels} <= {jax.P("data", None)}
    expected, _ = reference(PLAIN, jax.device_get(state.unpadded().params), data, optimizer)
    state, _ = train(data_parallel_train_step(model), state, data, mesh, state.specs)
    assert_trained_as(state.unpadded().params, expected)


# ---- reshard -------------------------------------------------------------------------------------


def test_reshard_a_tree():
    mesh = mesh_of(data=2, model=4)
    tree = {"a": jnp.arange(32.0).reshape(4, 8), "b": {"c": jnp.arange(8.0), "d": jnp.ones(())}}
    specs = {"a": jax.P("data", "model"), "b": jax.P()}
    laid = reshard(tree, specs, mesh=mesh)
    assert laid["a"].sharding.spec == jax.P("data", "model")
    assert laid["b"]["c"].sharding.is_fully_replicated
    again = reshard(laid, {"a": jax.P(None, "model"), "b": {"c": jax.P("model"), "d": jax.P()}})
    assert again["a"].sharding.spec == jax.P(None, "model")
    jax.tree.map(np.testing.assert_array_equal, again, tree)


def test_reshard_what_an_optimizer_has_flattened():
    """Where nothing is split, nothing has to tell what belongs to which parameter."""
    state = start(PLAIN, batch(), mesh_of(data=4), optax.flatten(ADAM))
    smaller = mesh_of(data=2)
    moved = reshard(state, state.specs, mesh=smaller)
    assert_same(moved, state)
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(moved)} == {smaller}


def test_reshard_errors():
    mesh = mesh_of(data=3)
    tree = {"a": jnp.ones((4, 8)), "n": 1}
    with pytest.raises(ValueError, match="mesh: no array of the state lies on one yet"):
        reshard(tree, jax.P())
    with pytest.raises(ValueError, match=r"\['a'\]: dimension 0 of shape \(4, 8\) can't be split"):
        reshard(tree, {"a": jax.P("data"), "n": jax.P()}, mesh=mesh)
    with pytest.raises(ValueError, match=r"\['a'\] of shape \(4, 8\): new_specs: 'x' is not an"):
        reshard(tree, {"a": jax.P("x"), "n": jax.P()}, mesh=mesh)
    with pytest.raises(ValueError, match=r"new_specs: expected a jax.P for each leaf of the state"):
        reshard(tree, {"a": jax.P()}, mesh=mesh)
    with pytest.raises(ValueError, match=r"\['n'\]: expected a jax.P, got 3"):
        reshard(tree, {"a": jax.P(), "n": 3}, mesh=mesh)

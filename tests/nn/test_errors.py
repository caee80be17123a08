"""What tensor-parallel layers refuse, and what to do instead."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from training import mesh_of

import jaxcoll
from jaxcoll.models import TPClassifier

X = np.ones((2, 6, 12), np.float32)


def make(library: str, name: str, *features: int, mesh: Any = None, **options: Any) -> Any:
    """Makes a layer, and where that does not look at shapes yet, calls it."""
    if library == "nnx":
        return getattr(jaxcoll.nnx, name)(*features, rngs=nnx.Rngs(0), mesh=mesh, **options)
    is_embed = name == "VocabParallelEmbed"
    layer = getattr(jaxcoll, name)(*features[not is_embed :], mesh=mesh, **options)
    width = 12 if is_embed else features[0]
    x = np.ones((2, 6), int) if is_embed else np.ones((2, 6, width), np.float32)
    return jax.eval_shape(layer.init, jax.random.key(0), x)


@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("text", "name", "features", "options"),
    [
        ("ColumnParallelDense: (out_)?features: 10 can't be", "ColumnParallelDense", (12, 10), {}),
        ("RowParallelDense: in_features: 10", "RowParallelDense", (10, 12), {}),
        ("Embed: num_embeddings: 10 can't be split", "VocabParallelEmbed", (10, 12), {}),
        ("TPMLP: hidden: 10 can't be split .* Use a multiple of 4, or", "TPMLP", (12, 10), {}),
        ("TPAttention: num_kv_heads: 6 can't be split", "TPAttention", (12, 6), {}),
        ("num_heads: 8 heads can't share 12 features", "TPAttention", (12, 8), {}),
        (
            "num_kv_heads: 4 key-value heads can't be shared evenly by 6 heads",
            "TPAttention",
            (12, 6),
            {"num_kv_heads": 4},
        ),
        (
            "num_kv_heads: 3 can't be split over the 4",
            "TPAttention",
            (12, 12),
            {"num_kv_heads": 3},
        ),
        (
            "num_heads: 6 can't be split over the 4",
            "TPAttention",
            (12, 6),
            {"num_kv_heads": 2},
        ),
        (
            "head_width: 6 can't be split over the 4",
            "TPAttention",
            (4, 4),
            {"num_kv_heads": 1},
        ),
        (
            "'model' is not an axis of the mesh, .* Pass one of these, or a mesh that has it",
            "ColumnParallelDense",
            (12, 12),
            {"axis_name": "model"},
        ),
    ],
)
def test_what_can_not_be_shared(
    library: str, text: str, name: str, features: Any, options: dict[str, Any]
):
    with pytest.raises(ValueError, match=text):
        make(library, name, *features, mesh=mesh_of(tensor=4), **options)


def test_layers_are_named_by_where_they_are_in_the_model():
    """Which of many: those of linen know their path."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            mlp = jaxcoll.TPMLP(hidden=10, mesh=mesh_of(tensor=4), name="mlp")
            return mlp(jaxcoll.TPRMSNorm(name="norm")(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Block(name="second")(x)

    with pytest.raises(ValueError, match='TPMLP "second/mlp": hidden: 10 can\'t be split'):
        Model().init(jax.random.key(0), X)


@pytest.mark.parametrize("name", ["ColumnParallelDense", "RowParallelDense", "TPMLP"])
def test_a_layer_that_is_nowhere(name: str):
    with pytest.raises(ValueError, match=f'{name}: mesh: axis "tensor" is not mapped here'):
        make("linen", name, 12, 12)


def on_any_axis(library: str, name: str, x: Any, **options: Any) -> Any:
    """Makes and calls a layer that is one of Flax's where its axis is not mapped."""
    features = {"TPDropout": 0.5}.get(name, x.shape[-1])
    if library == "nnx":
        return getattr(jaxcoll.nnx, name)(features, rngs=nnx.Rngs(0), **options)(x)
    given = (features,) if name == "TPDropout" else ()
    layer = getattr(jaxcoll, name)(*given, **options)
    return layer.init_with_output(jax.random.key(0), x)[0]


@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("TPRMSNorm", {}), ("TPLayerNorm", {"split": "features"}), ("TPDropout", {})],
)
def test_an_axis_that_the_mesh_around_does_not_have(library: str, name: str, options: Any):
    """Where a mesh is known: without one, and where an axis is the compiler's, nothing is split."""
    mesh = mesh_of(data=2, tensor=4)

    def shape(axis_name: str | None, **manual: Any) -> Any:
        def on_rank(x: Any) -> Any:
            return on_any_axis(library, name, x, axis_name=axis_name, **options)

        if not manual:
            return jax.eval_shape(on_rank, X)
        in_map = jax.shard_map(on_rank, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), **manual)
        return jax.eval_shape(in_map, X)

    of_all, of_data = {"data", "tensor"}, {"data"}
    unknown = rf"{name}: axis_name: 'tensr' is not an axis of .* \"data\", \"tensor\". Did you mean"
    for axes in (of_all, of_data):
        with pytest.raises(ValueError, match=unknown):
            shape("tensr", axis_names=axes)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=unknown):
        shape("tensr")
    assert shape("tensr").shape == shape("tensor").shape == X.shape
    assert shape("tensor", axis_names=of_data).shape == X.shape
    assert shape(None, axis_names=of_all).shape == X.shape
    if library == "nnx" and name != "TPDropout":
        with pytest.raises(ValueError, match=f"{name}: axis_name: 'tensr' is not an axis of the"):
            on_any_axis(library, name, X, axis_name="tensr", mesh=mesh, **options)


@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize("name", ["ColumnParallelDense", "RowParallelDense"])
def test_a_sequence_that_can_not_be_shared(library: str, name: str):
    mesh = mesh_of(tensor=4)
    refused = pytest.raises(ValueError, match="the input's sequence: 6 can't be split over the 4")
    if library == "linen":
        with refused:
            make(library, name, 12, 12, mesh=mesh, sequence_parallel=True)
    else:
        layer = make(library, name, 12, 12, mesh=mesh, sequence_parallel=True)
        with refused:
            layer(X)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_no_sequence(library: str):
    mesh = mesh_of(tensor=4)
    layer = jaxcoll.nnx.ColumnParallelDense(
        12, 12, rngs=nnx.Rngs(0), mesh=mesh, sequence_parallel=True
    )
    if library == "linen":
        linen = jaxcoll.ColumnParallelDense(12, mesh=mesh, sequence_parallel=True)
        with pytest.raises(ValueError, match=r"x: expected \(..., s, in\), .* got shape \(12,\)"):
            linen.init(jax.random.key(0), X[0, 0])
    else:
        with pytest.raises(ValueError, match=r"x: expected \(..., s, in\), .* got shape \(12,\)"):
            layer(X[0, 0])
    embed = jaxcoll.nnx.VocabParallelEmbed(
        8, 12, rngs=nnx.Rngs(0), mesh=mesh, sequence_parallel=True
    )
    with pytest.raises(ValueError, match="tokens: expected a sequence to split"):
        embed(np.zeros((), int))
    with pytest.raises(ValueError, match="the sequence: 6 can't be split over the 4 ranks"):
        embed.attend(X)


def test_a_part_that_ranks_can_not_have_alike():
    """What is left over is refused, not left out: of a parameter, and of a model's inputs."""
    mesh = mesh_of(tensor=2)
    init = jaxcoll.with_partitioning(nn.initializers.ones, ("tensor", None))

    def on_rank(f: Any) -> Any:
        return jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=jax.P(), check_vma=False)

    with pytest.raises(ValueError, match=r"dimension 0 of shape \(5, 3\) can't be split"):
        jax.eval_shape(on_rank(lambda: init(jax.random.key(0), (5, 3)).value))
    model = TPClassifier(num_classes=4, hidden=8)
    with pytest.raises(ValueError, match=r"TPClassifier: dimension 1 of shape \(4, 7\)"):
        jax.eval_shape(on_rank(lambda: model.init(jax.random.key(0), np.ones((4, 7)))))


def test_other_arguments():
    mesh = mesh_of(tensor=4)
    with pytest.raises(ValueError, match=r"TPRMSNorm: split: expected one of .* Did you mean"):
        jaxcoll.TPRMSNorm(split="sequences").init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="num_features: 10 can't be split over the 4 ranks"):
        jaxcoll.nnx.TPRMSNorm(10, split="features", mesh=mesh, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="VocabParallelEmbed: tokens: expected integers"):
        jaxcoll.VocabParallelEmbed(8, 12, mesh=mesh).init(jax.random.key(0), X)
    with pytest.raises(AttributeError, match="no attribute 'TPConv'"):
        jaxcoll.nnx.TPConv  # noqa: B018


# ---- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True, "overlap": True}])
def test_half_precision_beside_float32_parameters(dtype: str, options: Any):
    """The computation's dtype comes out; gradients have the parameters'."""
    mesh = mesh_of(tensor=4)
    layer = jaxcoll.TPMLP(16, dtype=jnp.dtype(dtype), mesh=mesh, **options)
    plain = jaxcoll.TPMLP(16, axis_name=None)
    x = np.random.default_rng(0).normal(size=(2, 8, 12)).astype(np.float32)
    params = plain.init(jax.random.key(0), x)

    def loss(model: Any, params: Any) -> Any:
        y = model.apply(params, x)
        return (y.astype(np.float32) ** 2).mean(), y

    @jax.jit
    def derived(params: Any) -> Any:
        return jax.value_and_grad(lambda p: loss(layer, p), has_aux=True)(params)

    (value, y), grads = derived(params)
    (want, _), want_grads = jax.value_and_grad(lambda p: loss(plain, p), has_aux=True)(params)
    assert y.dtype == dtype
    np.testing.assert_allclose(value, want, rtol=2e-2)
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=0.1, atol=2e-2)


def test_norms_compute_in_float32():
    """Squares of these leave float16's range."""
    x = np.full((2, 4, 16), 400.0, np.float16)
    norm = jaxcoll.TPRMSNorm(axis_name=None)
    y, _ = norm.init_with_output(jax.random.key(0), x)
    assert y.dtype == np.float16
    np.testing.assert_allclose(y, np.ones_like(x), rtol=1e-3)
    plain = nn.LayerNorm(epsilon=1e-6)
    ones = np.random.default_rng(0).normal(size=(2, 4, 16)).astype(np.float32)
    got, _ = jaxcoll.TPLayerNorm(axis_name=None).init_with_output(jax.random.key(0), ones)
    want, _ = plain.init_with_output(jax.random.key(0), ones)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

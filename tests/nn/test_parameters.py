"""Parameters of tensor-parallel layers: the same on every mesh, and in checkpoints of all."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from layers import HIDDEN, LAYERS, VOCABULARY, WIDTH, Layer
from training import mesh_of

import jaxcoll
from jaxcoll import create_train_state, data_parallel_train_step
from jaxcoll.models import TransformerLM

INITS = {
    name: getattr(jax.nn.initializers, name)()
    for name in (
        *("lecun_normal", "he_normal", "glorot_uniform", "lecun_uniform"),
        *("orthogonal", "truncated_normal"),
    )
}


def assert_equal(actual: Any, expected: Any, *, rtol: float = 0.0) -> None:
    for got, want in zip(jax.tree.leaves(nn.unbox(actual)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


@pytest.mark.slow("size")
@pytest.mark.product(init=list(INITS), kind=("column", "row"), size=(1, 2, 3, 4, 8))
def test_first_values_are_those_of_one_device(init: str, kind: str, size: int):
    """Eagerly, born in parts under `jit`, and made inside a map; with a fan-in of the whole."""
    mesh = mesh_of(tensor=size)
    x = np.ones((2, WIDTH if kind == "column" else HIDDEN), np.float32)
    features = HIDDEN if kind == "column" else WIDTH
    name = {"column": "ColumnParallelDense", "row": "RowParallelDense"}[kind]
    key, kernel_init = jax.random.key(5), INITS[init]
    plain = nn.Dense(features, kernel_init=kernel_init).init(key, x)
    layer = getattr(jaxcoll, name)(features, mesh=mesh, kernel_init=kernel_init)
    assert_equal(layer.init(key, x), plain)
    specs = nn.get_partition_spec(jax.eval_shape(layer.init, key, x))
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    born = jax.jit(lambda: nn.unbox(layer.init(key, x)), out_shardings=shardings)()
    assert born["params"]["kernel"].sharding.spec == specs["params"]["kernel"]
    assert_equal(born, plain, rtol=1e-5)  # compiled together, the last bit may differ
    of_x = jax.P() if kind == "column" else jax.P(None, "tensor")
    inside = jax.shard_map(
        lambda x: nn.unbox(layer.init(key, x)), mesh=mesh, in_specs=of_x, out_specs=specs
    )
    assert_equal(jax.jit(inside)(x), plain, rtol=1e-5)

    def make(cls: Any, **options: Any) -> Any:
        made = cls(x.shape[1], features, rngs=nnx.Rngs(5), kernel_init=kernel_init, **options)
        return nnx.to_pure_dict(nnx.state(made, nnx.Param))

    assert_equal(make(getattr(jaxcoll.nnx, name), mesh=mesh), make(nnx.Linear))


def test_a_table_has_the_first_values_of_flax():
    mesh, key, tokens = mesh_of(tensor=4), jax.random.key(1), np.zeros((1, 4), int)
    plain = nn.Embed(VOCABULARY, WIDTH).init(key, tokens)
    assert_equal(jaxcoll.VocabParallelEmbed(VOCABULARY, WIDTH, mesh=mesh).init(key, tokens), plain)
    ours = jaxcoll.nnx.VocabParallelEmbed(VOCABULARY, WIDTH, mesh=mesh, rngs=nnx.Rngs(1))
    of_nnx = nnx.Embed(VOCABULARY, WIDTH, rngs=nnx.Rngs(1))
    assert_equal(ours.embedding[...], of_nnx.embedding[...])
    assert ours.embedding[...].sharding.spec == jax.P("tensor", None)


@pytest.mark.parametrize("row", LAYERS, ids=lambda row: row.name)
def test_both_libraries_split_alike(row: Layer):
    """In arrays, and in what a model that was not made yet says of them."""
    mesh = mesh_of(tensor=2)

    def make() -> Any:
        return row.nnx(rngs=nnx.Rngs(0), mesh=mesh)

    of_nnx = nnx.to_pure_dict(nnx.state(make(), nnx.Param))
    options = {} if "Norm" in row.name else {"mesh": mesh}
    linen = row.linen(**options)
    boxed = jax.eval_shape(
        lambda: linen.init(jax.random.key(0), row.x(), method=row.method)["params"]
    )
    specs = jax.tree.map(lambda spec: tuple(spec), nn.get_partition_spec(boxed))
    of_arrays = jax.tree.map(lambda leaf: tuple(leaf.sharding.spec), of_nnx)
    assert of_arrays == specs
    said = nnx.get_partition_spec(nnx.state(nnx.eval_shape(make), nnx.Param))
    assert jax.tree.map(tuple, nnx.to_pure_dict(said)) == specs
    assert jax.tree.map(np.shape, of_nnx) == jax.tree.map(np.shape, nn.unbox(boxed))


def test_layers_made_under_vmap():
    """Stacked, for nnx.scan: the new dimension is not split, those of a layer are."""
    mesh, x = mesh_of(tensor=2), np.ones((4, WIDTH), np.float32)

    @nnx.split_rngs(splits=3)
    @nnx.vmap(axis_size=3)
    def make(rngs: nnx.Rngs) -> Any:
        return jaxcoll.nnx.RowParallelDense(WIDTH, WIDTH, rngs=rngs, mesh=mesh)

    layers = make(nnx.Rngs(0))
    assert layers.kernel[...].shape == (3, WIDTH, WIDTH)
    assert tuple(layers.kernel[...].sharding.spec)[:2] == (None, "tensor")

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer: Any, x: Any) -> Any:
        return layer(x)

    want = x
    for kernel in np.asarray(layers.kernel[...]):
        want = want @ kernel
    np.testing.assert_allclose(nnx.jit(forward)(layers, x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_serves_all(tmp_path: Any):
    """Two ranks in sync, four with collective matmuls, then one: as if nothing had happened.

    Of the four ranks two share a key-value head.
    """
    windows = np.random.default_rng(0).integers(0, 8, (8, 9))
    data = windows[:, :-1], windows[:, 1:]

    def loss(logits: Any, batch: Any) -> Any:
        return jaxcoll.vocab_parallel_cross_entropy(logits, batch[1]).mean()

    def start(size: int, **options: Any) -> tuple[Any, Any]:
        mesh = mesh_of(data=8 // size, tensor=size)
        model = TransformerLM(8, 1, 16, 4, num_kv_heads=2, axis_name="tensor", mesh=mesh, **options)
        optimizer = optax.sgd(0.1, momentum=0.9)
        state = create_train_state(model, optimizer, jax.random.key(0), data, mesh)
        step = jax.shard_map(
            data_parallel_train_step(model, loss_fn=loss),
            mesh=mesh,
            in_specs=(state.specs, jax.P("data")),
            out_specs=(state.specs, jax.P()),
        )
        return state, jax.jit(step)

    undisturbed, step = start(2)
    for _ in range(6):
        undisturbed, _ = step(undisturbed, data)
    state: Any = None
    in_rings = {"sequence_parallel": True, "overlap": True}
    with jaxcoll.Checkpoints(tmp_path) as checkpoints:
        for number, (size, options) in enumerate(((2, {}), (4, in_rings), (1, {}))):
            state, step = start(size, **options)
            state = checkpoints.restore(state) if number else state
            for _ in range(2):
                state, _ = step(state, data)
            checkpoints.save(state)
    assert int(state.step) == 6
    assert_equal(state.params, undisturbed.params, rtol=1e-5)

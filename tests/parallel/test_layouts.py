"""Importers: weights as other systems store them compute the same there as ours do here."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import mesh
from jax import lax

from jaxcoll import export_stages, export_tp_dense, import_stages, import_tp_dense
from jaxcoll.models import PPClassifier

SIZES = (1, 2, 3, 4, 8)
IN, OUT = 24, 48


def dense_params(bias: bool = True, out: int = OUT) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    kernel = rng.integers(-4, 5, (IN, out)).astype(np.float32)
    return {"kernel": kernel} | (
        {"bias": rng.integers(-4, 5, out).astype(np.float32)} if bias else {}
    )


def local(tree: Any) -> Any:
    """Returns a rank's part of arrays whose first dimension counts ranks."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def apply_dense(params: Any, x: Any) -> Any:
    return x @ params["kernel"] + params.get("bias", 0)


def send(x: Any, size: int, *, down: bool = False) -> Any:
    return lax.ppermute(x, "x", [(i, (i + (-1 if down else 1)) % size) for i in range(size)])


def their_layer(
    params: Any, x: Any, size: int, tp_mode: str, layout: str, split_scatter: bool
) -> Any:
    """Computes as the documented layers do, on what a rank holds of weights and of features."""
    if layout == "stacked":
        dense = local(params["module"]["sharded"])
        if tp_mode == "gather":
            return apply_dense(dense, lax.all_gather(x, "x", axis=1, tiled=True))
        return lax.psum_scatter(apply_dense(dense, x), "x", scatter_dimension=1, tiled=True)
    shards = [local(params[f"shard_{i}"]["sharded"]) for i in range(size)]
    if tp_mode == "gather":
        total = apply_dense(shards[0], x)
        for shard in shards[1:]:
            x = send(x, size)
            total = total + apply_dense(shard, x)
        return total
    ys = [apply_dense(shard, x) for shard in shards]
    columns = ys[0].shape[1]
    half = columns // 2 if split_scatter else columns
    up, down = ys[0][:, :half], ys[0][:, half:]
    for y in ys[1:]:
        up = send(up, size) + y[:, :half]
        down = send(down, size, down=True) + y[:, half:]
    return jnp.concatenate([up, down], axis=1)


@pytest.mark.product(
    size=SIZES,
    tp_mode=("gather", "scatter"),
    layout=("stacked", "ring"),
    split=(False, True),
    bias=(True, False),
)
def test_exported_weights_compute_the_same_there(
    size: int, tp_mode: Any, layout: Any, split: bool, bias: bool
):
    assert_computes_the_same(dense_params(bias), size, tp_mode, layout, split)


@pytest.mark.parametrize("layout", ["stacked", "ring"])
def test_halves_of_an_odd_number_of_features(layout: Any):
    assert_computes_the_same(dense_params(out=4 * 5), 4, "scatter", layout, True)


def assert_computes_the_same(
    params: Any, size: int, tp_mode: Any, layout: Any, split: bool
) -> None:
    theirs = export_tp_dense(params, tp_mode, size, layout, split_scatter=split)
    back = import_tp_dense(theirs, tp_mode, split_scatter=split)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    if size == 1:
        return
    x = np.random.default_rng(1).integers(-4, 5, (2, IN)).astype(np.float32)
    f = jax.shard_map(
        lambda p, x: their_layer(p, x, size, tp_mode, layout, split),
        mesh=mesh(size),
        in_specs=(jax.P("x"), jax.P(None, "x")),
        out_specs=jax.P(None, "x"),
    )
    np.testing.assert_array_equal(jax.jit(f)(theirs, x), apply_dense(params, x))


def test_stacked_biases_of_a_scatter_layer_are_added():
    """As the layer itself does: p biases, all of them trained."""
    biases = np.arange(12.0).reshape(4, 3)
    tree = {"up": {"sharded": {"kernel": np.ones((4, 2, 3)), "bias": biases}}}
    imported = import_tp_dense(tree, "scatter")
    assert imported["kernel"].shape == (8, 3)
    np.testing.assert_array_equal(imported["bias"], biases.sum(0))


def test_boxes_are_opened():
    params = dense_params()
    theirs = export_tp_dense(params, "gather", 4)
    boxed = jax.tree.map(
        lambda leaf: nn.Partitioned(leaf, names=("tp", *[None] * (leaf.ndim - 1))), theirs
    )
    jax.tree.map(np.testing.assert_array_equal, import_tp_dense(boxed, "gather"), params)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_stages(size: int):
    """Layers stacked by stage, and what one stage alone has."""
    params = PPClassifier(num_layers=8).init(jax.random.key(0), np.ones((2, 16)))["params"]
    layers = {name: params[name].value for name in ("kernel", "bias")}
    theirs = export_stages(layers, size)
    assert theirs["sharded"]["kernel"].shape == (size, 8 // size, 64, 64)
    boxed = jax.tree.map(lambda leaf: nn.Partitioned(leaf, names=("pipe",)), theirs)
    jax.tree.map(np.testing.assert_array_equal, import_stages(boxed), layers)
    head = params["output_layer"]
    masked = export_stages(head, size, masked_to=size - 1)
    for rank in range(size - 1):
        assert not any(leaf[rank].any() for leaf in jax.tree.leaves(masked))
    jax.tree.map(np.testing.assert_array_equal, import_stages(masked, masked=True), head)


def test_errors():
    params = dense_params()
    with pytest.raises(ValueError, match='tp_mode: expected one of "gather", "scatter"'):
        import_tp_dense(params, "none")
    with pytest.raises(ValueError, match=r"got keys \['a', 'b'\]"):
        import_tp_dense({"a": 1, "b": 2}, "gather")
    with pytest.raises(ValueError, match="5 ranks can't share the kernel's 24 input features"):
        export_tp_dense(params, "gather", 5)
    with pytest.raises(ValueError, match="layout: expected one of"):
        export_tp_dense(params, "gather", 2, "rings")
    ring = export_tp_dense(params, "gather", 4, "ring")
    del ring["shard_3"]
    with pytest.raises(ValueError, match="3 shards of a ring of 4 ranks"):
        import_tp_dense(ring, "gather")
    with pytest.raises(ValueError, match="3 stages can't share layers of shape"):
        export_stages({"w": np.ones((8, 2))}, 3)
    with pytest.raises(ValueError, match="masked_to: expected a rank from 0 to 1, got 2"):
        export_stages({"w": np.ones(2)}, 2, masked_to=2)

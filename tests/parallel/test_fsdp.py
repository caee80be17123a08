"""Fully sharded data parallelism: the functions of xlstm-jax, and training as on one device."""

import functools as ft
import logging
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import mapped, mesh
from jax import lax

from jaxcoll import (
    gather_array_with_mean_grads,
    gather_params,
    shard_module_params,
    shard_params,
    sync_gradients,
)

SIZES = (1, 2, 3, 4, 8)


def on_ranks(f: Any, size: int, *arguments: Any, check_vma: bool = True) -> Any:
    """Calls `f` with each rank's arguments; results are stacked."""
    return jax.jit(mapped(f, mesh(size), check_vma=check_vma))(*arguments)


# ---- Functions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_dimension_is_split(size: int):
    shapes = {
        "tall": (24, 2),
        "wide": (2, 24),
        "square": (24, 24),
        "deep": (2, 24, 3),
        "odd": (5, 7),
    }
    seen: dict[str, Any] = {}

    def f(rank: Any) -> Any:
        params = {k: jnp.arange(np.prod(s)).reshape(s) for k, s in shapes.items()}
        parts = shard_params(params, "x", min_weight_size=0)
        seen.update({k: getattr(p, "names", None) for k, p in parts.items()})
        return jax.tree.map(lambda leaf: leaf + 0 * rank, parts)

    parts = on_ranks(f, size, np.zeros(size, int))
    assert seen["tall"] == ("x", None)
    assert seen["wide"] == (None, "x")
    assert seen["square"] == (None, "x")  # the last among equals
    assert seen["deep"] == (None, "x", None)
    assert seen["odd"] == ((None, "x") if size == 1 else None)
    for name, shape in shapes.items():
        if seen[name]:
            whole = np.concatenate(list(parts[name].value), axis=seen[name].index("x"))
            np.testing.assert_array_equal(whole, np.arange(np.prod(shape)).reshape(shape))


def test_small_parameters_stay_whole():
    """Fewer than `min_weight_size` values: not split. That many: split."""

    def f(rank: Any) -> Any:
        params = {"fewer": jnp.zeros(98), "as many": jnp.zeros(100), "scalar": jnp.zeros(())}
        parts = shard_params(params, "x", min_weight_size=100)
        assert isinstance(parts["as many"], nn.Partitioned)
        assert not isinstance(parts["fewer"], nn.Partitioned)
        assert not isinstance(parts["scalar"], nn.Partitioned)
        with pytest.raises(TypeError, match="min_weight_size: expected a number of values, got"):
            shard_params(params, "x", min_weight_size=cast("int", "a"))
        with pytest.raises(TypeError, match="sync_gradients: axis_names: expected the name of a"):
            sync_gradients(params, cast("str", None))
        return rank

    on_ranks(f, 2, np.zeros(2))


def test_what_cannot_be_split_is_logged(caplog: pytest.LogCaptureFixture):
    def f(rank: Any) -> Any:
        params = {"a": {"w": jnp.zeros((3, 5))}}
        assert shard_params(params, "x", 0)["a"]["w"].shape == (3, 5)
        parts = shard_params({"v": jnp.zeros(4)}, "x", 0)
        assert shard_params(parts, "x", 0)["v"] is parts["v"]
        return rank

    with caplog.at_level(logging.WARNING, "jaxcoll"):
        on_ranks(f, 2, np.zeros(2))
    assert any("['a']['w'] of shape (3, 5) stays whole" in text for text in caplog.messages)
    assert any("['v'] is split over \"x\" already" in text for text in caplog.messages)


@pytest.mark.product(size=SIZES, axis=(0, 1))
def test_gathering_gives_mean_gradients(size: int, axis: int):
    xs = np.random.default_rng(0).integers(-4, 5, (size, 2, 3)).astype(np.float32)
    wide = np.stack([np.concatenate(list(xs), axis=axis)] * size)
    factors = np.random.default_rng(2).integers(-4, 5, wide.shape).astype(np.float32) * 24

    def f(x: Any, factor: Any) -> Any:
        def loss(x: Any) -> Any:
            return (gather_array_with_mean_grads(x, axis, "x") * factor).sum()

        return gather_array_with_mean_grads(x, axis, "x"), jax.grad(loss)(x)

    whole, grads = on_ranks(f, size, xs, factors)
    np.testing.assert_array_equal(whole, wide)
    mean = factors.mean(axis=0)
    np.testing.assert_array_equal(np.concatenate(list(grads), axis=axis), mean)


def test_dtypes_on_the_way():
    def f(x: Any) -> Any:
        gather = ft.partial(
            gather_array_with_mean_grads,
            axis=0,
            axis_name="x",
            gather_dtype=jnp.bfloat16,
            grad_scatter_dtype=jnp.float16,
        )
        whole = gather(x)
        assert whole.dtype == jnp.bfloat16
        grad = jax.grad(lambda x: (gather(x).astype(jnp.float32) * 40000).sum())(x)
        assert grad.dtype == x.dtype == jnp.float32
        return grad

    # Their sum is beyond float16, their mean is not.
    grads = on_ranks(f, 4, np.ones((4, 8), np.float32))
    np.testing.assert_array_equal(grads, np.full((4, 8), np.float16(jnp.bfloat16(40000))))


def test_dtypes_of_trees_and_modules():
    """Each function hands its dtypes on."""
    dtypes = {"gather_dtype": jnp.bfloat16, "grad_scatter_dtype": jnp.float16}

    def f(x: Any) -> Any:
        box = nn.Partitioned(x, names=("x", None))
        assert gather_params({"w": box}, "x", **dtypes)["w"].dtype == jnp.bfloat16

        class Probe(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                w = self.param("w", nn.initializers.ones, (8, 4))
                assert w.dtype == (jnp.float32 if self.is_initializing() else jnp.bfloat16)
                return (w.astype(jnp.float32) * 40000).sum() + 0 * x.sum()

        model = shard_module_params(Probe, "x", 1, **dtypes)()
        params = model.init(jax.random.key(0), x)
        return jax.grad(lambda p: model.apply(p, x))(params)["params"]["w"].value

    # A sum of float16 is taken in float32: only the mean must be in its range.
    grads = on_ranks(f, 2, np.ones((2, 4, 4), np.float32))
    np.testing.assert_array_equal(grads, np.full(grads.shape, np.float16(jnp.bfloat16(40000))))


def test_the_major_axis_of_two_is_not_gathered_first():
    box = nn.Partitioned(np.arange(8.0), names=(("x", "y"),))

    def f(x: Any) -> Any:
        with pytest.raises(
            ValueError, match=r"split over \('x', 'y'\), whose last must be gathered"
        ):
            gather_params(box, "x")
        return x

    jax.jit(mapped(f, mesh(2, 2)))(np.ones(4))


def test_gathering_leaves_other_axes_split():
    def f(x: Any) -> Any:
        tree = {
            "both": nn.Partitioned(x, names=("tensor", "x")),
            "other": nn.Partitioned(x, names=("tensor", None)),
            "one": nn.Partitioned(x, names=("x", None)),
            "plain": x,
        }
        whole = gather_params(tree, "x")
        assert whole["both"].names == ("tensor", None)
        assert whole["both"].value.shape == (2, 6)
        assert whole["other"] is tree["other"]
        assert whole["plain"] is x
        assert whole["one"].shape == (4, 3)
        return x

    on_ranks(f, 2, np.ones((2, 2, 3)))


def test_gradients_are_averaged_where_the_parameter_is_replicated():
    """Parts of a parameter that is split over an axis are other numbers: never averaged over it."""
    over = mesh(2, 2)

    def f(x: Any) -> Any:
        grads = {
            "plain": x,
            "on x": nn.Partitioned(x, names=("x",)),
            "on both": nn.Partitioned(x, names=(("x", "y"),)),
        }
        return sync_gradients(grads, ("x", "y")), sync_gradients(grads, "y")

    xs = np.array([[0.0], [2.0], [4.0], [10.0]])
    both, one = jax.jit(mapped(f, over))(xs)
    np.testing.assert_array_equal(both["plain"][:, 0], [4] * 4)
    np.testing.assert_array_equal(both["on x"].value[:, 0], [1, 1, 7, 7])
    np.testing.assert_array_equal(both["on both"].value, xs)
    np.testing.assert_array_equal(one["plain"][:, 0], [1, 1, 7, 7])


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_that_jax_has_summed(check_vma: bool):
    """Those of parameters that are typed as the same on all ranks: means all the same."""

    def f(w: Any, x: Any) -> Any:
        return sync_gradients(jax.grad(lambda w: (w * x).sum())(w), ("x", "y"))

    g = jax.shard_map(
        f,
        mesh=mesh(2, 2),
        in_specs=(jax.P(), jax.P(("x", "y"))),
        out_specs=jax.P(),
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(g)(np.ones(1), np.array([0.0, 2, 4, 10])), [4])


# ---- Training ------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two dense layers; `dense` makes one of a number of features."""

    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.tanh(self.dense(24, name="first")(x))
        return self.dense(6, name="second")(x)


shard = ft.partial(shard_module_params, axis_name="x", min_weight_size=20)


def dense_class(**keywords: Any) -> Any:
    return shard(nn.Dense, **keywords)


def dense_partial(**keywords: Any) -> Any:
    return shard(ft.partial(nn.Dense, use_bias=True), **keywords)


def dense_function(**keywords: Any) -> Any:
    def make(features: int, name: str) -> Any:
        def call(module: nn.Dense, x: Any) -> Any:
            return module(x)

        inner = nn.Dense(features, name=name)
        return lambda x: shard(call, **keywords)(inner, x)

    return make


def dense_instance(**keywords: Any) -> Any:
    return lambda features, name: shard(nn.Dense(features, name=name), **keywords)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (dense_class, 1),
        (dense_partial, 2),
        (dense_function, 3),
        (dense_instance, 4),
        (dense_class, 8),
    ],
)
def test_training_equals_that_on_one_device(make: Any, size: int):
    with jax.enable_x64(True):
        _train_and_compare(Mlp(make()), size)


def _train_and_compare(model: Any, size: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 12)), rng.normal(size=(24, 6))
    plain = Mlp()
    params = plain.init(jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)

    def loss(module: Any, params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((module.apply({"params": params}, x) - y) ** 2)

    expected = params
    for _ in range(5):
        grads = jax.grad(lambda p: loss(plain, p, x, y))(expected)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, grads)

    def train(params: Any, x: Any, y: Any) -> Any:
        # The same start on all ranks, of which each keeps its parts.
        init = jax.eval_shape(lambda: model.init(jax.random.key(0), x)["params"])
        local = lax.pcast(params, "x", to="varying")
        mine = jax.tree.map(
            lambda like, leaf: shard_params(leaf, "x", 20) if _split(like) else leaf,
            init,
            local,
            is_leaf=_split,
        )
        assert jax.tree.structure(mine) == jax.tree.structure(init)
        assert _split(mine["first"]["kernel"])
        assert not _split(mine["second"]["bias"])
        for _ in range(5):
            grads = jax.grad(lambda p: loss(model, p, x, y))(mine)
            grads = sync_gradients(grads, ("x",))
            mine = jax.tree.map(lambda p, g: p - 0.1 * g, mine, grads)
        return jax.tree.map(lambda leaf: leaf[None], gather_params(mine, "x"))

    f = jax.shard_map(
        train, mesh=mesh(size), in_specs=(jax.P(), jax.P("x"), jax.P("x")), out_specs=jax.P("x")
    )
    trained = jax.jit(f)(params, x, y)
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        want = ft.reduce(lambda tree, key: tree[key.key], path, expected)
        for rank in leaf:
            np.testing.assert_allclose(rank, want, rtol=0, atol=1e-12, err_msg=str(path))


def _split(leaf: Any) -> bool:
    return isinstance(leaf, nn.Partitioned)


def test_initialized_in_parts():
    """`init` under the map gives every rank its part, and one forward pass the same result."""
    model = shard(Mlp)()

    def f(x: Any) -> Any:
        params = model.init(jax.random.key(0), x)["params"]
        assert params["first"]["kernel"].value.shape == (12, 6)
        return model.apply({"params": params}, x)

    x = np.random.default_rng(0).normal(size=(4, 3, 12)).astype(np.float32)
    expected: Any = Mlp().apply(Mlp().init(jax.random.key(0), x[0]), x)
    np.testing.assert_allclose(on_ranks(f, 4, x), expected, rtol=1e-5, atol=1e-6)


def test_a_module_instance_stays_a_module():
    model = shard(Mlp(name="mlp"))
    assert isinstance(model, Mlp)
    assert model.name == "mlp"

    def f(x: Any) -> Any:
        params = model.init(jax.random.key(0), x)["params"]
        assert _split(params["first"]["kernel"])
        return model.apply({"params": params}, x)

    x = np.random.default_rng(0).normal(size=(2, 3, 12)).astype(np.float32)
    expected: Any = Mlp().apply(Mlp().init(jax.random.key(0), x[0]), x)
    np.testing.assert_allclose(on_ranks(f, 2, x), expected, rtol=1e-5, atol=1e-6)

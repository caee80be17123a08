"""Training to compare with: batches, meshes, and plain SGD on one device, in float64."""

import functools as ft
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcoll
from jaxcoll import create_train_state

STEPS = 4
SGD = optax.sgd(0.5)


def batch(size: int = 48) -> Any:
    """Returns inputs `(size, 16)` and labels of four classes."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(size, 16)), rng.integers(0, 4, size)


def mesh_of(**axes: int) -> Any:
    """Returns a mesh that may leave devices unused."""
    return jaxcoll.make_mesh(axes, allow_unused=True)


def start(model: Any, data: Any, mesh: Any = None, optimizer: Any = None) -> Any:
    """Returns a state, of SGD unless another optimizer is given."""
    optimizer = SGD if optimizer is None else optimizer
    return create_train_state(model, optimizer, jax.random.key(0), data, mesh)


def train(
    step: Any, state: Any, data: Any, mesh: Any, specs: Any = None, batch_axes: Any = "data"
) -> Any:
    """Maps a step over the mesh and makes some; returns the last state and all metrics."""
    specs = jax.P() if specs is None else specs
    mapped = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(specs, jax.P(batch_axes)), out_specs=(specs, jax.P())
        )
    )
    seen = []
    for _ in range(STEPS):
        state, metrics = mapped(state, data)
        seen.append({name: float(value) for name, value in metrics.items()})
    return state, seen


@ft.cache
def _step_alone(model: Any, optimizer: Any) -> Any:
    """Compiles a step on one device, once for all tests of a model and an optimizer."""

    def loss(params: Any, data: Any) -> Any:
        logits = model.apply({"params": params}, data[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, data[1]).mean()

    @jax.jit
    def step(params: Any, opt_state: Any, data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, data)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def reference(model: Any, params: Any, data: Any, optimizer: Any = None) -> tuple[Any, list[float]]:
    """Returns the parameters after training on one device, and the losses."""
    optimizer = SGD if optimizer is None else optimizer
    step, opt_state = _step_alone(model, optimizer), optimizer.init(params)
    losses = []
    for _ in range(STEPS):
        params, opt_state, value = step(params, opt_state, data)
        losses.append(float(value))
    return params, losses


def trained_alone(model: Any, data: Any, optimizer: Any) -> Any:
    """Trains all parameters of a `PureModel` on one device, written out, for `STEPS` steps.

    Returns:
        The parameters before and after, and the losses.
    """
    init = jax.jit(lambda key, x: nn.unbox(model.init(key, x)))  # as states are made
    variables = init(jax.random.split(jax.random.key(0))[0], data[0])
    params = first = variables.pop("params")

    def loss(params: Any) -> Any:
        logits, _ = model.apply({"params": params, **variables}, data[0], jax.random.key(0))
        return optax.softmax_cross_entropy_with_integer_labels(logits, data[1]).mean()

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = optimizer.init(params), []
    for _ in range(STEPS):
        params, opt_state, value = step(params, opt_state)
        losses.append(float(value))
    return first, params, losses


def assert_copies_are_equal(tree: Any) -> None:
    """Compares, bit by bit, what devices hold of the same places of an array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        first: dict[str, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            values = np.asarray(shard.data)
            want = first.setdefault(str(shard.index), values)
            np.testing.assert_array_equal(values, want, err_msg=f"{path} on {shard.device}")


def assert_trained_as(actual: Any, expected: Any) -> None:
    """Compares parameters leaf by leaf: to 1e-10 of the largest value of each."""
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        bound = 1e-10 * np.abs(want).max(initial=0)
        np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=str(path))


def assert_same(actual: Any, expected: Any) -> None:
    """Compares all leaves to the last bit, random keys too."""
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if not isinstance(want, jax.Array):
            assert got == want
            continue
        assert got.dtype == want.dtype
        is_key = jnp.issubdtype(want.dtype, jax.dtypes.prng_key)
        pair = map(jax.random.key_data, (got, want)) if is_key else (got, want)
        np.testing.assert_array_equal(*pair)

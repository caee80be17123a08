"""Models that bring their first values along: NNX modules, and pretrained parameters."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from training import mesh_of

from jaxcoll import create_train_state, data_parallel_train_step, fully_shard

WIDE = 64
DATA = (jnp.ones((8, WIDE)), jnp.zeros((8, WIDE)))
VALUES = np.arange(WIDE * WIDE, dtype=np.float32).reshape(WIDE, WIDE) / WIDE**2


class Module(nnx.Module):
    def __init__(self, kernel: Any) -> None:
        self.kernel = nnx.Param(kernel)

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel


def pair(kernel: Any) -> Any:
    return lambda rng, x: {"kernel": kernel}, lambda params, x: x @ params["kernel"]


MODELS = [Module, pair]


def begun(model: Any, size: int, rng: Any = None) -> Any:
    mesh = mesh_of(data=size) if size else None
    return create_train_state(
        model, optax.sgd(0.1), jax.random.key(0) if rng is None else rng, DATA, mesh
    )


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("size", [0, 1, 4])
def test_they_are_no_constants_of_a_program(make: Callable[[Any], Any], size: int):
    before = jax.config.jax_captured_constants_warn_bytes
    jax.config.update("jax_captured_constants_warn_bytes", VALUES.nbytes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (kernel,) = jax.tree.leaves(begun(make(jnp.asarray(VALUES)), size).params)
    finally:
        jax.config.update("jax_captured_constants_warn_bytes", before)
    assert (kernel == VALUES).all()


def reversed_mesh() -> Any:
    return jax.sharding.Mesh(jax.devices()[3::-1], ("data",))


def places() -> dict[str, Any]:
    mesh = mesh_of(data=4)
    return {
        "anywhere": None,
        "on one of the devices": jax.devices()[2],
        "on another device": jax.devices()[7],
        "on all": jax.NamedSharding(mesh, jax.P()),
        "in parts": jax.NamedSharding(mesh, jax.P(None, "data")),
        "in another order": jax.NamedSharding(reversed_mesh(), jax.P("data")),
        "on others": jax.NamedSharding(mesh_of(data=8), jax.P("data")),
    }


@pytest.mark.parametrize("place", places())
@pytest.mark.parametrize("stage", [0, 3])
def test_they_may_lie_anywhere(place: str, stage: int):
    where = places()[place]
    model = pair(jax.device_put(VALUES, where) if where else VALUES)
    key_place = where or jax.devices()[5]
    if isinstance(key_place, jax.NamedSharding):
        key_place = jax.NamedSharding(key_place.mesh, jax.P())
    rng = jax.device_put(jax.random.key(0), key_place)
    state = begun(fully_shard(model, "data", stage=stage) if stage else model, 4, rng)
    kernel = state.params["kernel"]
    assert (kernel == VALUES).all()
    assert kernel.sharding.device_set == set(jax.devices()[:4])
    assert kernel.addressable_shards[0].data.nbytes == VALUES.nbytes // (4 if stage else 1)
    assert (state.rng == begun(model, 0).rng).all()


def test_under_another_trace():
    """And a key that the model has for itself."""
    own = jax.device_put(jax.random.key(7), jax.devices()[7])

    def init(rng: Any, x: Any) -> Any:
        del x
        return {"kernel": jax.random.normal(rng, (WIDE,)) + jax.random.normal(own, (WIDE,))}

    def params(rng: Any) -> Any:
        return begun((init, pair(None)[1]), 4, rng).params

    key = jax.random.key(3)
    np.testing.assert_allclose(jax.jit(params)(key)["kernel"], params(key)["kernel"], rtol=1e-6)


def test_an_init_of_numpy():
    def init(rng: Any, x: Any) -> Any:
        numbers = np.random.default_rng(np.asarray(rng))
        return {"kernel": numbers.normal(size=(np.asarray(x).shape[1], WIDE))}

    rng = jax.random.PRNGKey(0)
    want = np.random.default_rng(np.asarray(jax.random.split(rng)[0])).normal(size=(WIDE, WIDE))
    kernel = begun((init, pair(None)[1]), 4, rng).params["kernel"]
    np.testing.assert_array_equal(kernel, want.astype(kernel.dtype))


@pytest.mark.parametrize("size", [1, 4])
def test_a_step_that_takes_the_state_leaves_them(size: int):
    kernel = jax.device_put(VALUES, jax.NamedSharding(mesh_of(data=size), jax.P()))
    model = pair(kernel)
    state = begun(model, size)
    mapped = jax.shard_map(
        data_parallel_train_step(model, loss_fn=lambda y, batch: ((y - batch[1]) ** 2).mean()),
        mesh=mesh_of(data=size),
        in_specs=(state.specs, jax.P("data")),
        out_specs=(state.specs, jax.P()),
    )
    trained, _ = jax.jit(mapped, donate_argnums=0)(state, DATA)
    assert jax.tree.leaves(state.params)[0].is_deleted()
    assert (kernel == VALUES).all()
    assert not (trained.params["kernel"] == VALUES).all()


def test_a_model_is_traced_once():
    calls = []

    def init(rng: Any, x: Any) -> Any:
        calls.append(rng)
        return {"kernel": jax.random.normal(rng, (WIDE, WIDE))}

    begun(fully_shard((init, pair(None)[1]), "data"), 4)
    assert len(calls) == 1

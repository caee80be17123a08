"""Training steps of a Transformer that know jit and NamedSharding alone.

Data-parallel, tensor-parallel and fully sharded; each process compares them with training on one of
its own devices. Prints the losses as hexadecimal numbers, so that runs can be compared to the bit.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from world import say

jax.config.update("jax_enable_x64", True)

VOCABULARY, LAYERS, WIDTH, HEADS, CONTEXT, BATCH, STEPS = 16, 2, 16, 4, 8, 8, 3


def init() -> dict[str, Any]:
    random = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return random.standard_normal(shape) / np.sqrt(shape[0])

    layers = [
        {
            "qkv": weights(WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": weights(HEADS, WIDTH // HEADS, WIDTH),
            "up": weights(WIDTH, 4 * WIDTH),
            "down": weights(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {"embedding": weights(VOCABULARY, WIDTH), "layers": layers}


def loss(params: dict[str, Any], tokens: Any) -> Any:
    x = params["embedding"][tokens[:, :-1]]
    mask = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))
    for layer in params["layers"]:
        q, k, v = jnp.einsum("btd,dchw->cbthw", x, layer["qkv"])
        scores = jnp.where(mask, jnp.einsum("bthw,bshw->bhts", q, k), -1e9)
        mixed = jnp.einsum("bhts,bshw->bthw", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bthw,hwd->btd", mixed, layer["out"])
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    logits = jax.nn.log_softmax(x @ params["embedding"].T)
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()


@ft.partial(jax.jit, donate_argnums=0)
def step(params: dict[str, Any], tokens: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def train(place: Any, spread: Any) -> tuple[dict[str, Any], list[float]]:
    """Trains with parameters put by `place` and tokens by `spread`."""
    params = place(init())
    losses = []
    for number in range(STEPS):
        random = np.random.default_rng(number)
        tokens = spread(random.integers(0, VOCABULARY, (BATCH, CONTEXT + 1)))
        params, value = step(params, tokens)
        losses.append(float(value))
    return params, losses


def on(mesh: Mesh, value: np.ndarray, *spec: Any) -> jax.Array:
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


# The mesh's axes: data and model. Which dimension of a leaf is split over "model", or over both.
TENSOR = {
    "qkv": (None, None, "model"),
    "out": ("model",),
    "up": (None, "model"),
    "down": ("model",),
}


def name_of(path: Any) -> str:
    return str(path[-1].key)


def main() -> None:
    count = jax.device_count()
    devices = np.array(jax.devices())
    here = jax.local_devices()[0]
    expected, expected_losses = train(
        lambda params: jax.device_put(params, here), lambda tokens: jax.device_put(tokens, here)
    )
    half = 2 if count % 2 == 0 else 1
    for name, shape in (
        ("data", (count, 1)),
        ("tensor", (count // half, half)),
        ("fully", (count, 1)),
    ):
        mesh = Mesh(devices.reshape(shape), ("data", "model"))

        def spec_of(path: Any, leaf: np.ndarray, name: str = name, count: int = count) -> Any:
            if name == "tensor":
                return TENSOR.get(name_of(path), ())
            if name == "fully":  # the first dimension that divides
                sizes = [size % count == 0 for size in leaf.shape]
                return (None,) * sizes.index(True) + ("data",) if any(sizes) else ()
            return ()

        def place(params: Any, mesh: Mesh = mesh, spec_of: Any = spec_of) -> Any:
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: on(mesh, leaf, *spec_of(path, leaf)), params
            )

        params, losses = train(place, lambda tokens, mesh=mesh: on(mesh, tokens, "data"))
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
        for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
            for shard in got.addressable_shards:
                np.testing.assert_allclose(
                    shard.data, np.asarray(want)[shard.index], rtol=1e-9, atol=1e-12, err_msg=name
                )
        say(f"{name}: {' '.join(value.hex() for value in losses)}")
    say("all programs are right")


main()

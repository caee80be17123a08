"""Training steps that know `jit` and `NamedSharding` alone, for benchmarks/door.py.

Two models, each split in three ways; the compiler inserts every collective.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SPLITS = ("data-parallel", "tensor-parallel", "fully sharded")


@dataclasses.dataclass(frozen=True)
class Model:
    """Parameters, a batch, a loss, and the dimension of each leaf that is split for tensors."""

    name: str
    params: dict[str, Any]
    batch: np.ndarray
    loss: Callable[[Any, Any], Any]
    tensor_dimension: Callable[[str], int | None]


def six_layers() -> Model:
    """512x512 each, a batch of 64."""
    random = np.random.default_rng(0)
    layers = [random.standard_normal((512, 512)).astype(np.float32) / 23 for _ in range(6)]

    def loss(params: Any, x: Any) -> Any:
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return (x**2).mean()

    return Model(
        "six layers",
        {f"layer{i}": layer for i, layer in enumerate(layers)},
        random.standard_normal((64, 512)).astype(np.float32),
        loss,
        lambda name: 1 - int(name[-1]) % 2,  # columns and rows in turn
    )


def transformer() -> Model:
    """4 layers of width 256, 8 heads, 16 sequences of 128 tokens."""
    layers, width, heads, context, vocabulary = 4, 256, 8, 128, 1024
    random = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32) / 16

    params: dict[str, Any] = {"embedding": weights(vocabulary, width)}
    for i in range(layers):
        params |= {
            f"qkv{i}": weights(width, 3, heads, width // heads),
            f"out{i}": weights(heads, width // heads, width),
            f"up{i}": weights(width, 4 * width),
            f"down{i}": weights(4 * width, width),
        }

    def normed(x: Any) -> Any:
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embedding"][tokens[:, :-1]]
        mask = jnp.tril(jnp.ones((context, context), bool))
        for i in range(layers):
            q, k, v = jnp.einsum("btd,dchw->cbthw", normed(x), params[f"qkv{i}"])
            scores = jnp.where(mask, jnp.einsum("bthw,bshw->bhts", q, k), -1e9)
            mixed = jnp.einsum("bhts,bshw->bthw", jax.nn.softmax(scores), v)
            x = x + jnp.einsum("bthw,hwd->btd", mixed, params[f"out{i}"])
            x = x + jax.nn.gelu(normed(x) @ params[f"up{i}"]) @ params[f"down{i}"]
        logits = jax.nn.log_softmax(normed(x) @ params["embedding"].T)
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()

    split = {"qkv": 2, "out": 0, "up": 1, "down": 0}
    tokens = random.integers(0, vocabulary, (16, context + 1), np.int32)
    return Model(
        "Transformer", params, tokens, loss, lambda name: split.get(name.rstrip("0123456789"))
    )


def _split_over(dimension: int | None) -> P:
    return P() if dimension is None else P(*(None,) * dimension, "x")


def _first_that_divides(leaf: np.ndarray, count: int) -> int | None:
    return next((i for i, size in enumerate(leaf.shape) if size % count == 0), None)


def steps() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the name of each step, and a call of it on all devices of the job, not awaited."""
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def on(value: np.ndarray, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    for model in (six_layers(), transformer()):
        for split in SPLITS:
            dimensions = {
                name: {
                    "data-parallel": None,
                    "tensor-parallel": model.tensor_dimension(name),
                    "fully sharded": _first_that_divides(leaf, count),
                }[split]
                for name, leaf in model.params.items()
            }
            specs = {name: _split_over(dimension) for name, dimension in dimensions.items()}
            params = {name: on(leaf, specs[name]) for name, leaf in model.params.items()}
            batch = on(model.batch, P() if split == "tensor-parallel" else P("x"))

            def step(params: Any, batch: Any, loss: Any = model.loss, specs: Any = specs) -> Any:
                value, grads = jax.value_and_grad(loss)(params, batch)
                new = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
                return {
                    name: jax.lax.with_sharding_constraint(w, NamedSharding(mesh, specs[name]))
                    for name, w in new.items()
                }, value

            yield f"{model.name}, {split}", ft.partial(jax.jit(step), params, batch)

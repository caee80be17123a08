"""Models of either library, and of functions, for every schedule of a pipeline."""

import functools as ft
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from training import batch, trained_alone

import jaxcoll
from jaxcoll import sequential, stacked_layers
from jaxcoll.parallel.pure_model import as_pure

WIDTH = 8
OPTIMIZERS = {"sgd": optax.sgd(0.2), "adamw": optax.adamw(0.05)}
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved 2": {"schedule": "interleaved"},
    "interleaved 3": {"schedule": "interleaved", "num_chunks": 3},
}


class Block(nn.Module):
    axis: str | None = None
    mesh: Any = None
    drop: float = 0.0

    @nn.compact
    def __call__(self, x: Any, *, deterministic: bool = True) -> Any:
        options: dict[str, Any] = {"param_dtype": jnp.float64, "mesh": self.mesh}
        options["axis_name"] = self.axis
        y = nn.LayerNorm(param_dtype=jnp.float64)(x)
        y = nn.tanh(jaxcoll.ColumnParallelDense(12, **options)(y))
        y = jaxcoll.RowParallelDense(WIDTH, **options)(y)
        return x + nn.Dropout(self.drop)(y, deterministic=deterministic)


class OfLinen(nn.Module):
    """Its first weights are its last ones too."""

    layers: int
    axis: str | None = None
    mesh: Any = None
    drop: float = 0.0

    @nn.compact
    def __call__(self, x: Any, pipeline: Any = sequential, train: bool = False) -> Any:
        embed = self.param("embed", nn.initializers.normal(0.5), (16, WIDTH), jnp.float64)
        dropping = train and self.drop > 0
        x = x @ embed
        block = Block(self.axis, self.mesh, self.drop, parent=None)
        layer, stacked = stacked_layers(
            self, "blocks", block, self.layers, x, deterministic=not dropping
        )
        x = pipeline(layer, stacked, x, *([self.make_rng("dropout")] if dropping else []))
        return nn.Dense(4, param_dtype=jnp.float64)(x @ embed.T)


class OfNnx(nnx.Module):
    """What passes between its stages is a tree, of which a part has no derivative."""

    def __init__(self, layers: int) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(16, WIDTH, param_dtype=jnp.float64, rngs=rngs)
        kernels = jax.random.normal(rngs(), (layers, WIDTH, WIDTH), jnp.float64)
        self.kernel = nnx.Param(0.3 * kernels)
        self.bias = nnx.Param(jnp.zeros((layers, WIDTH)))
        self.out = nnx.Linear(WIDTH, 4, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x: Any, pipeline: Any = sequential) -> Any:
        def layer(params: Any, tree: Any) -> Any:
            x, sign, count = tree["x"], tree["sign"], tree["count"]
            y = jnp.tanh(x @ params["kernel"] + params["bias"]) * sign[:, None]
            y = {"x": x + y, "sign": -sign, "count": count + 1.0}
            return {**tree, **y, "number": tree["number"] + 1}

        stacked = {"kernel": self.kernel, "bias": self.bias}
        tree = {"x": self.embed(x), "sign": jnp.where(x[:, 0] > 0, 1, -1), "count": x[:, 1]}
        # Of no example, and of nothing at all.
        tree |= {"number": jnp.zeros((), int), "mask": jnp.ones(WIDTH, bool)}
        tree = pipeline(layer, stacked, tree)
        return self.out(tree["x"] * tree["mask"]) * (1 + 0.01 * tree["count"][:, None])


def of_functions(layers: int) -> Any:
    def init(rng: Any, inputs: Any) -> Any:
        del inputs
        keys = jax.random.split(rng, 3)
        draw = ft.partial(jax.random.normal, dtype=jnp.float64)
        return {
            "in": 0.3 * draw(keys[0], (16, WIDTH)),
            "layers": 0.3 * draw(keys[1], (layers, WIDTH, WIDTH)),
            "out": 0.3 * draw(keys[2], (WIDTH, 4)),
            "scale": jnp.ones(()),
        }

    def apply(params: Any, x: Any, pipeline: Any = sequential) -> Any:
        # Outside of the layers, and read by each of them.
        y = pipeline(
            lambda kernel, y: y + params["scale"] * jnp.tanh(y @ kernel),
            params["layers"],
            x @ params["in"],
        )
        return y @ params["out"] + x[:, :4]  # and what comes before them, after them

    return init, apply


LIBRARIES = {"linen": OfLinen, "nnx": OfNnx, "functions": of_functions}


@ft.cache
def on_one_device(library: str, layers: int, optimizer: str) -> Any:
    """Returns what `trained_alone` does, made once."""
    return trained_alone(
        as_pure("test", LIBRARIES[library](layers)), batch(), OPTIMIZERS[optimizer]
    )

"""Models of tokens for any plan, whose first and last weights are the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxcoll
from jaxcoll import sequential
from jaxcoll.models import TransformerLM

LAYERS, TOKENS = 5, 4


def batch() -> Any:
    windows = np.random.default_rng(0).integers(0, 12, (24, TOKENS + 1))
    return windows[:, :-1], windows[:, 1:]


def loss_fn(axis: str | None, logits: Any, batch: Any) -> Any:
    losses = jaxcoll.vocab_parallel_cross_entropy(logits, batch[1], axis)
    return losses.sum(), losses.size


def of_linen(axis: str | None, mesh: Any) -> Any:
    return TransformerLM(
        12, LAYERS, 24, 6, mlp_ratio=1, axis_name=axis, mesh=mesh, param_dtype=jnp.float64
    )


class OfNnx(nnx.Module):
    """Its layers are stacked by hand; its embedding alone is split over tensor ranks."""

    def __init__(self, axis: str | None, mesh: Any) -> None:
        rngs, options = nnx.Rngs(0), {"param_dtype": jnp.float64}
        split: dict[str, Any] = {"axis_name": axis, "mesh": mesh, **options}
        self.embed = jaxcoll.nnx.VocabParallelEmbed(12, 24, rngs=rngs, **split)
        self.layer = nnx.LayerNorm(24, rngs=rngs, **options)
        up, down = (jax.random.normal(rngs(), (LAYERS, *shape)) for shape in ((24, 12), (12, 24)))
        self.up, self.down = nnx.Param(0.2 * up), nnx.Param(0.2 * down)

    def __call__(self, tokens: Any, pipeline: Any = sequential) -> Any:
        def layer(params: Any, x: Any) -> Any:
            return x + jnp.tanh(self.layer(x) @ params["up"]) @ params["down"]

        x = pipeline(layer, {"up": self.up, "down": self.down}, self.embed(tokens))
        return self.embed.attend(x)


LIBRARIES: dict[str, Any] = {"linen": of_linen, "nnx": OfNnx}

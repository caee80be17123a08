"""Models of tokens for any plan, whose first and last weights are the same."""

from typing import Any

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


def of_linen(axis: str | None, mesh: Any, layers: int = LAYERS) -> Any:
    return TransformerLM(
        12, layers, 24, 6, mlp_ratio=1, axis_name=axis, mesh=mesh, param_dtype=jnp.float64
    )


class BlockOfNnx(nnx.Module):
    def __init__(self, rngs: Any, **split: Any) -> None:
        self.norm = nnx.LayerNorm(24, rngs=rngs, param_dtype=jnp.float64)
        self.mlp = jaxcoll.nnx.TPMLP(24, 12, rngs=rngs, activation=jnp.tanh, **split)

    def __call__(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


class OfNnx(nnx.Module):
    """Its layers, and its embedding, are split over tensor ranks."""

    def __init__(self, axis: str | None, mesh: Any, layers: int = LAYERS) -> None:
        rngs = nnx.Rngs(0)
        split: dict[str, Any] = {"axis_name": axis, "mesh": mesh, "param_dtype": jnp.float64}
        self.embed = jaxcoll.nnx.VocabParallelEmbed(12, 24, rngs=rngs, **split)

        @nnx.split_rngs(splits=layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def make(rngs: Any) -> BlockOfNnx:
            return BlockOfNnx(rngs, **split)

        self.blocks = make(rngs)

    def __call__(self, tokens: Any, pipeline: Any = sequential) -> Any:
        graph, stacked = nnx.split(self.blocks, nnx.Param)
        x = self.embed(tokens)
        x = pipeline(lambda params, x: nnx.merge(graph, params)(x), stacked, x)
        return self.embed.attend(x)


LIBRARIES: dict[str, Any] = {"linen": of_linen, "nnx": OfNnx}

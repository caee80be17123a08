"""A small decoder-only Transformer language model.

Written in Flax linen rather than NNX: a linen module is a pure `(init, apply)` pair over a plain
dict of arrays. That dict goes as it is through `jax.shard_map`, `jaxcoll.all_reduce`, Optax and a
checkpoint, with no split and merge around each of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxcoll.nn.attention import TPAttention
from jaxcoll.nn.dropout import TPDropout
from jaxcoll.nn.embed import VocabParallelEmbed
from jaxcoll.nn.mlp import TPMLP
from jaxcoll.nn.norms import TPRMSNorm
from jaxcoll.nn.stacked import stacked_layers
from jaxcoll.parallel.pipeline import sequential

_INIT_STDDEV = 0.02  # GPT-2's; small enough for the tied output layer to start near uniform.


def _rotate(x: jax.Array) -> jax.Array:
    """Encode positions by rotating pairs of features (RoPE, https://arxiv.org/abs/2104.09864)."""
    _, num_tokens, _, head_width = x.shape  # (B, T, H, K)
    half = head_width // 2
    rates = 10_000.0 ** (-jnp.arange(half) / half)  # (K / 2,)
    angles = jnp.arange(num_tokens)[:, None, None] * rates  # (T, 1, K / 2)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)  # 2 x (B, T, H, K / 2)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def _squared_relu(x: jax.Array) -> jax.Array:
    """Cheap on a CPU, being no exp or tanh (https://arxiv.org/abs/2109.08668)."""
    return jnp.square(nn.relu(x))


class Block(nn.Module):
    """One pre-norm layer: causal self-attention, then an MLP, each added to its input.

    Attributes:
        num_heads: Attention heads.
        num_kv_heads: Heads of keys and values.
        mlp_ratio: Hidden width of the MLP over the model's width.
        dropout: Share of what each branch adds that is dropped.
        out_stddev: Standard deviation of the initial weights that write to the residual stream.
        options: Of the layers: how they are split, and the parameters' dtype.
    """

    num_heads: int
    num_kv_heads: int
    mlp_ratio: int
    dropout: float
    out_stddev: float
    options: Any

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
        """Map `(B, T, D)` to `(B, T, D)`; with a split sequence `(B, T / p, D)`."""
        dense: dict[str, Any] = {
            "use_bias": False,
            "kernel_init": nn.initializers.normal(_INIT_STDDEV),
            "out_kernel_init": nn.initializers.normal(self.out_stddev),
            **self.options,
        }
        split = _split_axis(self.options)
        norms: dict[str, Any] = {"axis_name": split, "param_dtype": self.options["param_dtype"]}
        attention = TPAttention(
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            is_causal=True,
            rotate=_rotate,
            name="attention",
            **dense,
        )
        mlp = TPMLP(self.mlp_ratio * x.shape[-1], activation=_squared_relu, name="mlp", **dense)
        for name, branch in (("attention", attention), ("mlp", mlp)):
            y = branch(TPRMSNorm(name=f"{name}_norm", **norms)(x))
            x += TPDropout(self.dropout, axis_name=split)(y, deterministic=deterministic)
        return x


def _split_axis(options: Any) -> str | None:
    """Returns the axis over which the residual stream is split, by its sequence."""
    return options["axis_name"] if options["sequence_parallel"] else None


class TransformerLM(nn.Module):
    """A decoder-only language model: token ids in, next-token logits out.

    Rotary positions, RMSNorm, squared ReLU, no biases, output layer tied to the embedding. It has
    `vocab_size * width + num_layers * (4 + 2 * mlp_ratio) * width**2` weights and a few norms
    (with as many heads of keys and values as of queries).

    With an `axis_name` its layers are split over the p ranks of a mesh axis: inside a map over the
    axis they take whole tokens and return this rank's part of the logits, for
    `jaxcoll.vocab_parallel_cross_entropy`; on global arrays they map themselves over `mesh`. The
    parameters are the same either way. Those of the blocks are stacked, `(num_layers, ...)`, so
    that `jaxcoll.pipelined` can spread them over the stages of a pipeline.

    Attributes:
        vocab_size: Number of token ids; 256 for bytes.
        num_layers: Number of blocks.
        width: Features per token; a multiple of `num_heads`, with an even quotient.
        num_heads: Attention heads per block.
        num_kv_heads: Heads of keys and values, shared by heads; `num_heads` if None.
        mlp_ratio: Hidden width of each MLP over `width`.
        dropout: Share of what each branch adds that is dropped in training.
        axis_name: The axis over which heads, hidden features and vocabulary are split, or None.
        mesh: For calls on global arrays.
        sequence_parallel: Between the layers, the sequence is split over the axis.
        overlap: With `sequence_parallel`, communication beside computation, in collective matmuls.
        param_dtype: Of the parameters.

    Example:
        >>> model = TransformerLM(num_layers=2, width=64)
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
        >>> model.apply(params, jnp.zeros((4, 16), jnp.int32)).shape
        (4, 16, 256)
    """

    vocab_size: int = 256
    num_layers: int = 3
    width: int = 160
    num_heads: int = 4
    mlp_ratio: int = 4
    _: dataclasses.KW_ONLY
    num_kv_heads: int | None = None
    dropout: float = 0.0
    axis_name: str | None = None
    mesh: Mesh | None = None
    sequence_parallel: bool = False
    overlap: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        pipeline: Callable[..., jax.Array] = sequential,
        *,
        deterministic: bool = True,
    ) -> jax.Array:
        """Return the logits of each position's next token.

        Args:
            tokens: Shape `(B, T)`, integers in `[0, vocab_size)`.
            pipeline: What runs the blocks, see `jaxcoll.pipelined`; one after the other if none.
            deterministic: Whether nothing is dropped; else a key for `"dropout"` is needed.

        Returns:
            Shape `(B, T, vocab_size)`, inside a map over `axis_name` `(B, T, vocab_size / p)`;
            position t sees tokens 0 to t.

        Raises:
            ValueError: `width` does not split into heads of an even width; p does not divide what
                is split.
        """
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"TransformerLM(width={self.width}, num_heads={self.num_heads}): expected width to "
                f"be a multiple of 2 * num_heads = {2 * self.num_heads}, got {self.width}"
            )
        options: dict[str, Any] = {
            "axis_name": self.axis_name,
            "mesh": self.mesh,
            "sequence_parallel": self.sequence_parallel,
            "overlap": self.overlap,
            "param_dtype": self.param_dtype,
        }
        embed = VocabParallelEmbed(
            self.vocab_size,
            self.width,
            embedding_init=nn.initializers.normal(_INIT_STDDEV),
            name="embed",
            **options,
        )
        x = embed(tokens)
        if self.num_layers:
            block = Block(
                self.num_heads,
                self.num_kv_heads or self.num_heads,
                self.mlp_ratio,
                self.dropout,
                # 2 * num_layers branches add up in the residual stream: keep their sum's variance
                # at one branch's, as GPT-2 does.
                _INIT_STDDEV / (2 * self.num_layers) ** 0.5,
                options,
                parent=None,
            )
            is_dropping = self.dropout > 0 and not deterministic
            layer, stacked = stacked_layers(
                self, "blocks", block, self.num_layers, x, deterministic=not is_dropping
            )
            keys = [self.make_rng("dropout")] if is_dropping else []
            x = pipeline(layer, stacked, x, *keys)
        norm = TPRMSNorm(
            axis_name=_split_axis(options), param_dtype=self.param_dtype, name="final_norm"
        )
        return embed.attend(norm(x))  # (B, T, V)

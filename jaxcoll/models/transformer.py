"""A small decoder-only Transformer language model.

Written in Flax linen rather than NNX: a linen module is a pure `(init, apply)` pair over a plain
dict of arrays. That dict goes as it is through `jax.shard_map`, `jaxcoll.all_reduce`, Optax and a
checkpoint, with no split and merge around each of them.
"""

import functools as ft

import flax.linen as nn
import jax
import jax.numpy as jnp

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


class Block(nn.Module):
    """One pre-norm layer: causal self-attention, then an MLP, each added to its input.

    Attributes:
        num_heads: Attention heads.
        mlp_ratio: Hidden width of the MLP over the model's width.
        out_stddev: Standard deviation of the initial weights that write to the residual stream.
    """

    num_heads: int
    mlp_ratio: int
    out_stddev: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(B, T, D)` to `(B, T, D)`."""
        batch, num_tokens, width = x.shape
        dense = ft.partial(
            nn.Dense, use_bias=False, kernel_init=nn.initializers.normal(_INIT_STDDEV)
        )
        dense_out = ft.partial(
            nn.Dense, use_bias=False, kernel_init=nn.initializers.normal(self.out_stddev)
        )

        qkv = dense(3 * width, name="qkv")(nn.RMSNorm(name="attention_norm")(x))  # (B, T, 3D)
        qkv = qkv.reshape(batch, num_tokens, 3 * self.num_heads, width // self.num_heads)
        query, key, value = jnp.split(qkv, 3, axis=2)  # 3 x (B, T, H, K)
        mixed = jax.nn.dot_product_attention(_rotate(query), _rotate(key), value, is_causal=True)
        x += dense_out(width, name="attention_out")(mixed.reshape(x.shape))

        hidden = dense(self.mlp_ratio * width, name="mlp_in")(nn.RMSNorm(name="mlp_norm")(x))
        # Squared ReLU (https://arxiv.org/abs/2109.08668): cheap on a CPU, being no exp or tanh.
        return x + dense_out(width, name="mlp_out")(jnp.square(nn.relu(hidden)))


class TransformerLM(nn.Module):
    """A decoder-only language model: token ids in, next-token logits out.

    Rotary positions, RMSNorm, squared ReLU, no biases, output layer tied to the embedding. It has
    `vocab_size * width + num_layers * (4 + 2 * mlp_ratio) * width**2` weights and a few norms.

    Attributes:
        vocab_size: Number of token ids; 256 for bytes.
        num_layers: Number of blocks.
        width: Features per token; a multiple of `num_heads`, with an even quotient.
        num_heads: Attention heads per block.
        mlp_ratio: Hidden width of each MLP over `width`.

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

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of each position's next token.

        Args:
            tokens: Shape `(B, T)`, integers in `[0, vocab_size)`.

        Returns:
            Shape `(B, T, vocab_size)`; position t sees tokens 0 to t.

        Raises:
            ValueError: `width` does not split into heads of an even width.
        """
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"TransformerLM(width={self.width}, num_heads={self.num_heads}): expected width to "
                f"be a multiple of 2 * num_heads = {2 * self.num_heads}, got {self.width}"
            )
        embed = nn.Embed(
            self.vocab_size,
            self.width,
            embedding_init=nn.initializers.normal(_INIT_STDDEV),
            name="embed",
        )
        # 2 * num_layers branches add up in the residual stream: keep their sum's variance at one
        # branch's, as GPT-2 does.
        out_stddev = _INIT_STDDEV / (2 * max(self.num_layers, 1)) ** 0.5
        x = embed(tokens)
        for layer in range(self.num_layers):
            x = Block(self.num_heads, self.mlp_ratio, out_stddev, name=f"block_{layer}")(x)
        return embed.attend(nn.RMSNorm(name="final_norm")(x))  # (B, T, V)

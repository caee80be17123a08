"""What the attention layers for linen and NNX share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll.collectives.all_gather import all_gather
from jaxcoll.nn._place import Place


@dataclasses.dataclass(frozen=True)
class Heads:
    """How an attention layer's features are made of heads.

    The joint projection's features are those of a key-value head's queries, its key and its value,
    head after head: so each rank's part of them is whole heads, whatever the number of ranks. Where
    there are more ranks than key-value heads, those that share one exchange what they made of it.

    Attributes:
        place: where.
        num_heads: of queries, on all ranks.
        num_kv_heads: of keys and values, on all ranks.
        head_width: features of each.
        is_causal: whether a position sees none that come after it.
        rotate: of queries and of keys, `(b, s, heads, width)`, or None.
        dropout: share of the attention's weights that is dropped.
    """

    place: Place
    num_heads: int
    num_kv_heads: int
    head_width: int
    is_causal: bool
    rotate: Callable[[jax.Array], jax.Array] | None
    dropout: float

    @classmethod
    def of(cls, place: Place, width: int, layer: Any) -> "Heads":
        """Returns those of a layer, of either library, on activations of a width.

        Raises:
            ValueError: heads that can't be shared.
        """
        if layer.head_width is None and width % layer.num_heads:
            raise ValueError(
                f"{place.call}: num_heads: {layer.num_heads} heads can't share {width} features "
                "evenly. Choose them so, or give head_width."
            )
        return cls(
            place,
            layer.num_heads,
            layer.num_kv_heads or layer.num_heads,
            layer.head_width or width // layer.num_heads,
            layer.is_causal,
            layer.rotate,
            layer.dropout,
        )

    def __post_init__(self) -> None:
        """Checks that the heads can be shared."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.place.call}: num_kv_heads: {self.num_kv_heads} key-value heads can't be "
                f"shared evenly by {self.num_heads} heads (num_heads)."
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"{self.place.call}: dropout: expected a share in [0, 1), got {self.dropout}."
            )
        if self.place.num_ranks % self.num_kv_heads:
            self.place.check_divides("num_kv_heads", self.num_kv_heads)
        self.place.check_divides("num_heads", self.num_heads)
        features = "(num_heads + 2 * num_kv_heads) * head_width"
        self.place.check_divides(features, self.qkv_features)

    @property
    def qkv_features(self) -> int:
        """Features of the joint projection, of all ranks."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_width

    @property
    def out_features(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_width

    def __call__(self, qkv: jax.Array, mask: jax.Array | None, key: jax.Array | None) -> jax.Array:
        """Returns what the heads make of `(b, s, features)`: `(b, s, heads * width)`."""
        if qkv.ndim != 3:
            raise ValueError(
                f"{self.place.call}: x: expected (b, s, d), got {qkv.ndim} dimensions."
            )
        batch, length, _ = qkv.shape
        if mask is not None and (
            mask.dtype != bool
            or mask.shape not in ((1, 1, length, length), (batch, 1, length, length))
        ):
            raise ValueError(
                f"{self.place.call}: mask: expected bool of shape ({batch} or 1, 1, {length}, "
                f"{length}), got {mask.dtype} of {mask.shape}. A mask can't differ between heads, "
                "of which each rank has others."
            )
        num_kv_heads = self.num_kv_heads
        if self.place.num_ranks > num_kv_heads:
            num_kv_heads = self.place.num_ranks
            qkv = self.place.run(
                _with_shared_head,
                [(qkv, -1)],
                [],
                (3, -1),
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_width=self.head_width,
            )
        ratio = self.num_heads // num_kv_heads
        qkv = qkv.reshape(batch, length, -1, ratio + 2, self.head_width)
        query = qkv[..., :ratio, :].reshape(batch, length, -1, self.head_width)
        keys, value = qkv[..., ratio, :], qkv[..., ratio + 1, :]
        if self.rotate is not None:
            query, keys = self.rotate(query), self.rotate(keys)
        if key is None and query.dtype != jnp.float64:
            mixed = jax.nn.dot_product_attention(
                query, keys, value, mask=mask, is_causal=self.is_causal
            )
        else:
            mixed = self._plain(query, keys, value, mask, key)
        return mixed.reshape(batch, length, -1)

    def _plain(
        self, query: Any, keys: Any, value: Any, mask: jax.Array | None, key: jax.Array | None
    ) -> jax.Array:
        """Attention with dropout of its weights, or in float64: `jax.nn`'s has neither."""
        batch, length, num_heads, width = query.shape
        query = query.reshape(batch, length, keys.shape[2], -1, width)
        wide = jnp.promote_types(query.dtype, jnp.float32)
        scores = jnp.einsum("bqgrk,bsgk->bgrqs", query, keys, preferred_element_type=wide)
        scores /= width**0.5
        seen = jnp.ones((1, 1, length, keys.shape[1]), bool) if mask is None else mask
        if self.is_causal:
            seen &= jnp.tril(jnp.ones(seen.shape[-2:], bool))
        # Finite, as in jax.nn's: a row may see nothing.
        least = -0.7 * jnp.finfo(scores.dtype).max
        weights = jax.nn.softmax(jnp.where(seen[:, :, None], scores, least))
        if key is not None:
            kept = jax.random.bernoulli(key, 1 - self.dropout, weights.shape)
            weights = jnp.where(kept, weights / (1 - self.dropout), 0)
        mixed = jnp.einsum("bgrqs,bsgk->bqgrk", weights.astype(value.dtype), value)
        return mixed.reshape(batch, length, num_heads, width)


def _with_shared_head(
    qkv: jax.Array, axis_name: str, *, num_heads: int, num_kv_heads: int, head_width: int
) -> jax.Array:
    """Returns a rank's queries with the key and the value that they share with other ranks'.

    For more ranks than key-value heads: of a head's features each rank has made a part.
    """
    size = lax.axis_size(axis_name)
    num_sharing = size // num_kv_heads
    groups = np.arange(size).reshape(num_kv_heads, num_sharing).tolist()
    of_head = all_gather(qkv, axis_name, axis=2, tiled=True, axis_index_groups=groups)
    width = num_heads // size * head_width
    first = lax.axis_index(axis_name) % num_sharing * width
    queries = lax.dynamic_slice_in_dim(of_head, first, width, axis=2)
    return jnp.concatenate([queries, of_head[..., -2 * head_width :]], axis=2)

"""Self-attention for Flax linen whose heads are split over the ranks of an axis."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax

from jaxcoll.nn._attention import Heads
from jaxcoll.nn._block import SplitBlock
from jaxcoll.nn._random import key_of_rank


class TPAttention(SplitBlock):
    """Self-attention of which each rank of an axis computes a part of the heads.

    With p ranks, `(b, s, d)`, the same on all, becomes `(b, s, d)`, the same on all; between them a
    rank has `num_heads / p` heads. It works in the two places of `jaxcoll.TPDense`. Its layers are
    `qkv` and `out`; the features of `qkv` are, for each key-value head, those of its queries, of
    its key and of its value.

    Attributes:
        num_heads: of queries, on all ranks.
        num_kv_heads: of keys and values, which several heads share (grouped queries); as many as
            `num_heads` without. p must divide them, or they p; p must divide `num_heads` too.
        head_width: features of a head; `d / num_heads` without.
        is_causal: whether a position sees none that come after it.
        rotate: a function of queries and of keys, `(b, s, heads, width)`, for rotary positions.
        dropout: share of the attention's weights that is dropped.
        use_bias: whether the layers have one.
        kernel_init: of `qkv`.
        out_kernel_init: of `out`; as `kernel_init` without.
        mesh: for calls on global arrays.
        axis_name: the axis, or None for a single device.
        sequence_parallel: input and output have this rank's part of the sequence, `(b, s/p, d)`.
        overlap: with `sequence_parallel`, communication beside computation.
        dtype: of the computation; that of input and weights without.
        param_dtype: of the weights.

    Raises:
        ValueError: heads that p does not divide, or that can't share key-value heads evenly; a
            width that the heads can't share; what the layers raise.

    Cost: an all_reduce forward and one backward, of `(b, s, d)`; with `sequence_parallel` an
        all_gather and a reduce_scatter in each direction. With fewer key-value heads than ranks, an
        all_gather of `qkv` forward and a reduce_scatter backward as well, between the ranks that
        share one; the weights stay split.
    Source: Shoeybi et al., "Megatron-LM" (2019); Ainslie et al., "GQA: Training Generalized
        Multi-Query Transformer Models from Multi-Head Checkpoints" (2023).
    """

    num_heads: int
    _: dataclasses.KW_ONLY
    num_kv_heads: int | None = None
    head_width: int | None = None
    is_causal: bool = False
    rotate: Callable[[jax.Array], jax.Array] | None = None
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, *, deterministic: bool = True
    ) -> jax.Array:
        """Returns `(b, s, d)`; `mask` is `(b or 1, 1, s, s)`, true where a position is seen."""
        place = self._place()
        heads = Heads.of(place, x.shape[-1], self)
        qkv = self._column(heads.qkv_features, "qkv")(x)
        key = None
        if self.dropout and not deterministic:
            key = key_of_rank(self.make_rng("dropout"), place.local_axis)
        return self._row(x.shape[-1], "out")(heads(qkv, mask, key))

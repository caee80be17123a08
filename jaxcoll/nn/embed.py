"""An embedding for Flax linen whose vocabulary is split over the ranks of an axis."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxcoll.nn._embed import Embed
from jaxcoll.nn._place import call_of
from jaxcoll.parallel.partitioned import split_init


class VocabParallelEmbed(nn.Module):
    """An embedding of which each rank of an axis holds the rows of a part of the vocabulary.

    With p ranks, tokens `(..., s)`, the same on all ranks, become `(..., s, d)`, the same on all.
    `attend` multiplies with the same table: `(..., s, d)` to this rank's part of the logits,
    `(..., s, v/p)`, for `jaxcoll.vocab_parallel_cross_entropy`. It works in the two places of
    `jaxcoll.TPDense`, and has the table and initial values of `flax.linen.Embed`.

    Attributes:
        num_embeddings: v, the size of the vocabulary.
        features: d.
        embedding_init: of the whole table.
        mesh: for calls on global arrays.
        axis_name: the axis, or None for a single device.
        sequence_parallel: each rank gets its part of the sequence, `(..., s/p, d)`, and `attend`
            takes it.
        overlap: with `sequence_parallel`, communication beside computation in `attend`.
        dtype: of the result; that of the table without.
        param_dtype: of the table.

    Raises:
        ValueError: a vocabulary or sequence that p does not divide, an axis that the mesh lacks, or
            no mesh where the axis is not mapped.
        TypeError: tokens that are no integers.

    Cost: an all_reduce of the result, or a reduce_scatter.
    Source: Shoeybi et al., "Megatron-LM" (2019).
    """

    num_embeddings: int
    features: int
    _: dataclasses.KW_ONLY
    embedding_init: Any = nn.linear.default_embed_init
    mesh: Mesh | None = None
    axis_name: str | None = "tensor"
    sequence_parallel: bool = False
    overlap: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def setup(self) -> None:
        """Makes the table."""
        core = self._core()
        core.place.check_divides("num_embeddings", self.num_embeddings)
        self.embedding = self.param(
            "embedding",
            split_init(self.embedding_init, core.spec, 2),
            (self.num_embeddings, self.features),
            self.param_dtype,
        )

    def _core(self) -> Embed:
        return Embed(call_of(self), self.axis_name, self.mesh, self.sequence_parallel, self.overlap)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the rows of tokens."""
        return self._core()(tokens, self.embedding, self.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Returns this rank's part of `x @ table.T`; on global arrays all, split over the axis."""
        return self._core().attend(x, self.embedding, self.dtype)

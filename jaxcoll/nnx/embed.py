"""An embedding for Flax NNX whose vocabulary is split over the ranks of an axis."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxcoll.nn._embed import Embed
from jaxcoll.nnx._param import split_param


class VocabParallelEmbed(nnx.Module):
    """`jaxcoll.VocabParallelEmbed` for NNX: `embedding` `(v, d)` lies in parts on a mesh.

    Source: there, with all that it says.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        rngs: nnx.Rngs,
        embedding_init: Any = nnx.nn.linear.default_embed_init,
        mesh: Mesh | None = None,
        axis_name: str | None = "tensor",
        sequence_parallel: bool = False,
        overlap: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ) -> None:
        """Makes the table, with the values of an `nnx.Embed` of the same keys.

        Args:
            num_embeddings: v, the size of the vocabulary.
            features: d.
            rngs: its `params` stream makes the table.
            embedding_init: of the whole table.
            mesh: where the table lies, and for calls on global arrays.
            axis_name: as of `jaxcoll.VocabParallelEmbed`, and all that follow.
            sequence_parallel: whether each rank gets its part of the sequence.
            overlap: communication beside computation.
            dtype: of the result.
            param_dtype: of the table.

        Raises:
            ValueError: as `jaxcoll.VocabParallelEmbed`.
        """
        call = type(self).__name__
        self._core, self._dtype = Embed(call, axis_name, mesh, sequence_parallel, overlap), dtype
        place = self._core.place
        place.check_divides("num_embeddings", num_embeddings)
        shape = (num_embeddings, features)
        self.embedding = split_param(
            place, embedding_init, rngs, self._core.spec, shape, param_dtype
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the rows of tokens."""
        return self._core(tokens, self.embedding[...], self._dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Returns this rank's part of `x @ table.T`; on global arrays all, split over the axis."""
        return self._core.attend(x, self.embedding[...], self._dtype)

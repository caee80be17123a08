"""What the embeddings for linen and NNX share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcoll.nn._place import Place
from jaxcoll.parallel.tensor import column_dense
from jaxcoll.parallel.vocabulary import embed


@dataclasses.dataclass(frozen=True)
class Embed:
    """An embedding over the ranks of an axis; see `jaxcoll.VocabParallelEmbed`."""

    call: str
    axis_name: str | None
    mesh: Mesh | None
    sequence_parallel: bool
    overlap: bool

    @property
    def place(self) -> Place:
        """Where."""
        return Place(self.call, self.axis_name, self.mesh)

    @property
    def spec(self) -> P:
        """How the table `(v, d)` lies."""
        return P(self.axis_name, None) if self.axis_name else P()

    @property
    def _split(self) -> int | None:
        return -2 if self.sequence_parallel else None

    def __call__(self, tokens: jax.Array, table: jax.Array, dtype: Any) -> jax.Array:
        """Returns the rows of tokens."""
        tokens = jnp.asarray(tokens)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"{self.call}: tokens: expected integers, got {tokens.dtype}.")
        if self.sequence_parallel:
            self.place.check_divides("the sequence", _length(self.call, "tokens", tokens, -1))
        (table,) = promote_dtype(table, dtype=dtype, inexact=False)
        # As many dimensions as the rows have, of which the first may be split by examples.
        return self.place.run(
            _rows,
            [(tokens[..., None], None)],
            [(table, self.spec)],
            (tokens.ndim + 1, self._split),
            sequence_parallel=self.sequence_parallel,
        )

    def attend(self, x: jax.Array, table: jax.Array, dtype: Any) -> jax.Array:
        """Returns the logits."""
        if self.sequence_parallel:
            length = _length(self.call, "x", x, -2)
            if not self.place.is_mapped:
                self.place.check_divides("the sequence", length)
        x, table = promote_dtype(x, table, dtype=dtype)
        return self.place.run(
            _logits,
            [(x, self._split)],
            [(table, self.spec)],
            (x.ndim, -1),
            sequence_parallel=self.sequence_parallel,
            overlap=self.overlap,
        )


def _rows(tokens: Any, table: Any, axis_name: Any, *, sequence_parallel: bool) -> jax.Array:
    return embed(tokens[..., 0], table, axis_name, sequence_parallel=sequence_parallel)


def _logits(x: Any, table: Any, axis_name: Any, **split: Any) -> jax.Array:
    return column_dense(x, table.T, None, axis_name, **split)


def _length(call: str, what: str, x: jax.Array, dimension: int) -> int:
    if x.ndim < -dimension:
        raise ValueError(f"{call}: {what}: expected a sequence to split, got shape {x.shape}.")
    return x.shape[dimension]

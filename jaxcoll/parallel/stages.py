"""How layers, stacked in one array, are spread over the stages of a pipeline.

A rank's layers lie together in what is stored: those of its first chunk, of its second, ..., each
chunk with zeros at its end where another has more layers. The model's own order is that of layers.
"""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def partition_layers(
    num_layers: int, num_stages: int, *, num_chunks: int = 1
) -> tuple[tuple[range, ...], ...]:
    """Returns which layers each rank of a pipeline has, chunk by chunk.

    Every layer is in one chunk; chunks differ by one layer at most, and the first ones have more.

    Args:
        num_layers: of the model.
        num_stages: ranks.
        num_chunks: on each rank.

    Returns:
        For each rank, for each of its chunks, a range of layers.

    Raises:
        ValueError: fewer layers than chunks on all ranks.

    Example:
        >>> jaxcoll.partition_layers(10, 4)
        ((range(0, 3),), (range(3, 6),), (range(6, 8),), (range(8, 10),))
    """
    for name, value in (("num_stages", num_stages), ("num_chunks", num_chunks)):
        if value < 1:
            raise ValueError(f"partition_layers: {name}: expected at least 1, got {value}.")
    if num_layers < num_stages * num_chunks:
        chunks = f" of {num_chunks} chunks each" if num_chunks > 1 else ""
        raise ValueError(
            f"partition_layers: num_layers: {num_layers} layers can't be spread over {num_stages} "
            f"stages{chunks}: each needs one. Use fewer stages, or a deeper model."
        )
    layers = Layers(even_sizes(num_layers, num_stages * num_chunks), num_stages)
    starts = layers.starts
    return tuple(
        tuple(
            range(starts[stage], starts[stage] + layers.sizes[stage])
            for stage in range(rank, len(layers.sizes), num_stages)
        )
        for rank in range(num_stages)
    )


def even_sizes(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Returns how many layers each virtual stage has: the first ones may have one more."""
    least, more = divmod(num_layers, num_stages)
    return tuple(least + (stage < more) for stage in range(num_stages))


@dataclasses.dataclass(frozen=True)
class Layers:
    """How a dimension that counts layers is spread.

    Attributes:
        sizes: layers of each virtual stage, in the order of the model.
        num_ranks: of the pipeline.
        is_named: the model itself splits them over it: in a map it expects a rank's part.
    """

    sizes: tuple[int, ...]
    num_ranks: int
    is_named: bool = False

    @property
    def count(self) -> int:
        """The model's layers."""
        return sum(self.sizes)

    @property
    def width(self) -> int:
        """Layers that are stored for each virtual stage."""
        return max(self.sizes)

    @property
    def num_chunks(self) -> int:
        """Virtual stages of a rank."""
        return len(self.sizes) // self.num_ranks

    @property
    def stored(self) -> int:
        """Layers that are stored, zeros included."""
        return self.width * len(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of each virtual stage."""
        return tuple(it.accumulate(self.sizes, initial=0))[:-1]

    @ft.cached_property
    def _order(self) -> np.ndarray:
        """For each stored place the layer that lies there, or -1."""
        order = np.full((self.num_ranks, self.num_chunks, self.width), -1)
        for stage, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            chunk, rank = divmod(stage, self.num_ranks)
            order[rank, chunk, :size] = np.arange(start, start + size)
        return order.reshape(-1)

    @property
    def is_as_stored(self) -> bool:
        """Whether the model's order is the stored one."""
        return bool(np.array_equal(self._order, np.arange(self.count)))

    def arranged(self, leaf: jax.Array) -> jax.Array:
        """Returns the model's array `(layers, ...)` as it is stored."""
        if self.is_as_stored:
            return leaf
        found = jnp.take(leaf, np.maximum(self._order, 0), axis=0)
        is_there = (self._order >= 0).reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.where(is_there, found, jnp.zeros_like(found))

    def restored(self, leaf: jax.Array) -> jax.Array:
        """Returns a stored array in the model's order."""
        if self.is_as_stored:
            return leaf
        places = np.argsort(self._order, kind="stable")[self.stored - self.count :]
        return jnp.take(leaf, places, axis=0)

    def numbers(self, rank: jax.Array) -> jax.Array:
        """Returns the numbers of a rank's layers, `(chunks, width)`; -1 where there is none."""
        order = self._order.reshape(self.num_ranks, self.num_chunks, self.width)
        return jnp.asarray(order)[rank]

    def part(self, leaf: jax.Array, rank: jax.Array) -> jax.Array:
        """Returns what a rank has of the model's array."""
        each = self.stored // self.num_ranks
        return jax.lax.dynamic_slice_in_dim(self.arranged(leaf), rank * each, each)

    def placed(self, part: jax.Array, rank: jax.Array) -> jax.Array:
        """Returns the model's array, with zeros where other ranks have their layers."""
        whole = jnp.zeros((self.stored, *part.shape[1:]), part.dtype)
        each = self.stored // self.num_ranks
        return self.restored(jax.lax.dynamic_update_slice_in_dim(whole, part, rank * each, 0))


# For each parameter, in the order of its tree, how its layers are spread, or None.
Spread = tuple[Layers | None, ...]


def sizes_for(
    call: str, num_layers: int, num_stages: int, stage_sizes: Sequence[int] | None, where: str
) -> tuple[int, ...]:
    """Returns layers of each virtual stage.

    Args:
        call: the public function, for texts.
        num_layers: of the model.
        num_stages: virtual ones.
        stage_sizes: what the user asks for, or None.
        where: one of the parameters that hold them, and the axis, for texts.

    Raises:
        ValueError: fewer layers than stages, or sizes that do not fit.
    """
    if stage_sizes is None:
        if num_layers < num_stages:
            raise ValueError(
                f"{call}: model: {num_layers} layers can't be spread over {num_stages} stages "
                f"(ranks of the pipeline x chunks on each): each needs one. They are {where}. Use "
                "fewer stages, or a deeper model."
            )
        return even_sizes(num_layers, num_stages)
    sizes = tuple(stage_sizes)
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ValueError(
            f"{call}: stage_sizes: expected {num_stages} numbers of layers, 1 or more, that make "
            f"{num_layers} together, got {sizes}. They are {where}."
        )
    return sizes

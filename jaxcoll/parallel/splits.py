"""Dimensions of parameters of which the ranks of an axis hold equal parts.

Where the ranks don't divide one, there are zeros at its end.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll._sharding import divisible_dimension


@dataclasses.dataclass(frozen=True)
class SplitDim:
    """A dimension that is split.

    Attributes:
        index: which.
        size: of the model's parameter.
        stored: of the state's, a multiple of the number of ranks.
    """

    index: int
    size: int
    stored: int

    @property
    def is_padded(self) -> bool:
        """Whether there are zeros at the end."""
        return self.stored != self.size

    def padded(self, leaf: jax.Array) -> jax.Array:
        """Returns the model's array as it is stored."""
        if not self.is_padded:
            return leaf
        widths = [(0, 0)] * leaf.ndim
        widths[self.index] = (0, self.stored - self.size)
        return jnp.pad(leaf, widths)

    def unpadded(self, leaf: jax.Array) -> jax.Array:
        """Returns a stored array as it is in the model."""
        return lax.slice_in_dim(leaf, 0, self.size, axis=self.index) if self.is_padded else leaf


# For each parameter, in the order of its tree, the dimension that is split, or None.
Split = tuple[SplitDim | None, ...]


def split_dim(
    shape: Sequence[int], num_ranks: int, *, taken: Collection[int] = ()
) -> SplitDim | None:
    """Returns the dimension to split: the largest that is divisible, else the largest.

    Args:
        shape: of the whole array.
        num_ranks: of the axis.
        taken: dimensions that can't be split.
    """
    index = divisible_dimension(shape, num_ranks, taken=taken)
    if index is None:
        free = [i for i in range(len(shape)) if i not in taken and shape[i] >= num_ranks]
        index = max(free, key=lambda i: (shape[i], i), default=None)
    if index is None:
        return None
    size = shape[index]
    return SplitDim(index, size, -(-size // num_ranks) * num_ranks)


def each(function: Any, tree: Any, split: Sequence[Any]) -> Any:
    """Applies `(leaf, dimension) -> leaf` to the leaves that are split."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, split, strict=True)
    return treedef.unflatten(leaf if dim is None else function(leaf, dim) for leaf, dim in pairs)

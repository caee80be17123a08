"""Where a training state is split over the data-parallel ranks, and the communication that needs.

Source: the stages of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (2020).
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Literal

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll.collectives.all_gather import all_gather, all_gather_invariant
from jaxcoll.collectives.reduce_scatter import reduce_scatter
from jaxcoll.parallel.piecewise import Parts, Schedule
from jaxcoll.parallel.precision import MixedPrecisionPolicy
from jaxcoll.parallel.splits import Split, SplitDim, each, split_dim

Stage = Literal[1, 2, 3]


@dataclasses.dataclass(frozen=True)
class Zero:
    """What of a training state each rank of an axis keeps only a part of.

    Attributes:
        axis_name: the axis.
        stage: 1 the optimizer's state, 2 the gradients too, 3 the parameters too.
        min_weight_size: values from which on a parameter is split.
        policy: in which dtypes.
        schedule: when parameters that are parts are whole.
    """

    axis_name: str
    stage: Stage
    min_weight_size: int
    policy: MixedPrecisionPolicy
    schedule: Schedule

    def split(
        self, shapes: Sequence[Any], specs: Sequence[P], size: int, stacked: Collection[int]
    ) -> Split:
        """Returns how parameters of global shapes are split beside what their specs say.

        Args:
            shapes: of all parameters.
            specs: of them.
            size: of the axis.
            stacked: the numbers of those whose first dimension is that of layers.
        """

        def dimension(i: int, leaf: Any, spec: P) -> SplitDim | None:
            if not leaf.size or leaf.size < self.min_weight_size:
                return None
            taken = [j for j, axis in enumerate(spec) if axis is not None]
            return split_dim(leaf.shape, size, taken=[*taken, 0] if i in stacked else taken)

        pairs = zip(shapes, specs, strict=True)
        return tuple(dimension(i, leaf, spec) for i, (leaf, spec) in enumerate(pairs))

    def spec(self, spec: P, ndim: int, dim: SplitDim | None) -> P:
        """Returns a spec with the dimension split over the axis."""
        if dim is None:
            return spec
        entries = [*spec, *[None] * (ndim - len(spec))]
        entries[dim.index] = self.axis_name
        return P(*entries)

    # ---- On a rank, inside a map over the axis ---------------------------------------------------

    def parts(self, split: Split) -> Parts:
        """Returns how parameters that are parts are made whole, in the dtype of computing."""

        def gather(part: jax.Array, dim: SplitDim) -> jax.Array:
            part = self.policy.of_params(part)
            return dim.unpadded(all_gather(part, self.axis_name, axis=dim.index, tiled=True))

        return Parts(split, gather, self._scattered)

    def summed(self, grads: Any, split: Split) -> Any:
        """Returns this rank's part of the sum over the axis, of gradients that are split."""
        return each(self._scattered, grads, split)

    def _scattered(self, grad: jax.Array, dim: SplitDim) -> jax.Array:
        grad = dim.padded(self.policy.of_gradients(grad))
        return reduce_scatter(grad, self.axis_name, scatter_dimension=dim.index, tiled=True)

    def part(self, tree: Any, split: Split) -> Any:
        """Returns this rank's part of whole parameters, or of gradients that are sums already."""

        def slice_of(leaf: jax.Array, dim: SplitDim) -> jax.Array:
            count = dim.stored // lax.axis_size(self.axis_name)
            start = lax.axis_index(self.axis_name) * count
            return lax.dynamic_slice_in_dim(dim.padded(leaf), start, count, dim.index)

        return each(slice_of, tree, split)

    def rejoined(self, parts: Any, split: Split) -> Any:
        """Returns whole parameters, typed as the same on all ranks."""

        def join(part: jax.Array, dim: SplitDim) -> jax.Array:
            return dim.unpadded(all_gather_invariant(part, self.axis_name, axis=dim.index))

        return each(join, parts, split)

"""Dropout for Flax linen on activations that are split over the ranks of an axis."""

import dataclasses

import flax.linen as nn
import jax

from jaxcoll.nn._place import Place, call_of
from jaxcoll.nn._random import key_of_rank


class TPDropout(nn.Module):
    """Dropout of activations that are split over the ranks of an axis: each rank drops its own.

    `flax.linen.Dropout` drops the same on all ranks, which is what activations need that all ranks
    have alike, such as those after a `RowParallelDense`. Those between it and a
    `ColumnParallelDense`, and with a split sequence all others, need this one.

    Attributes:
        rate: share that is dropped.
        axis_name: the axis, or None for a single device.

    Raises:
        ValueError: the mesh of a map, or of `jax.set_mesh`, around the call has no such axis.

    Cost: no communication.
    Source: the random states of Shoeybi et al., "Megatron-LM" (2019).
    """

    rate: float
    _: dataclasses.KW_ONLY
    axis_name: str | None = "tensor"

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Returns the input, or what is left of it, with rng `"dropout"`."""
        axis_name = Place(call_of(self), self.axis_name, None).local_axis
        if deterministic or self.rate == 0.0:
            return x
        key = key_of_rank(self.make_rng("dropout"), axis_name)
        return nn.Dropout(self.rate, deterministic=False)(x, rng=key)

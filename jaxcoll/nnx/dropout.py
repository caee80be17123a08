"""Dropout for Flax NNX on activations that are split over the ranks of an axis."""

from typing import Any

import jax
from flax import nnx

from jaxcoll.nn._place import Place
from jaxcoll.nn._random import key_of_rank


class TPDropout(nnx.Dropout):
    """`jaxcoll.TPDropout` for NNX: `nnx.Dropout` that drops other values on each rank of an axis.

    Source: there, with all that it says.
    """

    def __init__(
        self,
        rate: float,
        *,
        rngs: nnx.Rngs | None = None,
        axis_name: str | None = "tensor",
        deterministic: bool = False,
    ) -> None:
        """Makes the layer.

        Args:
            rate: share that is dropped.
            rngs: its `dropout` stream says which.
            axis_name: the axis, or None for a single device.
            deterministic: whether nothing is dropped; `model.eval()` sets it.
        """
        super().__init__(rate, rngs=rngs, deterministic=deterministic)
        self._axis_name = axis_name

    def __call__(
        self, inputs: jax.Array, *, deterministic: bool | None = None, rngs: Any = None
    ) -> jax.Array:
        """Returns the input, or what is left of it; `rngs` in the place of the layer's own."""
        deterministic = self.deterministic if deterministic is None else deterministic
        stream = self.rngs if rngs is None else rngs
        axis_name = Place("TPDropout", self._axis_name, None).local_axis
        if deterministic or self.rate == 0.0 or stream is None:
            return super().__call__(inputs, deterministic=deterministic)
        key = stream.dropout() if isinstance(stream, nnx.Rngs) else stream
        key = key() if callable(key) else key
        return super().__call__(inputs, deterministic=False, rngs=key_of_rank(key, axis_name))

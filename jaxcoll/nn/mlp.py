"""A Transformer's MLP for Flax linen whose hidden features are split over the ranks of an axis."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax

from jaxcoll.nn._block import SplitBlock
from jaxcoll.nn._mlp import activated
from jaxcoll.nn.dropout import TPDropout


class TPMLP(SplitBlock):
    """Two dense layers with an activation between, each rank with a part of the hidden features.

    With p ranks, `(..., d)`, the same on all, becomes `(..., d)`, the same on all. It works in the
    two places of `jaxcoll.TPDense`. Its layers are `up` and `down`.

    Attributes:
        hidden: hidden features, on all ranks; p must divide them.
        activation: of the hidden features.
        gated: `activation(gate) * value` (as in SwiGLU): `up` has twice as many features, those of
            a gate and of its value in turn.
        dropout: share of the hidden features that is dropped.
        use_bias: whether the layers have one.
        kernel_init: of `up`.
        out_kernel_init: of `down`; as `kernel_init` without.
        mesh: for calls on global arrays.
        axis_name: the axis, or None for a single device.
        sequence_parallel: input and output have this rank's part of the sequence, `(..., s/p, d)`.
        overlap: with `sequence_parallel`, communication beside computation.
        dtype: of the computation; that of input and weights without.
        param_dtype: of the weights.

    Raises:
        ValueError: hidden features that p does not divide; what the layers raise.

    Cost: as `jaxcoll.TPAttention`.
    Source: Shoeybi et al., "Megatron-LM" (2019); Shazeer, "GLU Variants Improve Transformer"
        (2020).
    """

    hidden: int
    _: dataclasses.KW_ONLY
    activation: Callable[[jax.Array], jax.Array] = nn.gelu
    gated: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Returns the output; see the class."""
        self._place().check_divides("hidden", self.hidden)
        up = self._column(self.hidden * (2 if self.gated else 1), "up")(x)
        y = activated(up, self.activation, gated=self.gated)
        y = TPDropout(self.dropout, axis_name=self.axis_name)(y, deterministic=deterministic)
        return self._row(x.shape[-1], "down")(y)

"""A Transformer's MLP for Flax linen whose hidden features are split over the ranks of an axis."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxcoll.nn._mlp import activated
from jaxcoll.nn._place import Place
from jaxcoll.nn.dense import ColumnParallelDense, RowParallelDense
from jaxcoll.nn.dropout import TPDropout


class TPMLP(nn.Module):
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
    use_bias: bool = True
    kernel_init: Any = nn.initializers.lecun_normal()
    out_kernel_init: Any = None
    mesh: Mesh | None = None
    axis_name: str | None = "tensor"
    sequence_parallel: bool = False
    overlap: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Returns the output; see the class."""
        Place(type(self).__name__, self.axis_name, self.mesh).check_divides("hidden", self.hidden)
        options: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                *("use_bias", "mesh", "axis_name", "sequence_parallel", "overlap"),
                *("dtype", "param_dtype"),
            )
        }
        features = self.hidden * (2 if self.gated else 1)
        up = ColumnParallelDense(features, kernel_init=self.kernel_init, name="up", **options)(x)
        y = activated(up, self.activation, gated=self.gated)
        y = TPDropout(self.dropout, axis_name=self.axis_name)(y, deterministic=deterministic)
        kernel_init = self.out_kernel_init or self.kernel_init
        return RowParallelDense(x.shape[-1], kernel_init=kernel_init, name="down", **options)(y)

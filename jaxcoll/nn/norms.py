"""Norms for Flax linen whose input is split over the ranks of an axis."""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxcoll.nn._norm import Norm
from jaxcoll.nn._place import call_of
from jaxcoll.parallel.partitioned import split_init


class TPRMSNorm(nn.Module):
    """An RMS norm of activations that are split over the ranks of an axis.

    Inside a map over `axis_name` it takes and returns this rank's part; on global arrays, and where
    nothing is split, it is `flax.linen.RMSNorm`, whose parameters it has.

    Under `check_vma=False` it takes its input for split, since nobody knows: for activations that
    all ranks have alike, take Flax's own norm there.

    Attributes:
        axis_name: the axis, or None for a single device.
        split: `"sequence"`: positions are split, and the gradients of the parameters are summed
            over the ranks. `"features"`: features are, as between layers of `TPDense`, and each
            position's mean of squares is taken over the ranks.
        epsilon: is added to the mean of squares.
        use_scale: whether there is one.
        scale_init: of the whole scale.
        dtype: of the result; that of the input without.
        param_dtype: of the parameters.

    Raises:
        ValueError: an unknown `split`; the mesh of a map, or of `jax.set_mesh`, around the call has
            no such axis.

    Cost: `"sequence"` nothing forward and an all_reduce of the parameters' gradients;
        `"features"` an all_reduce of a number for each position (two for a layer norm), forward
        and backward.
    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
        (2022), for the sequence; xlstm-jax for the features.
    """

    _: dataclasses.KW_ONLY
    axis_name: str | None = "tensor"
    split: Literal["sequence", "features"] = "sequence"
    epsilon: float = 1e-6
    use_scale: bool = True
    scale_init: Any = nn.initializers.ones_init()
    dtype: Any = None
    param_dtype: Any = jnp.float32

    subtracts_mean: ClassVar[bool] = False

    def _core(self) -> Norm:
        return Norm(call_of(self), self.axis_name, self.split, self.subtracts_mean, self.epsilon)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the normalized input; see the class."""
        core = self._core()
        scale = self._vector("scale", self.scale_init, core, x) if self.use_scale else None
        return core(x, scale, None, self.dtype)

    def _vector(self, name: str, init: Any, core: Norm, x: jax.Array) -> Any:
        shape = (core.num_features(x),)
        return self.param(name, split_init(init, core.spec, 1), shape, self.param_dtype)


class TPLayerNorm(TPRMSNorm):
    """A layer norm of activations that are split over the ranks of an axis.

    `flax.linen.LayerNorm` in the places of `jaxcoll.TPRMSNorm`, which says the rest.

    Attributes:
        use_bias: whether there is one.
        bias_init: of the whole bias.
    """

    _: dataclasses.KW_ONLY
    use_bias: bool = True
    bias_init: Any = nn.initializers.zeros_init()

    subtracts_mean: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the normalized input; see the class."""
        core = self._core()
        scale = self._vector("scale", self.scale_init, core, x) if self.use_scale else None
        bias = self._vector("bias", self.bias_init, core, x) if self.use_bias else None
        return core(x, scale, bias, self.dtype)

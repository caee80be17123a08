"""Norms for Flax NNX whose input is split over the ranks of an axis."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxcoll.nn._norm import Norm
from jaxcoll.nn._place import Place
from jaxcoll.nnx._param import split_param


class TPRMSNorm(nnx.Module):
    """`jaxcoll.TPRMSNorm` for NNX. Source: there, with all that it says."""

    def __init__(
        self,
        num_features: int,
        *,
        rngs: nnx.Rngs,
        mesh: Mesh | None = None,
        axis_name: str | None = "tensor",
        split: Literal["sequence", "features"] = "sequence",
        epsilon: float = 1e-6,
        use_scale: bool = True,
        scale_init: Any = nnx.initializers.ones,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ) -> None:
        """Makes the parameters.

        Args:
            num_features: of the input, of all ranks.
            rngs: its `params` stream makes the parameters.
            mesh: where the parameters lie.
            axis_name: as of `jaxcoll.TPRMSNorm`, and all that follow.
            split: what of the input is split.
            epsilon: is added to the mean of squares.
            use_scale: whether there is one.
            scale_init: of the whole scale.
            dtype: of the result.
            param_dtype: of the parameters.

        Raises:
            ValueError: as `jaxcoll.TPRMSNorm`; features that are split and p does not divide.
        """
        self._core = Norm(type(self).__name__, axis_name, split, False, epsilon)
        self._dtype = dtype
        place = _place(self._core, mesh, num_features)
        shape = ((num_features,), param_dtype)
        scale = split_param(place, scale_init, rngs, self._core.spec, *shape)
        self.scale = scale if use_scale else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the normalized input."""
        return self._core(x, _value(self.scale), None, self._dtype)


class TPLayerNorm(nnx.Module):
    """`jaxcoll.TPLayerNorm` for NNX. Source: there, with all that it says."""

    def __init__(
        self,
        num_features: int,
        *,
        rngs: nnx.Rngs,
        mesh: Mesh | None = None,
        axis_name: str | None = "tensor",
        split: Literal["sequence", "features"] = "sequence",
        epsilon: float = 1e-6,
        use_scale: bool = True,
        scale_init: Any = nnx.initializers.ones,
        use_bias: bool = True,
        bias_init: Any = nnx.initializers.zeros,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ) -> None:
        """Makes the parameters.

        Args:
            num_features: of the input, of all ranks.
            rngs: its `params` stream makes the parameters.
            mesh: where the parameters lie.
            axis_name: as of `jaxcoll.TPLayerNorm`, and all that follow.
            split: what of the input is split.
            epsilon: is added to the variance.
            use_scale: whether there is one.
            scale_init: of the whole scale.
            use_bias: whether there is one.
            bias_init: of the whole bias.
            dtype: of the result.
            param_dtype: of the parameters.

        Raises:
            ValueError: as `jaxcoll.TPLayerNorm`; features that are split and p does not divide.
        """
        self._core = Norm(type(self).__name__, axis_name, split, True, epsilon)
        self._dtype = dtype
        place = _place(self._core, mesh, num_features)
        shape = ((num_features,), param_dtype)
        scale = split_param(place, scale_init, rngs, self._core.spec, *shape)
        bias = split_param(place, bias_init, rngs, self._core.spec, *shape)
        self.scale = scale if use_scale else None
        self.bias = bias if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the normalized input."""
        return self._core(x, _value(self.scale), _value(self.bias), self._dtype)


def _place(core: Norm, mesh: Mesh | None, num_features: int) -> Place:
    place = Place(core.call, core.axis_name, mesh)
    if core.split == "features":
        place.check_divides("num_features", num_features)
    return place


def _value(parameter: nnx.Param | None) -> Any:
    return None if parameter is None else parameter[...]

"""Norms for Flax NNX whose input is split over the ranks of an axis."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxcoll.mesh import check_mesh_axis
from jaxcoll.nn._norm import Norm
from jaxcoll.nn._place import Place
from jaxcoll.nnx._param import split_param


class _SplitNorm(nnx.Module):
    """Makes and holds the parameters; what is computed is said by the core."""

    def __init__(
        self,
        core: Norm,
        num_features: int,
        rngs: nnx.Rngs,
        mesh: Mesh | None,
        *,
        scale_init: Any,
        bias_init: Any,
        dtype: Any,
        param_dtype: Any,
    ) -> None:
        """Makes those parameters that have an initializer."""
        place = Place(core.call, core.axis_name, mesh)
        if (mesh is not None or place.is_mapped) and core.split == "features":
            place.check_divides("num_features", num_features)
        elif mesh is not None and core.axis_name is not None:
            check_mesh_axis(core.call, "axis_name", mesh, core.axis_name)

        def make(init: Any) -> nnx.Param | None:
            shape = (num_features,)
            return init and split_param(place, init, rngs, core.spec, shape, param_dtype)

        self._core, self._dtype = core, dtype
        self.scale, self.bias = make(scale_init), make(bias_init)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the normalized input."""
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        return self._core(x, scale, bias, self._dtype)


class TPRMSNorm(_SplitNorm):
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
            ValueError: as `jaxcoll.TPRMSNorm`; an axis that the mesh lacks; features that are
                split and p does not divide.
        """
        super().__init__(
            Norm(type(self).__name__, axis_name, split, False, epsilon),
            num_features,
            rngs,
            mesh,
            scale_init=scale_init if use_scale else None,
            bias_init=None,
            dtype=dtype,
            param_dtype=param_dtype,
        )


class TPLayerNorm(_SplitNorm):
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
            ValueError: as `jaxcoll.TPLayerNorm`; an axis that the mesh lacks; features that are
                split and p does not divide.
        """
        super().__init__(
            Norm(type(self).__name__, axis_name, split, True, epsilon),
            num_features,
            rngs,
            mesh,
            scale_init=scale_init if use_scale else None,
            bias_init=bias_init if use_bias else None,
            dtype=dtype,
            param_dtype=param_dtype,
        )

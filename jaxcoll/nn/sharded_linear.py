"""A linear layer for Flax NNX whose weight is split over a mesh axis by its outputs."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat
from jaxcoll.mesh import check_auto, check_mesh_axis
from jaxcoll.nn._mapped import over_mesh
from jaxcoll.parallel.tensor import dense


class ShardedLinear(nnx.Module):
    """`x @ weight + bias`, each device with its part of the outputs.

    On global arrays it maps itself over the mesh; inside a map over the axis it takes local parts
    of the weight, and all features of `x`.

    Attributes:
        weight: `(in_features, out_features)`, split as `P(None, axis_name)`.
        bias: `(out_features,)`, split as `P(axis_name)`.

    Cost: none forward; the gradient of `x` is summed over the axis.
    Source: the API of `artifex.generative_models.training.distributed`, as planned there.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        mesh: Mesh,
        axis_name: str = "model",
    ) -> None:
        """Makes the layer, with the values that an unsharded one would have.

        Args:
            in_features: of the input.
            out_features: of the output, of all devices.
            rngs: its `params` stream makes the weight.
            mesh: where.
            axis_name: the axis, which must divide `out_features`.

        Raises:
            ValueError: the mesh has no such axis, or it does not divide `out_features`.
        """
        check_mesh_axis("ShardedLinear", "axis_name", mesh, axis_name)
        check_auto("ShardedLinear", mesh)
        if out_features % mesh.shape[axis_name]:
            raise ValueError(
                f"ShardedLinear: out_features: {out_features} can't be split over the "
                f'{mesh.shape[axis_name]} ranks of axis "{axis_name}".'
            )
        self._mesh = mesh
        self._axis_name = axis_name
        init = nnx.initializers.lecun_normal()
        weight = init(rngs.params(), (in_features, out_features), jnp.float32)
        self.weight = nnx.Param(self._placed(weight, P(None, axis_name)))
        # A key for the bias as well, as nnx.Linear draws: layers made later have the same values.
        bias = nnx.initializers.zeros_init()(rngs.params(), (out_features,), weight.dtype)
        self.bias = nnx.Param(self._placed(bias, P(axis_name)))

    def _placed(self, value: jax.Array, spec: P) -> jax.Array:
        return jax.device_put(value, NamedSharding(self._mesh, spec))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `(..., out_features)`, split over the axis; inside a map this rank's part."""
        weights = (self.weight[...], self.bias[...])
        if self._axis_name in _compat.bound_axes():
            return self._local(x, *weights)
        specs = (P(None, self._axis_name), P(self._axis_name))
        return over_mesh(
            self._local, self._mesh, self._axis_name, x, weights, specs, split_input=False
        )

    def _local(self, x: jax.Array, weight: Any, bias: Any) -> jax.Array:
        return dense(x, weight, bias, self._axis_name, "none")

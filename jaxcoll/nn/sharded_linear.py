"""A linear layer for Flax NNX whose weight is split over a mesh axis by its outputs."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll.nn._dense import Dense
from jaxcoll.nn._place import Place


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
        self._mesh = mesh
        self._axis_name = axis_name
        self._core().check_features(in_features=in_features, out_features=out_features)
        init = nnx.initializers.lecun_normal()
        weight = init(rngs.params(), (in_features, out_features), jnp.float32)
        self.weight = nnx.Param(self._placed(weight, P(None, axis_name)))
        # A key for the bias as well, as nnx.Linear draws: layers made later have the same values.
        bias = nnx.initializers.zeros_init()(rngs.params(), (out_features,), weight.dtype)
        self.bias = nnx.Param(self._placed(bias, P(axis_name)))

    def _placed(self, value: jax.Array, spec: P) -> jax.Array:
        return jax.device_put(value, NamedSharding(self._mesh, spec))

    def _core(self) -> Dense:
        return Dense(Place("ShardedLinear", self._axis_name, self._mesh), "column")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `(..., out_features)`, split over the axis; inside a map this rank's part."""
        return self._core()(x, self.weight[...], self.bias[...], None)

"""Small classifiers of vectors, one for each kind of parallelism, with the same mathematics.

Source: the example models that DistJax documents.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxcoll.nn.dense import RowParallelDense, TPAsyncDense, TPDense
from jaxcoll.parallel.partitioned import local_part, with_partitioning
from jaxcoll.parallel.pipeline import sequential


def _vectors(x: jax.Array) -> jax.Array:
    """Returns `(batch, features)` in float32 or, where it is that, float64."""
    x = jnp.asarray(x)
    return x.reshape(x.shape[0], -1).astype(jnp.promote_types(x.dtype, jnp.float32))


class SimpleClassifier(nn.Module):
    """Two dense layers: `(batch, ...)` to logits `(batch, num_classes)`.

    Attributes:
        num_classes: of the logits.
        hidden: features between the layers.
        dropout: share of those that are dropped in training.
    """

    num_classes: int = 10
    hidden: int = 128
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Returns the logits."""
        x = _vectors(x)
        x = nn.relu(nn.Dense(self.hidden, name="hidden_layer", param_dtype=x.dtype)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes, name="output_layer", param_dtype=x.dtype)(x)


class TPClassifier(nn.Module):
    """`SimpleClassifier` with its weights split over an axis: the same parameters and results.

    Inside a map over `axis_name` it takes whole inputs, the same on all ranks, and returns whole
    logits, typed so; on global arrays its layers map themselves over `mesh`.

    Attributes:
        num_classes: of the logits.
        hidden: features between the layers, which the axis must divide, as it must the input's.
        mesh: for calls on global arrays.
        axis_name: the axis.
        overlap: communication beside computation, `TPAsyncDense`.
    """

    num_classes: int = 10
    hidden: int = 128
    mesh: Mesh | None = None
    axis_name: str = "tensor"
    overlap: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        x = _vectors(x)
        dense = TPAsyncDense if self.overlap else TPDense
        features = local_part(x, (None, self.axis_name), "TPClassifier")
        x = nn.relu(
            dense(
                self.hidden,
                mesh=self.mesh,
                axis_name=self.axis_name,
                param_dtype=x.dtype,
                name="hidden_layer",
            )(features)
        )
        return RowParallelDense(
            self.num_classes,
            mesh=self.mesh,
            axis_name=self.axis_name,
            param_dtype=x.dtype,
            name="output_layer",
        )(x)


class PPClassifier(nn.Module):
    """A dense layer, `num_layers` residual ones, and an output layer.

    The residual layers' parameters are stacked, their first dimension counting layers, so that a
    pipeline can spread them over the ranks of an axis: `(num_layers, ...)`, split as
    `P(axis_name)` where `split` says so.

    Attributes:
        num_classes: of the logits.
        num_layers: residual layers.
        width: features between layers.
        axis_name: the axis of a pipeline.
        split: whether the layers are spread over it. False where it does not divide them: then
            every rank holds all, and runs its share.
    """

    num_classes: int = 10
    num_layers: int = 4
    width: int = 64
    axis_name: str = "pipe"
    split: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, pipeline: Callable[..., jax.Array] = sequential) -> jax.Array:
        """Returns the logits; `pipeline(layer, stacked, x)` runs the layers."""
        x = _vectors(x)
        x = nn.Dense(self.width, name="input_layer", param_dtype=x.dtype)(x)
        shape = (self.num_layers, self.width, self.width)
        stacked = {
            "kernel": self._stacked("kernel", nn.initializers.lecun_normal(batch_axis=0), shape, x),
            "bias": self._stacked("bias", nn.initializers.zeros, shape[:2], x),
        }

        def layer(params: Any, x: jax.Array) -> jax.Array:
            return x + jnp.tanh(x @ params["kernel"] + params["bias"])

        x = pipeline(layer, stacked, x)
        return nn.Dense(self.num_classes, name="output_layer", param_dtype=x.dtype)(x)

    def _stacked(self, name: str, init: Any, shape: tuple[int, ...], x: jax.Array) -> Any:
        names = (self.axis_name if self.split else None, *[None] * (len(shape) - 1))
        return self.param(name, with_partitioning(init, names), shape, x.dtype)

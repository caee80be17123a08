"""A Transformer's MLP for Flax NNX whose hidden features are split over the ranks of an axis."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxcoll.nn._mlp import activated
from jaxcoll.nn._place import Place
from jaxcoll.nnx.dense import ColumnParallelDense, RowParallelDense
from jaxcoll.nnx.dropout import TPDropout


class TPMLP(nnx.Module):
    """`jaxcoll.TPMLP` for NNX, with layers `up` and `down`.

    Source: there, with all that it says.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        rngs: nnx.Rngs,
        activation: Callable[[jax.Array], jax.Array] = nnx.gelu,
        gated: bool = False,
        dropout: float = 0.0,
        deterministic: bool = False,
        use_bias: bool = True,
        kernel_init: Any = nnx.nn.linear.default_kernel_init,
        out_kernel_init: Any = None,
        mesh: Mesh | None = None,
        axis_name: str | None = "tensor",
        sequence_parallel: bool = False,
        overlap: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ) -> None:
        """Makes the layers.

        Args:
            features: d, of the input and the output.
            hidden: hidden features, on all ranks.
            rngs: its `params` stream makes the weights, its `dropout` stream says what is dropped.
            activation: as of `jaxcoll.TPMLP`, and all that follow but `deterministic`.
            gated: whether each hidden feature has a gate.
            dropout: share of the hidden features that is dropped.
            deterministic: whether nothing is dropped; `model.eval()` sets it.
            use_bias: whether the layers have one.
            kernel_init: of `up`.
            out_kernel_init: of `down`.
            mesh: where the parameters lie, and for calls on global arrays.
            axis_name: the axis, or None.
            sequence_parallel: whether input and output have a part of the sequence.
            overlap: communication beside computation.
            dtype: of the computation.
            param_dtype: of the weights.

        Raises:
            ValueError: as `jaxcoll.TPMLP`.
        """
        Place(type(self).__name__, axis_name, mesh).check_divides("hidden", hidden)
        self._activation, self._gated = activation, gated
        options: dict[str, Any] = {
            "rngs": rngs,
            "use_bias": use_bias,
            "mesh": mesh,
            "axis_name": axis_name,
            "sequence_parallel": sequence_parallel,
            "overlap": overlap,
            "dtype": dtype,
            "param_dtype": param_dtype,
        }
        self.up = ColumnParallelDense(
            features, hidden * (2 if gated else 1), kernel_init=kernel_init, **options
        )
        self.down = RowParallelDense(
            hidden, features, kernel_init=out_kernel_init or kernel_init, **options
        )
        self.dropout = TPDropout(
            dropout,
            rngs=rngs if dropout else None,
            axis_name=axis_name,
            deterministic=deterministic,
        )

    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Returns the output; see the class."""
        y = activated(self.up(x), self._activation, gated=self._gated)
        return self.down(self.dropout(y, deterministic=deterministic))

"""Dense layers for Flax NNX whose weights are split over the ranks of an axis."""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxcoll.nn._dense import Dense, tp_dense
from jaxcoll.nn._place import Place
from jaxcoll.nnx._param import split_param


class _SplitDense(nnx.Module):
    """Makes and holds the parameters; what is computed is said by the core."""

    def __init__(
        self,
        core: Dense,
        in_features: int,
        out_features: int,
        rngs: nnx.Rngs,
        *,
        use_bias: bool,
        kernel_init: Any,
        bias_init: Any,
        dtype: Any,
        param_dtype: Any,
    ) -> None:
        core.check_features(in_features=in_features, out_features=out_features)
        self._core, self._dtype = core, dtype
        place, shape = core.place, (in_features, out_features)
        self.kernel = split_param(place, kernel_init, rngs, core.kernel_spec, shape, param_dtype)
        # A key for the bias as well, as nnx.Linear draws: layers made later have the same values.
        bias = split_param(place, bias_init, rngs, core.bias_spec, shape[1:], param_dtype)
        self.bias = bias if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the layer's output; see the class."""
        bias = None if self.bias is None else self.bias[...]
        return self._core(x, self.kernel[...], bias, self._dtype)


class TPDense(_SplitDense):
    """`jaxcoll.TPDense` for NNX: `kernel` `(in, out)` and `bias` `(out,)` lie in parts on a mesh.

    Source: `jaxcoll.TPDense`, which says the rest.
    """

    overlap: ClassVar[bool] = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        mesh: Mesh | None = None,
        axis_name: str = "tensor",
        tp_mode: Literal["gather", "scatter", "none"] = "gather",
        use_bias: bool = True,
        kernel_init: Any = nnx.nn.linear.default_kernel_init,
        bias_init: Any = nnx.initializers.zeros,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ) -> None:
        """Makes the layer, with the values of an `nnx.Linear` of the same keys.

        Args:
            in_features: of the input, of all ranks.
            out_features: of the output, of all ranks.
            rngs: its `params` stream makes the weights.
            mesh: where the parameters lie, and for calls on global arrays.
            axis_name: as of `jaxcoll.TPDense`, and all that follow.
            tp_mode: how the layer is split.
            use_bias: whether there is one.
            kernel_init: of the whole kernel.
            bias_init: of the whole bias.
            dtype: of the computation.
            param_dtype: of the parameters.

        Raises:
            ValueError: as `jaxcoll.TPDense`.
        """
        call = type(self).__name__
        super().__init__(
            tp_dense(call, axis_name, mesh, tp_mode, overlap=self.overlap),
            in_features,
            out_features,
            rngs,
            use_bias=use_bias,
            kernel_init=kernel_init,
            bias_init=bias_init,
            dtype=dtype,
            param_dtype=param_dtype,
        )


class TPAsyncDense(TPDense):
    """`TPDense` with communication beside computation. Source: `jaxcoll.TPAsyncDense`."""

    overlap: ClassVar[bool] = True


class ColumnParallelDense(_SplitDense):
    """`jaxcoll.ColumnParallelDense` for NNX. Source: there, with all that it says."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        mesh: Mesh | None = None,
        axis_name: str | None = "tensor",
        use_bias: bool = True,
        kernel_init: Any = nnx.nn.linear.default_kernel_init,
        bias_init: Any = nnx.initializers.zeros,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        sequence_parallel: bool = False,
        overlap: bool = False,
        gather_output: bool = False,
    ) -> None:
        """Makes the layer, with the values of an `nnx.Linear` of the same keys.

        Args:
            in_features: of the input.
            out_features: of the output, of all ranks.
            rngs: its `params` stream makes the weights.
            mesh: where the parameters lie, and for calls on global arrays.
            axis_name: as of `jaxcoll.ColumnParallelDense`, and all that follow.
            use_bias: whether there is one.
            kernel_init: of the whole kernel.
            bias_init: of the whole bias.
            dtype: of the computation.
            param_dtype: of the parameters.
            sequence_parallel: whether the input's sequence is split.
            overlap: communication beside computation.
            gather_output: whether every rank gets all features.

        Raises:
            ValueError: as `jaxcoll.ColumnParallelDense`.
        """
        place = Place(type(self).__name__, axis_name, mesh)
        super().__init__(
            Dense(place, "column", overlap, sequence_parallel, gather_output),
            in_features,
            out_features,
            rngs,
            use_bias=use_bias,
            kernel_init=kernel_init,
            bias_init=bias_init,
            dtype=dtype,
            param_dtype=param_dtype,
        )


class RowParallelDense(_SplitDense):
    """`jaxcoll.RowParallelDense` for NNX. Source: there, with all that it says."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        mesh: Mesh | None = None,
        axis_name: str | None = "tensor",
        use_bias: bool = True,
        kernel_init: Any = nnx.nn.linear.default_kernel_init,
        bias_init: Any = nnx.initializers.zeros,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        sequence_parallel: bool = False,
        overlap: bool = False,
    ) -> None:
        """Makes the layer, with the values of an `nnx.Linear` of the same keys.

        Args:
            in_features: of the input, of all ranks.
            out_features: of the output.
            rngs: its `params` stream makes the weights.
            mesh: where the parameters lie, and for calls on global arrays.
            axis_name: as of `jaxcoll.RowParallelDense`, and all that follow.
            use_bias: whether there is one.
            kernel_init: of the whole kernel.
            bias_init: of the bias.
            dtype: of the computation.
            param_dtype: of the parameters.
            sequence_parallel: whether each rank gets its part of the sequence.
            overlap: communication beside computation.

        Raises:
            ValueError: as `jaxcoll.RowParallelDense`.
        """
        place = Place(type(self).__name__, axis_name, mesh)
        super().__init__(
            Dense(place, "row", overlap, sequence_parallel),
            in_features,
            out_features,
            rngs,
            use_bias=use_bias,
            kernel_init=kernel_init,
            bias_init=bias_init,
            dtype=dtype,
            param_dtype=param_dtype,
        )

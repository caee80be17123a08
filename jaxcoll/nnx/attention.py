"""Self-attention for Flax NNX whose heads are split over the ranks of an axis."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxcoll.nn._attention import Heads
from jaxcoll.nn._place import Place
from jaxcoll.nn._random import key_of_rank
from jaxcoll.nnx.dense import ColumnParallelDense, RowParallelDense


class TPAttention(nnx.Module):
    """`jaxcoll.TPAttention` for NNX, with layers `qkv` and `out`.

    Source: there, with all that it says.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
        num_kv_heads: int | None = None,
        head_width: int | None = None,
        is_causal: bool = False,
        rotate: Callable[[jax.Array], jax.Array] | None = None,
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
            num_heads: of queries, on all ranks.
            rngs: its `params` stream makes the weights, its `dropout` stream says what is dropped.
            num_kv_heads: as of `jaxcoll.TPAttention`, and all that follow but `deterministic`.
            head_width: features of a head.
            is_causal: whether a position sees none that come after it.
            rotate: of queries and keys.
            dropout: share of the attention's weights that is dropped.
            deterministic: whether nothing is dropped; `model.eval()` sets it.
            use_bias: whether the layers have one.
            kernel_init: of `qkv`.
            out_kernel_init: of `out`.
            mesh: where the parameters lie, and for calls on global arrays.
            axis_name: the axis, or None.
            sequence_parallel: whether input and output have a part of the sequence.
            overlap: communication beside computation.
            dtype: of the computation.
            param_dtype: of the weights.

        Raises:
            ValueError: as `jaxcoll.TPAttention`.
        """
        self.num_heads, self.num_kv_heads, self.head_width = num_heads, num_kv_heads, head_width
        self.is_causal, self.rotate = is_causal, rotate
        self.dropout, self.deterministic = dropout, deterministic
        self._heads = Heads.of(Place(type(self).__name__, axis_name, mesh), features, self)
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
        self.qkv = ColumnParallelDense(
            features, self._heads.qkv_features, kernel_init=kernel_init, **options
        )
        self.out = RowParallelDense(
            self._heads.out_features,
            features,
            kernel_init=out_kernel_init or kernel_init,
            **options,
        )
        self.rngs = rngs.dropout.fork() if dropout else nnx.data(None)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        *,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Returns `(b, s, d)`; `mask` is `(b or 1, 1, s, s)`, true where a position is seen."""
        deterministic = self.deterministic if deterministic is None else deterministic
        key = None
        if self.rngs is not None and not deterministic:
            key = key_of_rank(self.rngs(), self._heads.place.local_axis)
        return self.out(self._heads(self.qkv(x), mask, key))

"""What the blocks for linen share: a column-parallel layer, something local, a row-parallel one."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxcoll.nn._place import Place, call_of
from jaxcoll.nn.dense import ColumnParallelDense, RowParallelDense


class SplitBlock(nn.Module):
    """The attributes that a block gives to both of its layers, and those layers."""

    _: dataclasses.KW_ONLY
    use_bias: bool = True
    kernel_init: Any = nn.initializers.lecun_normal()
    out_kernel_init: Any = None
    mesh: Mesh | None = None
    axis_name: str | None = "tensor"
    sequence_parallel: bool = False
    overlap: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def _place(self) -> Place:
        return Place(call_of(self), self.axis_name, self.mesh)

    def _options(self) -> dict[str, Any]:
        given = ("use_bias", "mesh", "axis_name", "sequence_parallel", "overlap", "dtype")
        return {name: getattr(self, name) for name in (*given, "param_dtype")}

    def _column(self, features: int, name: str) -> ColumnParallelDense:
        options = self._options()
        return ColumnParallelDense(features, kernel_init=self.kernel_init, name=name, **options)

    def _row(self, features: int, name: str) -> RowParallelDense:
        init = self.out_kernel_init or self.kernel_init
        return RowParallelDense(features, kernel_init=init, name=name, **self._options())

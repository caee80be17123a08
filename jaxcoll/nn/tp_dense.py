"""Tensor-parallel dense layers for Flax linen."""

import dataclasses
import functools as ft
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat
from jaxcoll._errors import one_of
from jaxcoll.mesh import check_auto, check_mesh_axis
from jaxcoll.nn._mapped import over_mesh
from jaxcoll.parallel.partitioned import with_partitioning
from jaxcoll.parallel.tensor import Mode, bias_spec, dense, kernel_spec

_MODES = ("gather", "scatter", "none")


class TPDense(nn.Module):
    """A dense layer whose weight is split over the ranks of an axis.

    It works in two places. Inside a map over `axis_name`, it takes and returns this rank's
    features, with this rank's part of the weight. On global arrays, under `jax.jit` or eagerly, it
    maps itself over `mesh`, and its input, output and weight are whole; the first dimension is
    split over the mesh's other axes where they divide it.

    The kernel's global shape is `(in, out)` and the bias's `(out,)`, for every number of ranks; in
    their `flax.linen.Partitioned` stands how they are split. The initial values are those of
    `flax.linen.Dense` with the same key, whatever the number of ranks.

    Attributes:
        features: of the output, of all ranks.
        kernel_init: of the whole kernel.
        mesh: for calls on global arrays.
        axis_name: the axis, of p ranks.
        tp_mode: `"gather"`: the input's features are gathered, each rank computes a part of the
            output's. `"scatter"`: each rank multiplies its part of the input's, and the sums are
            scattered. In both, `(..., in/p)` becomes `(..., out/p)`. `"none"`: not split.
        use_bias: whether there is one.
        bias_init: of the whole bias.
        dtype: of the computation; that of input and weight without.
        param_dtype: of the weight.

    Raises:
        ValueError: an unknown mode, features that p does not divide, an axis that the mesh lacks,
            or no mesh where the axis is not mapped.

    Cost: `"gather"` an all_gather of the input, `"scatter"` a reduce_scatter of the output, and
        each other's in the backward pass.
    Source: `jaxcoll.parallel.tensor`.
    """

    features: int
    _: dataclasses.KW_ONLY
    kernel_init: Any = nn.initializers.lecun_normal()
    mesh: Mesh | None = None
    axis_name: str = "tensor"
    tp_mode: Mode = "gather"
    use_bias: bool = True
    bias_init: Any = nn.initializers.zeros_init()
    dtype: Any = None
    param_dtype: Any = jnp.float32

    overlap: ClassVar[bool] = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the layer's output; see the class."""
        call, mode = type(self).__name__, self.tp_mode
        if mode not in _MODES:
            raise ValueError(one_of(call, "tp_mode", mode, _MODES))
        is_mapped = mode != "none" and self.axis_name in _compat.bound_axes()
        size = 1 if mode == "none" else self._num_ranks(call, is_mapped)
        in_features = x.shape[-1] * (size if is_mapped else 1)
        for name, count in (("features", self.features), ("the input's features", in_features)):
            if count % size:
                raise ValueError(
                    f"{call}: {name}: {count} can't be split over the {size} ranks of axis "
                    f'"{self.axis_name}".'
                )
        specs = kernel_spec(mode, self.axis_name), bias_spec(mode, self.axis_name)
        kernel = self.param(
            "kernel",
            with_partitioning(self.kernel_init, _names(specs[0], 2)),
            (in_features, self.features),
            self.param_dtype,
        )
        bias = None
        if self.use_bias:
            init = with_partitioning(self.bias_init, _names(specs[1], 1))
            bias = self.param("bias", init, (self.features,), self.param_dtype)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        run = ft.partial(dense, axis_name=self.axis_name, mode=mode, overlap=self.overlap)
        if is_mapped or mode == "none":
            return run(x, kernel, bias)
        assert self.mesh is not None  # _num_ranks has checked
        return over_mesh(run, self.mesh, self.axis_name, x, (kernel, bias), specs, split_input=True)

    def _num_ranks(self, call: str, is_mapped: bool) -> int:
        if is_mapped:
            return jax.lax.axis_size(self.axis_name)
        if self.mesh is None:
            raise ValueError(
                f'{call}: mesh: axis "{self.axis_name}" is not mapped here. Pass mesh=, so that '
                "the layer maps itself, or call it inside jax.shard_map over that axis."
            )
        check_mesh_axis(call, "axis_name", self.mesh, self.axis_name)
        check_auto(call, self.mesh)
        return self.mesh.shape[self.axis_name]


def _names(spec: P, ndim: int) -> tuple[str | None, ...]:
    return tuple(spec) + (None,) * (ndim - len(spec))


class TPAsyncDense(TPDense):
    """`TPDense` with communication beside computation, in p steps along a ring.

    The same weights and, but for the order of sums, the same results. Source: `jaxcoll.TPDense`.
    """

    overlap: ClassVar[bool] = True

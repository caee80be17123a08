"""Dense layers for Flax linen whose weights are split over the ranks of an axis."""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcoll.nn._dense import Dense, tp_dense
from jaxcoll.nn._place import Place, call_of
from jaxcoll.parallel.partitioned import split_init


class _SplitDense(nn.Module):
    """Makes the parameters; what is computed is said by `_core`."""

    features: int
    _: dataclasses.KW_ONLY
    kernel_init: Any = nn.initializers.lecun_normal()
    mesh: Mesh | None = None
    axis_name: str | None = "tensor"
    use_bias: bool = True
    bias_init: Any = nn.initializers.zeros_init()
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def _core(self) -> Dense:
        raise NotImplementedError

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the layer's output; see the class."""
        core = self._core()
        in_features = core.in_features(x)
        core.check_features(in_features=in_features, features=self.features)
        shape = (in_features, self.features)
        kernel = self._split("kernel", self.kernel_init, core.kernel_spec, shape)
        bias = None
        if self.use_bias:
            bias = self._split("bias", self.bias_init, core.bias_spec, shape[1:])
        return core(x, kernel, bias, self.dtype)

    def _split(self, name: str, init: Any, spec: P, shape: tuple[int, ...]) -> Any:
        return self.param(name, split_init(init, spec, len(shape)), shape, self.param_dtype)


class TPDense(_SplitDense):
    """A dense layer whose weight is split over the ranks of an axis, as are its activations.

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
    Source: the API of DistJax; `jaxcoll.parallel.tensor`.
    """

    _: dataclasses.KW_ONLY
    tp_mode: Literal["gather", "scatter", "none"] = "gather"

    overlap: ClassVar[bool] = False

    def _core(self) -> Dense:
        return tp_dense(
            call_of(self), self.axis_name, self.mesh, self.tp_mode, overlap=self.overlap
        )


class TPAsyncDense(TPDense):
    """`TPDense` with communication beside computation, in one collective matmul.

    The same weights and, but for the order of sums, the same results. Source: `jaxcoll.TPDense`.
    """

    overlap: ClassVar[bool] = True


class ColumnParallelDense(_SplitDense):
    """A dense layer that computes a part of its output's features on each rank of an axis.

    With p ranks, `(..., in)`, the same on all ranks, becomes `(..., out/p)`; what comes next works
    on those features alone, up to a `RowParallelDense`. It works in the two places of `TPDense`,
    and has the weights and initial values of `flax.linen.Dense`.

    Attributes:
        features: of the output, of all ranks.
        kernel_init: of the whole kernel.
        mesh: for calls on global arrays.
        axis_name: the axis, or None for a layer on a single device.
        use_bias: whether there is one.
        bias_init: of the whole bias.
        dtype: of the computation; that of input and weight without.
        param_dtype: of the weight.
        sequence_parallel: the input's sequence, its last dimension but one, is split over the
            ranks: `(..., s/p, in)` becomes `(..., s, out/p)`.
        overlap: with `sequence_parallel`, communication beside computation, in one collective
            matmul.
        gather_output: every rank gets all features, `(..., out)`.

    Raises:
        ValueError: features or a sequence that p does not divide, an axis that the mesh lacks, or
            no mesh where the axis is not mapped.

    Cost: an all_reduce of the input's gradient; with `sequence_parallel` an all_gather of the input
        twice and a reduce_scatter of its gradient.
    Source: Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al., "Reducing Activation
        Recomputation in Large Transformer Models" (2022).
    """

    _: dataclasses.KW_ONLY
    sequence_parallel: bool = False
    overlap: bool = False
    gather_output: bool = False

    def _core(self) -> Dense:
        place = Place(call_of(self), self.axis_name, self.mesh)
        return Dense(place, "column", self.overlap, self.sequence_parallel, self.gather_output)


class RowParallelDense(_SplitDense):
    """A dense layer that takes a part of its input's features on each rank of an axis.

    With p ranks, `(..., in/p)` becomes `(..., out)`, the sum over the ranks, the same on all; the
    bias, which every rank has whole, is added once. It works in the two places of `TPDense`, and
    has the weights and initial values of `flax.linen.Dense`.

    Attributes:
        features: of the output.
        kernel_init: of the whole kernel.
        mesh: for calls on global arrays.
        axis_name: the axis, or None for a layer on a single device.
        use_bias: whether there is one.
        bias_init: of the bias.
        dtype: of the computation; that of input and weight without.
        param_dtype: of the weight.
        sequence_parallel: each rank gets its part of the sequence: `(..., s, in/p)` becomes
            `(..., s/p, out)`.
        overlap: with `sequence_parallel`, communication beside computation, in one collective
            matmul.

    Raises:
        ValueError: features or a sequence that p does not divide, an axis that the mesh lacks, or
            no mesh where the axis is not mapped.

    Cost: an all_reduce of the output; with `sequence_parallel` a reduce_scatter of it, and an
        all_gather of its gradient.
    Source: as `jaxcoll.ColumnParallelDense`.
    """

    _: dataclasses.KW_ONLY
    sequence_parallel: bool = False
    overlap: bool = False

    def _core(self) -> Dense:
        place = Place(call_of(self), self.axis_name, self.mesh)
        return Dense(place, "row", self.overlap, self.sequence_parallel)

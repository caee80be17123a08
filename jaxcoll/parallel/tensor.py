"""Tensor parallelism: dense layers and norms over ranks that each hold a part of the features.

The functions run on local blocks, inside a map over `axis_name`; with None for it, they are those
of a single device. Weights have their global shape `(in, out)` outside, so that one checkpoint
serves every number of ranks, and both ways of communicating. With p ranks:

    column    weight P(None, axis)   x: (..., s, in)    -> y: (..., s, out/p)   sums dx
    row       weight P(axis, None)   x: (..., s, in/p)  -> y: (..., s, out)     sums y
      with the sequence split between them: (..., s/p, in) and (..., s/p, out)
    gather    weight P(None, axis)   x: (..., in/p)     -> y: (..., out/p)      all ranks' x, then @
    scatter   weight P(axis, None)   x: (..., in/p)     -> y: (..., out/p)      @, then sums of y

Source: column- and row-parallel layers of Shoeybi et al., "Megatron-LM" (2019); the split sequence
of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022);
activations split along features as in xlstm-jax; collective matmuls of Wang et al., "Overlap
Communication with Dependent Computation via Decomposition in Large Deep Learning Models" (2023).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat
from jaxcoll.collectives.all_gather import all_gather
from jaxcoll.collectives.all_gather_matmul import all_gather_matmul
from jaxcoll.collectives.matmul_reduce_scatter import matmul_reduce_scatter
from jaxcoll.collectives.reduce_scatter import reduce_scatter
from jaxcoll.parallel.regions import copy_to, gather_from, reduce_from

Mode = Literal["column", "row", "gather", "scatter", "none"]


def kernel_spec(mode: Mode, axis_name: str | None) -> P:
    """Returns how a kernel `(in, out)` lies on the mesh."""
    splits_columns = mode in ("column", "gather")
    if axis_name is None or mode == "none":
        return P()
    return P(None, axis_name) if splits_columns else P(axis_name, None)


def bias_spec(mode: Mode, axis_name: str | None) -> P:
    """Returns how a bias `(out,)` lies on the mesh: wherever the result's features do."""
    return P() if axis_name is None or mode in ("row", "none") else P(axis_name)


def dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    axis_name: str,
    mode: Literal["gather", "scatter", "none"],
    *,
    overlap: bool = False,
) -> jax.Array:
    """Returns this rank's features of `x @ kernel + bias`, from its features of `x`.

    Args:
        x: this rank's features, `(..., in/p)`; with `"none"` all, `(..., in)`.
        kernel: this rank's part of the weight, by `kernel_spec`.
        bias: this rank's part, by `bias_spec`, or None.
        axis_name: a mapped axis of p ranks.
        mode: `"gather"`, `"scatter"` or `"none"`, a layer without communication.
        overlap: communication beside computation, in one collective matmul.

    Returns:
        `(..., out/p)`; with `"none"` `(..., out)`.
    """
    last = x.ndim - 1
    if mode == "none":
        y = x @ kernel
    elif overlap:
        y = (
            all_gather_matmul(x, kernel, axis_name, gather_axis=-1)
            if mode == "gather"
            else matmul_reduce_scatter(x, kernel, axis_name, scatter_axis=-1)
        )
    elif mode == "gather":
        y = all_gather(x, axis_name, axis=last, tiled=True) @ kernel
    else:
        y = reduce_scatter(x @ kernel, axis_name, scatter_dimension=last, tiled=True)
    return y if bias is None else y + bias


def column_dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    axis_name: str | None,
    *,
    sequence_parallel: bool = False,
    overlap: bool = False,
    gather_output: bool = False,
) -> jax.Array:
    """Returns this rank's features of `x @ kernel + bias`, from all features of `x`.

    Args:
        x: `(..., s, in)`, the same on all ranks; with `sequence_parallel` `(..., s/p, in)`.
        kernel: `(in, out/p)`.
        bias: `(out/p,)` or None.
        axis_name: a mapped axis of p ranks, or None for a single device.
        sequence_parallel: the sequence of `x` is split over the ranks.
        overlap: with `sequence_parallel`, communication beside computation.
        gather_output: every rank gets all features.

    Returns:
        `(..., s, out/p)`; with `gather_output` `(..., s, out)`, the same on all ranks.
    """
    if axis_name is None:
        y = x @ kernel
    elif not sequence_parallel:
        y = copy_to(x, axis_name) @ kernel
    elif overlap:
        y = all_gather_matmul(x, kernel, axis_name)
    else:
        y = all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ kernel
    y = y if bias is None else y + bias
    return y if axis_name is None or not gather_output else gather_from(y, axis_name, -1)


def row_dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    axis_name: str | None,
    *,
    sequence_parallel: bool = False,
    overlap: bool = False,
) -> jax.Array:
    """Returns `x @ kernel + bias`, from this rank's features of `x`; the bias is added once.

    Args:
        x: `(..., s, in/p)`.
        kernel: `(in/p, out)`.
        bias: `(out,)`, the same on all ranks, or None.
        axis_name: a mapped axis of p ranks, or None for a single device.
        sequence_parallel: each rank gets its part of the sequence.
        overlap: with `sequence_parallel`, communication beside computation.

    Returns:
        `(..., s, out)`, the same on all ranks; with `sequence_parallel` `(..., s/p, out)`.
    """
    if axis_name is None:
        y = x @ kernel
    elif not sequence_parallel:
        y = reduce_from(x @ kernel, axis_name)
    elif overlap:
        y = matmul_reduce_scatter(x, kernel, axis_name)
    else:
        y = reduce_scatter(x @ kernel, axis_name, scatter_dimension=x.ndim - 2, tiled=True)
    if bias is None:
        return y
    return y + (copy_to(bias, axis_name) if axis_name and sequence_parallel else bias)


def norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    axis_name: str | None,
    *,
    split: Literal["sequence", "features"],
    subtracts_mean: bool,
    epsilon: float,
) -> jax.Array:
    """Returns `x` normalized over its features: an RMS norm or, less the mean, a layer norm.

    Args:
        x: `(..., s, d)`, of which the ranks hold parts, or each rank all.
        scale: `(d,)`, with features split `(d/p,)`, or None.
        bias: as `scale`.
        axis_name: a mapped axis of p ranks, or None where nothing is split.
        split: `"sequence"`: a rank's positions have all their features, and the gradients of
            `scale` and `bias` are summed over the ranks. `"features"`: the sums over the features
            are.
        subtracts_mean: a layer norm.
        epsilon: is added to the mean of squares.

    Returns:
        The shape and dtype of `x`; computed in float32 at least.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    sums = [(wide**2).sum(-1, keepdims=True)]
    if subtracts_mean:
        sums.append(wide.sum(-1, keepdims=True))
    num_features = x.shape[-1]
    if axis_name is not None and split == "features":
        num_features *= lax.axis_size(axis_name)
        sums = copy_to(reduce_from(sums, axis_name), axis_name)
    elif axis_name is not None and _may_vary(x, axis_name):
        scale, bias = copy_to((scale, bias), axis_name)
    variance = sums[0] / num_features
    if subtracts_mean:
        mean = sums[1] / num_features
        wide, variance = wide - mean, jnp.maximum(variance - mean**2, 0)
    y = wide * lax.rsqrt(variance + epsilon)
    y = y if scale is None else y * scale
    return (y if bias is None else y + bias).astype(x.dtype)


def _may_vary(x: jax.Array, axis_name: str) -> bool:
    """Tells whether ranks may have other values; without types nobody knows."""
    typed = _compat.tracks_varying_axes()
    return not typed or axis_name in _compat.varying_axes(jax.typeof(x))

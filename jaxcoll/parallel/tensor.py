"""Tensor parallelism: dense layers whose weights are split over the ranks of an axis.

The functions run on local blocks, inside a map over `axis_name`. Activations between layers are
split along their features; weights have their global shape `(in, out)` outside, so that one
checkpoint serves every number of ranks, and both ways of communicating:

    gather    weight P(None, axis)   x: (..., in/p) -> y: (..., out/p)   all ranks' x, then a matmul
    scatter   weight P(axis, None)   x: (..., in/p) -> y: (..., out/p)   a matmul, then sums of y

Source: column- and row-parallel layers of Shoeybi et al., "Megatron-LM" (2019), with activations
split along features as in xlstm-jax; rings of Wang et al., "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models" (2023).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll.collectives.all_gather import all_gather
from jaxcoll.collectives.ppermute import ppermute
from jaxcoll.collectives.reduce_scatter import reduce_scatter

Mode = Literal["gather", "scatter", "none"]


def kernel_spec(mode: Mode, axis_name: str) -> P:
    """Returns how a kernel `(in, out)` lies on the mesh."""
    return {"gather": P(None, axis_name), "scatter": P(axis_name, None), "none": P()}[mode]


def bias_spec(mode: Mode, axis_name: str) -> P:
    """Returns how a bias `(out,)` lies on the mesh: each value on one rank, hence counted once."""
    return P() if mode == "none" else P(axis_name)


def dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    axis_name: str,
    mode: Mode,
    *,
    overlap: bool = False,
) -> jax.Array:
    """Returns this rank's features of `x @ kernel + bias`.

    Args:
        x: this rank's features, `(..., in/p)`; with `"none"` all, `(..., in)`.
        kernel: this rank's part of the weight, by `kernel_spec`.
        bias: this rank's part, by `bias_spec`, or None.
        axis_name: a mapped axis of p ranks.
        mode: `"gather"`, `"scatter"` or `"none"`, a layer without communication.
        overlap: in p steps along a ring, each beside a matmul of a part, instead of at once.

    Returns:
        `(..., out/p)`; with `"none"` `(..., out)`.
    """
    y = _multiply(x, kernel, axis_name, mode, overlap)
    return y if bias is None else y + bias


def _multiply(
    x: jax.Array, kernel: jax.Array, axis_name: str, mode: Mode, overlap: bool
) -> jax.Array:
    if mode == "none":
        return x @ kernel
    if mode == "gather":
        if overlap:
            return _ring_gather(x, kernel, axis_name)
        return all_gather(x, axis_name, axis=x.ndim - 1, tiled=True) @ kernel
    if overlap:
        return _ring_scatter(x, kernel, axis_name)
    y = x @ kernel
    return reduce_scatter(y, axis_name, scatter_dimension=y.ndim - 1, tiled=True)


def _next(size: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % size) for i in range(size)]


def _ring_gather(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """After i steps a rank has the features of the rank i before it: multiplies, then passes on."""
    size, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    features = x.shape[-1]

    def product(x: jax.Array, step: int) -> jax.Array:
        start = (rank - step) % size * features
        return _wide(x, lax.dynamic_slice_in_dim(kernel, start, features, axis=0))

    total = product(x, 0)
    for step in range(1, size):
        x = ppermute(x, axis_name, _next(size))
        total = total + product(x, step)
    return total.astype(jnp.result_type(x, kernel))


def _ring_scatter(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """A sum goes once around the ring, and ends at the rank whose features it is of."""
    size, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    features = kernel.shape[-1] // size

    def product(step: int) -> jax.Array:
        start = (rank - step - 1) % size * features
        return _wide(x, lax.dynamic_slice_in_dim(kernel, start, features, axis=1))

    total = product(0)
    for step in range(1, size):
        total = ppermute(total, axis_name, _next(size)) + product(step)
    return total.astype(jnp.result_type(x, kernel))


def _wide(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns the product in float32 at least: sums of parts are rounded once, at their end."""
    dtype = jnp.result_type(x, kernel)
    return jnp.matmul(x, kernel, preferred_element_type=jnp.promote_types(dtype, jnp.float32))

"""The two collective matmuls on `jax.lax`, in p steps along a ring.

A portable form: each step passes a block on with a `ppermute`, which XLA runs beside the matmul of
another block where its backend has asynchronous collectives.

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models" (2023).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

ROWS = -2  # gather_axis and scatter_axis; else the inner dimension and the columns


def gather_and_multiply(
    x: Any, w: Any, *, axes: tuple[str, ...], axis: int, multiply: Callable[[Any, Any], Any]
) -> Any:
    """Returns the products of all ranks' blocks, x `(batch, rows, inner)` and w `(inner, columns)`.

    After i steps a rank has the block of the rank i before it: it multiplies, then passes it on.
    """
    size, rank = lax.axis_size(axes), lax.axis_index(axes)
    batch, rows, inner = x.shape
    total: Any = 0
    if axis == ROWS:
        total = jnp.zeros((batch, size * rows, w.shape[1]), multiply(x, w).dtype)
    for step in range(size):
        source = (rank - step) % size
        if axis == ROWS:
            total = lax.dynamic_update_slice_in_dim(total, multiply(x, w), source * rows, axis=1)
        else:
            of_source = lax.dynamic_slice_in_dim(w, source * inner, inner, axis=0)
            total = total + multiply(x, of_source)
        if step < size - 1:
            x = lax.ppermute(x, axes, _next(size))
    return total


def multiply_and_scatter(
    x: Any, w: Any, *, axes: tuple[str, ...], axis: int, multiply: Callable[[Any, Any], Any]
) -> Any:
    """Returns this rank's block of the summed products.

    A sum goes once around the ring, and ends at the rank whose block it is of.
    """
    size, rank = lax.axis_size(axes), lax.axis_index(axes)

    def product(step: int) -> Any:
        target = (rank - step - 1) % size
        if axis == ROWS:
            rows = x.shape[1] // size
            return multiply(lax.dynamic_slice_in_dim(x, target * rows, rows, axis=1), w)
        columns = w.shape[1] // size
        return multiply(x, lax.dynamic_slice_in_dim(w, target * columns, columns, axis=1))

    total = product(0)
    for step in range(1, size):
        total = lax.ppermute(total, axes, _next(size)) + product(step)
    return total


def _next(size: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % size) for i in range(size)]

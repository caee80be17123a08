"""Small sums of a job, each against NumPy in the order of the ranks: of sizes for each kernel.

A process of the job has one device.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxcoll

MOST_BYTES = 256 << 10
ONE_SHOT_BYTES = 32 << 10
_DTYPES = ("int8", "uint32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
# The largest of both kernels; one of an odd number of elements; a few.
_BYTES = (MOST_BYTES, ONE_SHOT_BYTES, 100_024, 24)


class Sum(NamedTuple):
    """A sum that was right: its dtype, the bytes that a rank sends, the order as explained."""

    dtype: str
    sent: int
    order: str


def sums(mesh: Any) -> Iterator[Sum]:
    """Makes the sums, all processes the same ones; with 64 bits enabled.

    Raises:
        AssertionError: one is wrong.
    """
    for name in _DTYPES:
        dtype = np.dtype(name)
        for size in _BYTES:
            yield _sum(mesh, _numbers(mesh.size, dtype, size // dtype.itemsize))
    # In the order of the ranks the small ones are lost, or not.
    for large in ([1e8, -1e8], [1e8, 1.0], [1.0, 1e8]):
        rest = np.linspace(0.5, 2.5, mesh.size - 2)
        yield _sum(mesh, np.array([*large, *rest], np.float32)[:, None])


def _numbers(ranks: int, dtype: Any, count: int) -> Any:
    numbers = np.random.default_rng(count).integers(-9, 9, (ranks, count))
    # So that floats are rounded.
    return (numbers / 7 if dtype.kind in "fV" else numbers).astype(dtype)


def _sum(mesh: Any, xs: Any) -> Sum:
    f = jax.jit(
        jax.shard_map(
            lambda x: jaxcoll.all_reduce(x, "x", backend="native"), mesh=mesh,
            in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False,
        )
    )  # fmt: skip
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    operand = jax.make_array_from_callback(xs.shape, sharding, lambda at: xs[at])
    is_half = xs.dtype.itemsize == 2  # added in float32, and rounded once
    total = xs[0].astype(np.float32) if is_half else xs[0]
    for x in xs[1:]:
        total = (total + x).astype(total.dtype)
    for _ in range(2):
        got = np.asarray(f(operand).addressable_data(0))[0]
        wrong = int((got != total.astype(xs.dtype)).sum())
        assert wrong == 0, f"{xs.dtype}, {xs[0].nbytes} bytes: {wrong} wrong elements"
    (row,) = jaxcoll.explain(f, operand).rows
    sent = xs[0].nbytes * (2 if is_half and mesh.size > 2 else 1)
    return Sum(xs.dtype.name, sent, row.order)

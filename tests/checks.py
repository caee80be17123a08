"""What the conformance tests do with a row of the table: run it in a program beside its twin."""

import contextlib
import functools as ft
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from helpers import Op, blocks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import _native

Function = Callable[..., Any]


# ---- Programs ------------------------------------------------------------------------------------


@ft.cache
def mesh(*sizes: int, reverse: bool = False) -> Mesh:
    """Returns a mesh of the first devices with the axes "x", "y", ..."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))])
    return Mesh(
        (devices[::-1] if reverse else devices).reshape(sizes), ("x", "y", "z")[: len(sizes)]
    )


def mapped(f: Function, over: Mesh, *, check_vma: bool = True) -> Function:
    """Maps `f` over all axes of a mesh; outside, operands and results are stacked by device."""
    spec = P(over.axis_names)

    def body(*arguments: Any) -> Any:
        results = f(*jax.tree.map(lambda stacked: stacked[0], arguments))
        return jax.tree.map(lambda result: jnp.asarray(result)[None], results)

    return jax.shard_map(body, mesh=over, in_specs=spec, out_specs=spec, check_vma=check_vma)


def type_of(value: Any) -> tuple[Any, ...]:
    """Returns everything that ours and the twin must agree on, but the values."""
    aval = jax.typeof(value)
    return aval.shape, aval.dtype, aval.weak_type, frozenset(aval.manual_axis_type.varying)


def assert_same(actual: Any, expected: Any, *, rtol: float = 0.0) -> None:
    """Asserts that two trees of arrays have the same dtypes, shapes and values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    leaves = jax.tree_util.tree_leaves_with_path(actual)
    for (path, got), want in zip(leaves, jax.tree.leaves(expected), strict=True):
        where = f"result{jax.tree_util.keystr(path)}"
        got, want = np.asarray(got), np.asarray(want)
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        if got.dtype == ml_dtypes.bfloat16:  # in which NumPy does not know NaN
            got, want = got.astype(np.float32), want.astype(np.float32)
        if rtol:
            np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol, err_msg=where)
        else:
            np.testing.assert_array_equal(got, want, err_msg=where)


def assert_conforms(
    op: Op,
    transform: Function,
    over: Mesh,
    xs: Any = None,
    *,
    axis: Any = "x",
    check_vma: bool = True,
    smooth: bool = False,
    rtol: float = 0.0,
    **keywords: Any,
) -> Any:
    """Asserts that `transform(f, x)` has the twin's types and values; returns them, stacked.

    `transform` runs inside the map, with ours and with the twin, in one program. `smooth` takes the
    twin that has derivatives.
    """
    types: dict[str, Any] = {}

    def both(x: Any) -> dict[str, Any]:
        functions = op.over(axis, smooth=smooth, **keywords)
        results = {name: transform(f, x) for name, f in functions.items()}
        types.update({name: jax.tree.map(type_of, result) for name, result in results.items()})
        return results

    xs = blocks(op, over.size) if xs is None else xs
    results = jax.block_until_ready(jax.jit(mapped(both, over, check_vma=check_vma))(xs))
    assert types["ours"] == types["twin"]
    assert_same(results["ours"], results["twin"], rtol=rtol)
    return results["ours"]


def zero_late(axis: str, rank: int, seconds: float) -> jax.Array:
    """Returns 0 on all ranks of an axis, on one of them after some seconds in a callback."""

    def sleep(index: Any) -> np.ndarray:
        time.sleep(seconds if index == rank else 0)
        return np.zeros((), np.float32)

    shape = jax.ShapeDtypeStruct((), np.float32)
    return jax.pure_callback(sleep, shape, jax.lax.axis_index(axis))


# ---- The native path -----------------------------------------------------------------------------


@ft.cache
def native_missing() -> str | None:
    """Says why no call can be native in this process, or None."""
    jax.devices()
    return _native.unavailable_reason()


def auto_is_native() -> bool:
    """Tells whether calls without `backend=` are native."""
    return jaxcoll.config.backend != "lax" and native_missing() is None


class CallCount:
    """The native calls begun inside `counted_calls()`, over all devices."""

    calls = 0


@contextlib.contextmanager
def counted_calls() -> Iterator[CallCount]:
    """Counts native calls; results must be awaited inside."""
    count, before = CallCount(), _native.num_calls()
    yield count
    count.calls = _native.num_calls() - before

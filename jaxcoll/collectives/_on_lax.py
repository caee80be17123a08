"""The two ops that `jax.lax` has in part only, in terms of those that it has.

And all six for a JAX that this version of jaxcoll doesn't know: there, nothing of JAX is touched
that is not public, so that programs run on whatever it is, if slower and with lax's own checks.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import _compat, _native
from jaxcoll._config import resolve_backend
from jaxcoll._errors import NativeUnavailableError
from jaxcoll._types import HALF_PRECISION, Backend, ReduceOp


def widened(x: Any) -> Any:
    """Returns half precision as float32."""
    return x.astype(np.float32) if x.dtype.name in HALF_PRECISION else x


def reduce(op: ReduceOp, axes: tuple[str, ...], groups: Any, x: Any) -> Any:
    """Returns the reduction of one array; half precision is rounded once."""
    if op in ("sum", "mean"):
        reduce = lax.psum if op == "sum" else lax.pmean
        return reduce(widened(x), axes, axis_index_groups=groups).astype(x.dtype)
    if op in ("max", "min"):
        reduce = lax.pmax if op == "max" else lax.pmin
        return reduce(x, axes, axis_index_groups=groups)
    gathered = lax.all_gather(x, axes, axis_index_groups=groups)
    combine = {"prod": lax.mul, "and": lax.bitwise_and, "or": lax.bitwise_or}[op]
    return ft.reduce(combine, list(widened(gathered))).astype(x.dtype)


def send(
    x: Any, axes: tuple[str, ...], root: int, total: Callable[[Any], Any] | None = None
) -> Any:
    """Returns the root's array; as bits, so that -0.0 and NaN payloads arrive unchanged.

    `total` sums over the axes; `lax.psum` without.
    """
    bits = _to_bits(x)
    sent = jnp.where(lax.axis_index(axes) == root, bits, jnp.zeros_like(bits))
    return _from_bits(lax.psum(sent, axes) if total is None else total(sent), x.dtype)


def _to_bits(x: Any) -> Any:
    if x.dtype == np.bool_:
        return x.astype(np.uint8)
    if jnp.issubdtype(x.dtype, np.complexfloating):
        return jnp.stack([_to_bits(lax.real(x)), _to_bits(lax.imag(x))])
    if jnp.issubdtype(x.dtype, np.floating):
        return lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
    return x


def _from_bits(bits: Any, dtype: Any) -> Any:
    if dtype == np.bool_:
        return bits.astype(np.bool_)
    if jnp.issubdtype(dtype, np.complexfloating):
        part = np.dtype(f"float{4 * dtype.itemsize}")
        return lax.complex(_from_bits(bits[0], part), _from_bits(bits[1], part))
    if jnp.issubdtype(dtype, np.floating):
        return lax.bitcast_convert_type(bits, dtype)
    return bits


# ---- An unknown JAX ------------------------------------------------------------------------------


def is_all_there_is(call: str, backend: Backend | None) -> bool:
    """Tells that JAX is unknown, so that the call has to do with the functions below.

    Raises:
        NativeUnavailableError: the call insists on the native path.
    """
    if _compat.problem() is None:
        return False
    reason = _native.missing_reason()  # logs it, once
    if resolve_backend(call, backend) == "native":
        raise NativeUnavailableError(f'{call}: backend="native" can\'t be served: {reason}.')
    return True


def names_of(axis_name: Any) -> tuple[str, ...]:
    """Returns one axis or several as a tuple."""
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


@ft.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _extremum(op: ReduceOp, axes: tuple[str, ...], groups: Any, x: jax.Array) -> Any:
    return reduce(op, axes, groups, x)


@_extremum.defjvp
def _extremum_jvp(
    op: ReduceOp, axes: tuple[str, ...], groups: Any, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    """The tangents of the ranks that hold the extremum, averaged."""
    (x,), (tangent,) = primals, tangents
    y = _extremum(op, axes, groups, x)
    holds = x == y
    share = reduce("sum", axes, groups, jnp.where(holds, tangent, jnp.zeros_like(tangent)))
    return y, share / reduce("sum", axes, groups, holds.astype(tangent.dtype))


def all_reduce(tree: Any, axis_name: Any, op: ReduceOp, groups: Any) -> Any:
    """`jaxcoll.all_reduce`."""
    axes = names_of(axis_name)

    def on(x: Any) -> Any:
        x = jnp.asarray(x)
        x = x.astype(np.int32) if x.dtype == np.bool_ and op in ("sum", "mean", "prod") else x
        if op == "mean" and not jnp.issubdtype(x.dtype, np.inexact):
            return lax.pmean(x, axes, axis_index_groups=groups)
        if op in ("sum", "mean"):
            return reduce(op, axes, groups, x)
        if op in ("max", "min"):
            return _extremum(op, axes, groups, x)
        y = reduce(op, axes, groups, x)
        # Typed as what it is: the same on all ranks.
        return y if groups is not None else send(y, axes, 0)

    return jax.tree.map(on, tree)


def psum_scatter(
    x: Any, axes: tuple[str, ...], *, scatter_dimension: int, axis_index_groups: Any
) -> Any:
    """Returns `lax.psum_scatter`, tiled; between processes not Gloo's, wrong at times."""
    groups = axis_index_groups
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return lax.psum_scatter(
            x, axes, scatter_dimension=scatter_dimension, tiled=True, axis_index_groups=groups
        )
    size, place = lax.axis_size(axes), lax.axis_index(axes)
    if groups:
        size, place = len(groups[0]), jnp.argsort(jnp.asarray(groups).ravel())[place]
        place %= size
    length = x.shape[scatter_dimension] // size
    total = lax.psum(x, axes, axis_index_groups=groups)
    return lax.dynamic_slice_in_dim(total, place * length, length, scatter_dimension)


def broadcast(tree: Any, axis_name: Any, root: int) -> Any:
    """`jaxcoll.broadcast`."""
    axes = names_of(axis_name)

    def on(x: Any) -> Any:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, np.inexact):
            return send(x, axes, root)
        sent = jnp.where(lax.axis_index(axes) == root, x, jnp.zeros_like(x))
        return lax.psum(sent, axes)

    return jax.tree.map(on, tree)

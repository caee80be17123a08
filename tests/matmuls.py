"""The table of collective matmuls: rows as in `helpers.OPS`, whose w is made from x.

So every transformation of a function of one operand reaches both: `weight` lays the elements of x
out as w, anew for each rank.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from helpers import Op
from jax import lax

import jaxcoll

DTYPES = tuple(np.dtype(name) for name in (jnp.float16, jnp.bfloat16, np.float32, np.float64))
COLUMNS = 5


def weight(x: Any, shape: tuple[int, int]) -> Any:
    """Returns a matrix of the elements of x, again and again."""
    return jnp.resize(jnp.roll(x.reshape(-1), 1), shape)


def weight_shape(name: str, x_shape: tuple[int, ...], size: int) -> tuple[int, int]:
    inner = x_shape[-1] * (size if "gather_inner" in name else 1)
    return inner, COLUMNS * (size if "scatter_columns" in name else 1)


def product(x: Any, w: Any) -> Any:
    """`x @ w`, summed in float32 at least, and not rounded yet."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    return jnp.matmul(x, w, preferred_element_type=wide)


def _ours(x: Any, axis: Any, *, name: str, **keywords: Any) -> Any:
    w = weight(x, weight_shape(name, x.shape, lax.axis_size(axis)))
    call = jaxcoll.all_gather_matmul if "gather" in name else jaxcoll.matmul_reduce_scatter
    which = "gather_axis" if "gather" in name else "scatter_axis"
    return call(x, w, axis, **{which: -2 if "rows" in name else -1}, **keywords)


def _twin(x: Any, axis: Any, *, name: str) -> Any:
    w = weight(x, weight_shape(name, x.shape, lax.axis_size(axis)))
    dim = x.ndim - (2 if "rows" in name else 1)
    if "gather" in name:
        return product(lax.all_gather(x, axis, axis=dim, tiled=True), w).astype(x.dtype)
    y = product(x, w)
    return lax.psum_scatter(y, axis, scatter_dimension=dim, tiled=True).astype(x.dtype)


def reference(name: str, xs: np.ndarray, ws: np.ndarray) -> np.ndarray:
    """Returns all ranks' results of all ranks' operands, as NumPy has them."""
    dtype, size = xs.dtype, len(xs)
    xs, ws = xs.astype(np.float64), ws.astype(np.float64)
    axis = -2 if "rows" in name else -1
    if "gather" in name:
        gathered = np.concatenate(list(xs), axis=axis)
        ys = np.stack([gathered @ w for w in ws])
    else:
        total = sum(x @ w for x, w in zip(xs, ws, strict=True))
        ys = np.stack(np.split(total, size, axis=axis))
    return ys.astype(dtype)


def _reference(xs: np.ndarray, *, name: str) -> np.ndarray:
    shape = weight_shape(name, xs.shape[1:], len(xs))
    return reference(name, xs, np.stack([np.asarray(weight(jnp.asarray(x), shape)) for x in xs]))


def _shape(size: int, *, name: str, batch: tuple[int, ...]) -> tuple[int, ...]:
    return (*batch, 3 * (size if "scatter_rows" in name else 1), 4)


def row(name: str, batch: tuple[int, ...] = ()) -> Op:
    """Returns the row of a kind, for operands with leading dimensions."""
    return Op(
        "_".join((name, *map(str, batch))),
        ft.partial(_ours, name=name),
        ft.partial(_twin, name=name),
        ft.partial(_reference, name=name),
        shape=ft.partial(_shape, name=name, batch=batch),
        grouped=False,
    )


KINDS = ("gather_rows", "gather_inner", "scatter_rows", "scatter_columns")
BATCHES = ((), (2,), (2, 1))


def function(kind: str) -> Callable[..., Any]:
    """Returns ours, of x, w and the axis."""
    if "gather" in kind:
        axis = -2 if "rows" in kind else -1
        return ft.partial(jaxcoll.all_gather_matmul, gather_axis=axis)
    return ft.partial(jaxcoll.matmul_reduce_scatter, scatter_axis=-2 if "rows" in kind else -1)


def operands(
    kind: str, size: int, rows: int, inner: int, columns: int, dtype: Any = np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Returns x and w of all ranks, of small integers, for block products of these measures."""
    rng = np.random.default_rng(rows + inner + columns)
    x = (rows * (size if kind == "scatter_rows" else 1), inner)
    w = (
        inner * (size if kind == "gather_inner" else 1),
        columns * (size if kind == "scatter_columns" else 1),
    )
    return (
        rng.integers(-3, 4, (size, *x)).astype(dtype),
        rng.integers(-3, 4, (size, *w)).astype(dtype),
    )

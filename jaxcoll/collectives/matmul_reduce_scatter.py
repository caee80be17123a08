"""matmul_reduce_scatter: each rank gets its block of the sum of all ranks' products.

Bytes moved per rank: p * S, for a block of the result of S bytes. In one process none is copied,
unless blocks have few rows.
"""

from typing import Any

from jaxcoll._config import resolve_backend
from jaxcoll._types import AxisName, Backend
from jaxcoll.collectives import _matmul, _on_lax
from jaxcoll.collectives._arguments import check_axes


def matmul_reduce_scatter(
    x: Any,
    w: Any,
    axis_name: AxisName,
    *,
    scatter_axis: int = -2,
    preferred_element_type: Any = None,
    backend: Backend | None = None,
) -> Any:
    """Multiplies, sums the products of all ranks of a mesh axis, and gives each rank its block.

    The same as `reduce_scatter(x @ w, axis_name, scatter_dimension=scatter_axis, tiled=True)`, in
    one native call, in which no rank holds its whole product; in one process the terms before that
    of the first rank that is missing are added while it is on its way. From some size on, which
    half precision reaches sooner, XLA's matmul gains more than that saves: there, "auto" is a
    matmul of XLA's and a `reduce_scatter` of ours (`jaxcoll.explain` says `two-step`).

    Args:
        x: `(..., p * m, k)` with `scatter_axis=-2`, where the rows of the result are scattered;
            `(..., m, k)` with -1, where its columns are.
        w: `(k, n)`, or `(k, p * n)` with -1.
        axis_name: a mapped axis of size p, or a tuple of them.
        scatter_axis: -2 or -1.
        preferred_element_type: the dtype of the result; that of `x @ w` without.
        backend: see `jaxcoll.using`.

    Returns:
        `(..., m, n)`; varying over `axis_name`.

    Raises:
        NameError: an axis is not mapped here.
        TypeError: an operand is not an array of float16, bfloat16, float32 or float64.
        ValueError: shapes that don't fit, or an unknown `backend`.
        NativeUnavailableError: `backend="native"` where native can't serve.

    Cost: as many multiplications as the matmul. In one process the products are added by the
        matmul itself, those of few rows beside a large `w` together, once all ranks have come;
        across processes each is copied once and added.
    Differentiable: yes; dx is an `all_gather_matmul`, and so is dw. A batch of `w` under `vmap` is
        done in two steps.
    Deterministic: yes; products are added in the ranks' order, in other parts on another layout of
        processes. Half precision is summed in float32 and rounded once.
    Source: as `all_gather_matmul`.

    Example:
        >>> y = jaxcoll.matmul_reduce_scatter(x, w, "tensor")  # y: (batch, seq / p, out)
    """
    call = f"matmul_reduce_scatter(x, w, {axis_name!r})".replace("'", '"')
    axis, dtype = _matmul.check(call, x, w, scatter_axis, "scatter_axis", preferred_element_type)
    if _on_lax.is_all_there_is("matmul_reduce_scatter", backend):
        return _matmul.multiply_then_scatter(
            x, w, axes=axis_name, axis=axis, dtype=dtype, backend=backend
        )
    axes = check_axes("matmul_reduce_scatter", x, axis_name)
    resolved = resolve_backend("matmul_reduce_scatter", backend)
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{call}: w: expected (k, n) with k = {x.shape[-1]} for x of shape {x.shape}, got "
            f"{w.shape}."
        )
    what, scattered = ("x", x.shape[-2]) if axis == _matmul.ROWS else ("w", w.shape[1])
    if scattered % axes.size:
        raise ValueError(
            f"{call}: {what}: expected {'rows' if what == 'x' else 'columns'} that the "
            f"{axes.size} ranks divide for scatter_axis={axis}, got {scattered}."
        )
    return _matmul.apply(_matmul.scatter_p, axes, x, w, axis=axis, dtype=dtype, backend=resolved)

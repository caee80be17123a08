"""all_gather_matmul: the blocks of all ranks, multiplied as they come.

Bytes moved per rank: p * S read, for a block of S bytes. In one process none is copied, unless
blocks have few rows.
"""

from typing import Any

from jaxcoll._config import resolve_backend
from jaxcoll._types import AxisName, Backend
from jaxcoll.collectives import _matmul, _on_lax
from jaxcoll.collectives._arguments import check_axes


def all_gather_matmul(
    x: Any,
    w: Any,
    axis_name: AxisName,
    *,
    gather_axis: int = -2,
    preferred_element_type: Any = None,
    backend: Backend | None = None,
) -> Any:
    """Gathers the blocks of all ranks of a mesh axis along a dimension, and multiplies them.

    The same as `all_gather(x, axis_name, axis=gather_axis, tiled=True) @ w`, in one native call,
    in which no rank makes a copy of all blocks: each is multiplied where it lies, and as it comes:
    the blocks of ranks that are there while others are on their way (with -1, those before the
    first that is missing). From some size on, which half precision reaches sooner, XLA's matmul
    gains more than that saves: there, "auto" is an `all_gather` of ours and a matmul of XLA's
    (`jaxcoll.explain` says `two-step`).

    Args:
        x: this rank's block. `(..., m, k)` with `gather_axis=-2`, where rows are gathered, as for
            activations split along the sequence; `(..., m, k/p)` with -1, where the summed
            dimension is, as for activations split along their features.
        w: `(k, n)`, this rank's own.
        axis_name: a mapped axis of size p, or a tuple of them.
        gather_axis: -2 or -1.
        preferred_element_type: the dtype of the result; that of `x @ w` without.
        backend: see `jaxcoll.using`.

    Returns:
        `(..., p * m, n)`, or `(..., m, n)`; varying over `axis_name`.

    Raises:
        NameError: an axis is not mapped here.
        TypeError: an operand is not an array of float16, bfloat16, float32 or float64.
        ValueError: shapes that don't fit, or an unknown `backend`.
        NativeUnavailableError: `backend="native"` where native can't serve.

    Cost: as many multiplications as the matmul of all rows. Blocks of few rows beside a large `w`
        are copied together first, once all ranks have come. Across processes each block is copied
        once, in parts.
    Differentiable: yes; dx is a `matmul_reduce_scatter`, dw an `all_gather_matmul` again. A batch
        of `w` under `vmap` is done in two steps.
    Deterministic: yes; with -1 the products of blocks, or of parts of them, are added in the ranks'
        order, so that equal `w` give equal bits on all ranks; other bits on another layout of
        processes. Half precision is summed in float32 and rounded once.
    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in
        Large Deep Learning Models" (2023).

    Example:
        >>> y = jaxcoll.all_gather_matmul(x, w, "tensor")  # x: (batch, seq / p, in)
    """
    call = f"all_gather_matmul(x, w, {axis_name!r})".replace("'", '"')
    axis, dtype = _matmul.check(call, x, w, gather_axis, "gather_axis", preferred_element_type)
    if _on_lax.is_all_there_is("all_gather_matmul", backend):
        return _matmul.gather_then_multiply(
            x, w, axes=axis_name, axis=axis, dtype=dtype, backend=backend
        )
    axes = check_axes("all_gather_matmul", x, axis_name)
    resolved = resolve_backend("all_gather_matmul", backend)
    inner = x.shape[-1] * (axes.size if axis == _matmul.INNER else 1)
    if inner != w.shape[0]:
        of_all = f", {axes.size} ranks' {x.shape[-1]}," if axis == _matmul.INNER else ""
        raise ValueError(
            f"{call}: w: expected (k, n) with k = {inner}{of_all} for x of shape {x.shape} "
            f"and gather_axis={axis}, got {w.shape}."
        )
    return _matmul.apply(_matmul.gather_p, axes, x, w, axis=axis, dtype=dtype, backend=resolved)

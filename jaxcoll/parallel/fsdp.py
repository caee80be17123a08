"""Fully sharded data parallelism for Flax linen: parameters split over the ranks of an axis.

A module's parameters are gathered when it runs, and its gradients are averaged and scattered back,
so that each rank keeps a part of the parameters, of their gradients and of the optimizer's state.
All functions but `shard_module_params` run inside `jax.shard_map`.

Source: the API of `xlstm_jax.distributed.data_parallel`; ZeRO stage 3 of Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxcoll import _compat
from jaxcoll._config import logger
from jaxcoll._errors import names_of_axes
from jaxcoll._sharding import divisible_dimension, leaf_name
from jaxcoll.collectives._arguments import check_mapped
from jaxcoll.collectives.all_gather import all_gather
from jaxcoll.collectives.all_reduce import all_reduce
from jaxcoll.collectives.reduce_scatter import reduce_scatter
from jaxcoll.parallel.partitioned import (
    Names,
    Partitioned,
    dimension_of,
    is_partitioned,
    unboxed,
)

# 1 MiB of float32: below, a gather is mostly latency.
MIN_WEIGHT_SIZE = 2**18


def shard_params(params: Any, axis_name: str, min_weight_size: int = MIN_WEIGHT_SIZE) -> Any:
    """Returns this rank's part of each parameter.

    A parameter is split along its largest dimension that the axis divides and that is not split
    yet. It stays whole where it has fewer than `min_weight_size` values, where no dimension can be
    split (a line of the log names it), and where it is split over the axis already.

    Args:
        params: a tree of arrays and `flax.linen.Partitioned`.
        axis_name: a mapped axis.
        min_weight_size: values, of what this rank holds, from which on a parameter is split.

    Returns:
        The tree, with split leaves as `flax.linen.Partitioned` over `axis_name`.
    """
    if not isinstance(min_weight_size, Real):
        raise TypeError(
            f"shard_params: min_weight_size: expected a number of values, got {min_weight_size!r}."
        )
    check_mapped("shard_params", [axis_name], params)
    size = lax.axis_size(axis_name)
    rank = lax.axis_index(axis_name)

    def shard(path: Any, leaf: Any) -> Any:
        value, names = unboxed(leaf)
        if dimension_of(names, axis_name) is not None:
            where = leaf_name(path)
            logger.warning('jaxcoll: shard_params: %s is split over "%s" already', where, axis_name)
            return leaf
        if value.size < min_weight_size:
            return leaf
        taken = [i for i, name in enumerate(names) if name is not None]
        dimension = divisible_dimension(value.shape, size, taken=taken)
        if dimension is None:
            logger.warning(
                'jaxcoll: shard_params: %s of shape %s stays whole: axis "%s" of size %d divides '
                "none of its dimensions that are not split yet",
                *(leaf_name(path), value.shape, axis_name, size),
            )
            return leaf
        part = value.shape[dimension] // size
        mine = lax.dynamic_slice_in_dim(value, rank * part, part, dimension)
        return Partitioned(mine, names=_with(names, dimension, axis_name))

    return jax.tree_util.tree_map_with_path(shard, params, is_leaf=is_partitioned)


@ft.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_array_with_mean_grads(
    x: jax.Array,
    axis: int,
    axis_name: str,
    gather_dtype: Any = None,
    grad_scatter_dtype: Any = None,
) -> jax.Array:
    """Returns the array of which every rank holds a part; gradients come back as the mean.

    Args:
        x: this rank's part.
        axis: the dimension along which the array is split.
        axis_name: the mapped axis over which.
        gather_dtype: travels and is returned in this dtype; that of `x` without.
        grad_scatter_dtype: gradients travel in this dtype; that of `x` without.

    Cost: an `all_gather`, and a `reduce_scatter` in the backward pass.
    Differentiable: in reverse; each rank gets its part of the mean of all ranks' gradients. f16 and
        bf16 are summed and divided in f32, and rounded once.
    """
    if gather_dtype is not None:
        x = x.astype(gather_dtype)
    return all_gather(x, axis_name, axis=axis, tiled=True)


def _gather_forward(
    x: jax.Array, axis: int, axis_name: str, gather_dtype: Any, grad_scatter_dtype: Any
) -> tuple[Any, Any]:
    whole = gather_array_with_mean_grads(x, axis, axis_name, gather_dtype, grad_scatter_dtype)
    return whole, jnp.zeros((), x.dtype)  # the dtype, as residuals are arrays


def _gather_backward(
    axis: int, axis_name: str, _: Any, grad_scatter_dtype: Any, like: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
    gradient = gradient.astype(like.dtype if grad_scatter_dtype is None else grad_scatter_dtype)
    mean = reduce_scatter(gradient, axis_name, scatter_dimension=axis, tiled=True, op="mean")
    return (mean.astype(like.dtype),)


gather_array_with_mean_grads.defvjp(_gather_forward, _gather_backward)


def gather_params(
    params: Any, axis_name: str, gather_dtype: Any = None, grad_scatter_dtype: Any = None
) -> Any:
    """Returns the whole of each parameter that is split over an axis.

    Args:
        params: a tree of arrays and `flax.linen.Partitioned`.
        axis_name: a mapped axis.
        gather_dtype: see `gather_array_with_mean_grads`.
        grad_scatter_dtype: see `gather_array_with_mean_grads`.

    Returns:
        The tree; leaves that are split over no axis any more are plain arrays. Others, and those
        that are not split over `axis_name`, are as they were.
    """

    def gather(leaf: Any) -> Any:
        value, names = unboxed(leaf)
        dimension = dimension_of(names, axis_name)
        if dimension is None:
            return leaf
        if isinstance(names[dimension], tuple) and names[dimension][-1] != axis_name:
            raise ValueError(
                f"gather_params: axis_name: dimension {dimension} is split over "
                f'{names[dimension]}, whose last must be gathered before "{axis_name}".'
            )
        whole = gather_array_with_mean_grads(
            value, dimension, axis_name, gather_dtype, grad_scatter_dtype
        )
        left = _without(names, dimension, axis_name)
        return whole if all(name is None for name in left) else Partitioned(whole, names=left)

    return jax.tree.map(gather, params, is_leaf=is_partitioned)


def shard_module_params(
    target: nn.Module | Callable[..., Any],
    axis_name: str,
    min_weight_size: int = MIN_WEIGHT_SIZE,
    gather_dtype: Any = None,
    grad_scatter_dtype: Any = None,
) -> Any:
    """Returns the module with its parameters split over an axis, and gathered when it runs.

    Args:
        target: a linen module, a module class, a partial of one, or a function of a module. For a
            module that is part of another one already, the result is a function.
        axis_name: the axis, mapped where the module is initialized and applied.
        min_weight_size: see `shard_params`.
        gather_dtype: see `gather_array_with_mean_grads`.
        grad_scatter_dtype: see `gather_array_with_mean_grads`.
    """
    wrap = ft.partial(
        shard_module_params,
        axis_name=axis_name,
        min_weight_size=min_weight_size,
        gather_dtype=gather_dtype,
        grad_scatter_dtype=grad_scatter_dtype,
    )
    if not callable(target) or isinstance(target, nnx.Module):
        raise TypeError(
            "shard_module_params: target: expected a linen module, a module class, a partial or a "
            f"function, got {type(target).__name__}. For NNX, see jaxcoll.fully_shard."
        )
    if isinstance(target, ft.partial):
        return ft.partial(wrap(target.func), *target.args, **target.keywords)
    if isinstance(target, nn.Module):
        if target.parent is None:
            fields = [f.name for f in dataclasses.fields(target) if f.init and f.name != "parent"]
            return wrap(type(target))(**{name: getattr(target, name) for name in fields})
        # It has its place in a parent already.
        return ft.partial(wrap(_call), target)
    return nn.map_variables(
        target,
        mapped_collections="params",
        trans_in_fn=ft.partial(
            gather_params,
            axis_name=axis_name,
            gather_dtype=gather_dtype,
            grad_scatter_dtype=grad_scatter_dtype,
        ),
        trans_out_fn=ft.partial(shard_params, axis_name=axis_name, min_weight_size=min_weight_size),
        mutable=True,
    )


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return cast(Any, module)(*args, **kwargs)


def sync_gradients(grads: Any, axis_names: str | Sequence[str]) -> Any:
    """Returns the gradients averaged over every axis over which the parameter is replicated.

    What is split over an axis has the mean of all ranks already, from
    `gather_array_with_mean_grads`, and other parts of it are other parameters: it is left alone.

    Call it once, on gradients of each rank's own loss, not of a mean over the ranks. Where axes are
    typed (`check_vma=True`) and a parameter is typed as the same on all ranks, its gradient is the
    sum over the ranks, which JAX has taken already: that is divided by their number.

    Args:
        grads: a tree of arrays and `flax.linen.Partitioned`.
        axis_names: mapped axes.

    Cost: one `all_reduce` for all leaves that are averaged over the same axes.
    """
    axes = names_of_axes("sync_gradients", "axis_names", axis_names)
    check_mapped("sync_gradients", axes, grads)
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_partitioned)
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        value, names = unboxed(leaf)
        over = tuple(axis for axis in axes if dimension_of(names, axis) is None)
        summed = tuple(axis for axis in over if not _varies(value, axis))
        if summed:
            leaves[i] = jax.tree.map(ft.partial(_divided, axes=summed), leaf)
        if left := tuple(axis for axis in over if axis not in summed):
            by_axes.setdefault(left, []).append(i)
    for over, positions in by_axes.items():
        means = all_reduce([leaves[i] for i in positions], over, op="mean")
        for i, mean in zip(positions, means, strict=True):
            leaves[i] = mean
    return treedef.unflatten(leaves)


def _divided(total: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return total / lax.axis_size(axes)


def _varies(value: Any, axis: str) -> bool:
    if not _compat.tracks_varying_axes() or _compat.vmapped([axis]):
        return True
    return axis in _compat.varying_axes(jax.typeof(value))


def _with(names: Names, dimension: int, name: Any) -> Names:
    return (*names[:dimension], name, *names[dimension + 1 :])


def _without(names: Names, dimension: int, axis_name: str) -> Names:
    name = names[dimension]
    left = tuple(n for n in name if n != axis_name) if isinstance(name, tuple) else ()
    return _with(names, dimension, left[0] if len(left) == 1 else left or None)

"""Pipeline parallelism: layers on the ranks of an axis, micro-batches passing through them.

Source: GPipe, Huang et al. (2019): all micro-batches forward, then all backward, by
differentiation of the forward loop.
"""

import dataclasses
import functools as ft
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll import _compat
from jaxcoll._errors import one_of
from jaxcoll.collectives._arguments import check_mapped
from jaxcoll.collectives.all_reduce import all_reduce
from jaxcoll.collectives.ppermute import ppermute
from jaxcoll.parallel.batches import LossFn
from jaxcoll.parallel.pure_model import as_pure
from jaxcoll.parallel.step import Step, build_step, varying

Layer = Callable[[Any, jax.Array], jax.Array]


def sequential(layer: Layer, stacked: Any, x: jax.Array) -> jax.Array:
    """Returns x after all layers, one after the other: what a pipeline computes, on one device."""
    return lax.scan(lambda x, params: (layer(params, x), None), x, stacked)[0]


def gpipe(
    layer: Layer, stacked: Any, x: jax.Array, *, axis_name: str, num_micro_batches: int
) -> jax.Array:
    """Returns x after all layers, which are spread over the ranks of an axis.

    With p ranks and m micro-batches, p + m - 1 ticks: at each, every rank sends a micro-batch
    through its layers and passes it on. Ranks that have none yet, or none any more, compute on one
    that is not theirs, whose result nobody uses: a fraction (p - 1) / (m + p - 1) of the time.

    Args:
        layer: `(params, x) -> x`, of one layer; keeps shape and dtype.
        stacked: the parameters of this rank's layers, a first dimension counting them. Layers that
            p does not divide are given whole, the same on every rank, and each takes its share.
        x: `(batch, ...)`, the same on all ranks of the axis.
        axis_name: a mapped axis.
        num_micro_batches: m, which must divide the batch.

    Returns:
        The result, the same on all ranks.
    """
    check_mapped("gpipe", [axis_name], x)
    size, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if x.shape[0] % num_micro_batches:
        raise ValueError(
            f"gpipe: num_micro_batches: {x.shape[0]} examples on each device can't be split into "
            f"{num_micro_batches} micro-batches."
        )
    run_stage = _stage(layer, stacked, size, rank, axis_name)
    micro = x.reshape(num_micro_batches, -1, *x.shape[1:])
    micro = varying(micro, axis_name)
    to_next = [(i, i + 1) for i in range(size - 1)]

    def tick(received: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Real data in the bubble, too: zeros could make infinite derivatives, and those NaNs.
        fresh = micro[jnp.minimum(t, num_micro_batches - 1)]
        y = run_stage(jnp.where(rank == 0, fresh, received))
        return (ppermute(y, axis_name, to_next) if size > 1 else y), y

    start = _typed_like_result(micro[0], run_stage)
    _, ys = lax.scan(tick, start, jnp.arange(num_micro_batches + size - 1))
    results = ys[size - 1 :].reshape(x.shape)
    of_last = jnp.where(rank == size - 1, results, jnp.zeros_like(results))
    return all_reduce(of_last, axis_name)


def _typed_like_result(x: jax.Array, run_stage: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns x typed as varying over the axes over which a stage's result varies."""
    if not _compat.tracks_varying_axes():
        return x
    wanted = _compat.varying_axes(jax.eval_shape(run_stage, x))
    missing = tuple(axis for axis in wanted if axis not in _compat.varying_axes(jax.typeof(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _stage(
    layer: Layer, stacked: Any, size: int, rank: jax.Array, axis_name: str
) -> Callable[[jax.Array], jax.Array]:
    (count,) = {leaf.shape[0] for leaf in jax.tree.leaves(stacked)}
    is_split = not _compat.tracks_varying_axes() or all(
        axis_name in _compat.varying_axes(jax.typeof(leaf)) for leaf in jax.tree.leaves(stacked)
    )
    if is_split or size == 1:
        return ft.partial(sequential, layer, stacked)
    # The first ranks have one layer more: rank r those from first on, `mine` of them.
    most = -(-count // size)
    extra = count % size
    mine = count // size + (rank < extra)
    first = rank * (count // size) + jnp.minimum(rank, extra)

    def run(x: jax.Array) -> jax.Array:
        def one(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            at = jnp.minimum(first + i, count - 1)
            params = jax.tree.map(
                lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), stacked
            )
            return jnp.where(i < mine, layer(params, x), x), None

        return lax.scan(one, varying(x, axis_name), jnp.arange(most))[0]

    return run


def pipeline_parallel_train_step(
    model: Any,
    num_micro_batches: int = 4,
    *,
    schedule: Literal["gpipe"] = "gpipe",
    axis_name: str = "pipe",
    data_axis: str | Sequence[str] = "data",
    loss_fn: LossFn | None = None,
) -> Step:
    """Returns a pipeline- and data-parallel train step, as code for one device.

    Put it under `jax.shard_map` over a mesh with both axes, with
    `in_specs=(state.specs, P(data_axis))` and `out_specs=(state.specs, P())`, where `state` comes
    from `create_train_state(..., mesh=mesh)`.

    Args:
        model: a linen module whose `__call__` takes `pipeline=`, a function
            `(layer, stacked_params, x) -> x` that runs its layers, such as `PPClassifier`.
        num_micro_batches: which the batch of a device must divide into.
        schedule: `"gpipe"`.
        axis_name: the axis over which layers are spread.
        data_axis: the axis, or axes, over which the batch is split; `()` on a mesh without one.
        loss_fn: see `data_parallel_train_step`.

    Returns:
        `train_step(state, batch) -> (state, metrics)`.

    Raises:
        TypeError: a model that takes no `pipeline=`.
        ValueError: an unknown schedule, or a batch that does not divide.
    """
    call = "pipeline_parallel_train_step"
    if schedule != "gpipe":
        raise ValueError(one_of(call, "schedule", schedule, ("gpipe",)))
    if num_micro_batches < 1:
        raise ValueError(
            f"{call}: num_micro_batches: expected at least 1, got {num_micro_batches}."
        )
    pure = as_pure(call, model)
    takes = inspect.signature(type(model).__call__).parameters
    if not isinstance(model, nn.Module) or "pipeline" not in takes:
        raise TypeError(
            f"{call}: model: expected a linen module whose __call__ takes pipeline=, such as "
            f"jaxcoll.models.PPClassifier, got {type(model).__name__}."
        )
    if axis_name == data_axis or axis_name in tuple(data_axis):
        raise ValueError(
            f'{call}: data_axis: "{axis_name}" is the pipeline\'s axis, whose ranks see the same '
            "examples. On a mesh without another one, pass data_axis=()."
        )
    pipeline = ft.partial(gpipe, axis_name=axis_name, num_micro_batches=num_micro_batches)
    piped = dataclasses.replace(pure, apply=ft.partial(pure.apply, pipeline=pipeline))
    return build_step(call, piped, loss_fn, data_axis)

"""Pipeline parallelism: layers on the ranks of an axis, micro-batches passing through them."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll import _compat
from jaxcoll._errors import checked_count, names_of_axes
from jaxcoll.collectives._arguments import check_mapped
from jaxcoll.collectives.all_reduce import all_reduce
from jaxcoll.collectives.ppermute import ppermute
from jaxcoll.parallel.batches import LossFn, micro_batches
from jaxcoll.parallel.gated import gated, typed_like
from jaxcoll.parallel.pipeline_cut import counted, named_layers, num_layers, run_layers
from jaxcoll.parallel.pipelined import pipe_of, with_pipe
from jaxcoll.parallel.schedules import Kind
from jaxcoll.parallel.stages import Layers, sizes_for
from jaxcoll.parallel.step import Step, build_step, varying

Layer = Callable[..., Any]


def sequential(layer: Layer, stacked: Any, x: Any, rng: jax.Array | None = None) -> Any:
    """Returns x after all layers, one after the other: what a pipeline computes, on one device.

    The default for a model's `pipeline=`, see `jaxcoll.pipelined`.

    Args:
        layer: `(params, x) -> x`, of one layer; keeps structure, shapes and dtypes.
        stacked: a tree of all layers' parameters, a first dimension counting them.
        x: a tree of arrays.
        rng: a key; layers are then called as `layer(params, x, key)`, with one for each layer.

    Raises:
        ValueError: a layer that returns something else than it takes.

    Differentiable: yes.
    """
    return run_layers("pipeline", layer, stacked, None, x, rng)


def pipeline(
    layer: Layer,
    stacked: Any,
    x: Any,
    rng: jax.Array | None = None,
    *,
    axis_name: str = "pipe",
    num_micro_batches: int = 4,
) -> Any:
    """Returns x after all layers, which are spread over the ranks of an axis (GPipe).

    With p ranks and m micro-batches, p + m - 1 ticks: at each, every rank sends a micro-batch
    through its layers and passes it on. For code of your own; `jaxcoll.pipelined` trains models,
    in other schedules and less memory.

    Args:
        layer: `(params, x) -> x`, of one layer; keeps structure, shapes and dtypes.
        stacked: a tree of this rank's layers, a first dimension counting them, typed as varying
            over the axis; or of all layers, the same on every rank, which each takes its share of.
        x: a tree of arrays `(batch, ...)`, the same on all ranks of the axis.
        rng: a key; layers are then called as `layer(params, x, key)`, with one for each layer and
            micro-batch.
        axis_name: a mapped axis.
        num_micro_batches: m, which must divide the batch.

    Returns:
        The result, the same on all ranks.

    Raises:
        ValueError: m below 1, a batch that m does not divide, fewer layers than ranks, or a layer
            that returns something else than it takes.

    Cost: a fraction (p - 1) / (m + p - 1) of the time is a bubble. All that the layers keep for
        the way back is kept for all micro-batches, unless the layer is under `jax.checkpoint`.
    Differentiable: yes. A layer is not computed in the bubble, unless it communicates, or reads a
        float from outside that is the same on all ranks: then a derivative with respect to such a
        float that is infinite at what there is makes its gradient NaN.
    Source: GPipe, Huang et al. (2019).
    """
    call = "pipeline"
    check_mapped(call, [axis_name], x)
    size, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    count = checked_count(call, "num_micro_batches", num_micro_batches, 1)
    micro = micro_batches(call, "num_micro_batches", x, count, "x")
    run_stage, layers = _stage(call, layer, stacked, axis_name)
    to_next = [(i, i + 1) for i in range(size - 1)]

    def tick(received: Any, t: jax.Array) -> tuple[Any, Any]:
        number = jnp.clip(t - rank, 0, count - 1)
        key = None if rng is None else jax.random.fold_in(rng, number)
        fresh = jax.tree.map(lambda leaf: leaf[jnp.minimum(t, count - 1)], micro)
        x = jax.tree.map(lambda new, old: jnp.where(rank == 0, new, old), fresh, received)
        if size == 1:
            return (y := run_stage(layers, x, key)), y
        # Not in the bubble, where a layer sees what it is not made for: a derivative that is
        # infinite there would make gradients NaN.
        y = gated(t - rank == number, ft.partial(run_stage, key=key), x, (layers, x))
        return ppermute(y, axis_name, to_next), y

    start = jax.tree.map(lambda leaf: varying(leaf[0], axis_name), micro)
    # Typed as what comes out of a stage, which may vary over more axes.
    start = jax.tree.map(typed_like, start, jax.eval_shape(run_stage, layers, start, rng))
    _, ys = lax.scan(tick, start, jnp.arange(count + size - 1))

    def of_last(y: jax.Array, leaf: jax.Array) -> jax.Array:
        y = y[size - 1 :].reshape(leaf.shape)
        return jnp.where(rank == size - 1, y, jnp.zeros_like(y))

    return all_reduce(jax.tree.map(of_last, ys, x), axis_name)


def _stage(call: str, layer: Layer, stacked: Any, axis_name: str) -> tuple[Callable[..., Any], Any]:
    """Returns a rank's part as a function `(layers, x, key) -> x`, and its layers."""
    size, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    held = named_layers(stacked)
    count = num_layers(call, held)
    types = map(jax.typeof, held.values())
    is_split = size == 1 or all(axis_name in _compat.varying_axes(each) for each in types)
    if not is_split and not _compat.tracks_varying_axes():
        raise ValueError(
            f"{call}: stacked: whether a rank has its own layers or all of them can't be known "
            "without typed axes (jax.shard_map with check_vma=True, its default)."
        )
    if is_split:
        numbers = rank * count + jnp.arange(count)
        return lambda chunk, x, key: run_layers(call, layer, chunk, numbers, x, key), stacked
    where = f'{counted(*next(iter(held.items())))}, over "{axis_name}"'
    layers = Layers(sizes_for(call, count, size, None, where), size)
    mine = jax.tree.map(lambda leaf: layers.part(varying(leaf, axis_name), rank), stacked)
    numbers = layers.numbers(rank)[0]
    lack = min(layers.sizes) < layers.width
    run = ft.partial(run_layers, call, layer, some_lack=lack)
    return lambda chunk, x, key: run(chunk, numbers, x, key), mine


def pipeline_parallel_train_step(
    model: Any,
    num_micro_batches: int = 4,
    *,
    schedule: Kind = "gpipe",
    axis_name: str = "pipe",
    data_axis: str | Sequence[str] = "data",
    loss_fn: LossFn | None = None,
) -> Step:
    """Returns a pipeline- and data-parallel train step, as code for one device.

    Put it under `jax.shard_map` over a mesh with both axes, with
    `in_specs=(state.specs, P(data_axis))` and `out_specs=(state.specs, P())`, where `state` comes
    from `create_train_state(model, ..., mesh=mesh)`: the layers are spread as the model itself says
    (`jaxcoll.with_partitioning`), or whole on each rank, which runs its share of them. With
    `jaxcoll.pipelined`, which see, any number of layers is spread, and `"interleaved"` too.

    Args:
        model: one whose `__call__` takes `pipeline=`, such as `PPClassifier`.
        num_micro_batches: which the batch of a device must divide into.
        schedule: see `jaxcoll.PipelineSchedule`.
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
    if axis_name in names_of_axes(call, "data_axis", data_axis):
        raise ValueError(
            f'{call}: data_axis: "{axis_name}" is the pipeline\'s axis, whose ranks see the same '
            "examples. On a mesh without another one, pass data_axis=()."
        )
    pipe = pipe_of(call, num_micro_batches, schedule, axis_name)
    return build_step(call, with_pipe(call, model, pipe), loss_fn, data_axis)

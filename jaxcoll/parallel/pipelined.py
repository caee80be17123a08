"""Pipelined training of any model that says where its layers are."""

import dataclasses
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from jaxcoll._errors import checked_count
from jaxcoll.parallel.pipe import Pipe
from jaxcoll.parallel.pure_model import PureModel, as_pure
from jaxcoll.parallel.schedules import Kind, PipelineSchedule


def pipelined(
    model: Any,
    num_micro_batches: int = 4,
    *,
    schedule: Kind = "1f1b",
    axis_name: str = "pipe",
    num_chunks: int | None = None,
    stage_sizes: Sequence[int] | None = None,
) -> PureModel:
    """Returns a model whose layers are spread over the ranks of a pipeline.

    It takes the model's place in `jaxcoll.create_train_state` and
    `jaxcoll.data_parallel_train_step`, alone or with `jaxcoll.fully_shard`; the step is mapped with
    `in_specs=(state.specs, P(axis))` and `out_specs=(state.specs, P())`, over the axes of the batch
    and the pipeline's.

    The model's `__call__` takes `pipeline=` and calls it once, as `pipeline(layer, stacked, x)`:
    `layer(params, x)` is one layer, which returns what it takes, a tree of arrays; `stacked` are
    parameters, the first dimension of each counting layers; the result is what all layers make of
    x. With a key as a fourth argument, `layer(params, x, key)` has one of its own for each layer
    and micro-batch, and the same one when it is computed again.

    The default of `pipeline`, for one device, is `jaxcoll.sequential`.

    What the model does before, as an embedding, runs on the first stage, and what it does after, as
    a head and the loss, on the last; where that communicates, as with tensor parallelism, on all of
    them. Parameters outside of the layers are whole on each stage, and their gradients summed: tied
    ones are right. Each micro-batch counts by its weight, as with `accumulate`, whose results it
    has; of linen models with the same random keys, too. `jax.debug.print` prints in layers alone.

    Args:
        model: a Flax linen or NNX module, a function that makes an NNX module, or a pair
            `(init, apply)`, or of `jaxcoll.fully_shard`.
        num_micro_batches: m, into which the batch of each device is split.
        schedule: see `jaxcoll.PipelineSchedule`.
        axis_name: the axis of the pipeline, of p ranks.
        num_chunks: v, of layers on each rank; 2 if interleaved, else 1.
        stage_sizes: layers of each of the v p chunks, in the model's order (a chunk of each rank
            before the second of any); even ones without. Time goes by the largest.

    Raises:
        TypeError: a model of another kind, or whose `__call__` takes no `pipeline=`.
        ValueError: an unknown schedule, a number that makes no sense, or a model that is pipelined
            already.

    Cost: per step and rank, in units of a micro-batch through a chunk, `v m + p - 1` forward and
        backward passes, in which a stage is computed once more: 4/3 of the work of a step that
        keeps everything. What is kept for the way back are inputs of stages, see
        `jaxcoll.PipelineSchedule.peak_inflight`. With `fully_shard`, of stage 3 too, a stage's
        parameters are gathered once in a step, before its first tick, and whole until the last.
    Differentiable: it is what a step differentiates. Optimizers must update element by element.
    Source: as `jaxcoll.PipelineSchedule`.

    Example:
        >>> model = jaxcoll.pipelined(PPClassifier(), 8, schedule="1f1b")
        >>> state = jaxcoll.create_train_state(model, optax.adam(1e-3), key, batch, mesh)
        >>> step = jaxcoll.data_parallel_train_step(model)
    """
    call = "pipelined"
    pipe = pipe_of(call, num_micro_batches, schedule, axis_name, num_chunks, stage_sizes)
    return with_pipe(call, model, pipe)


def with_pipe(call: str, model: Any, pipe: Pipe) -> PureModel:
    """Returns a model whose layers are spread so.

    Raises:
        TypeError: it takes no `pipeline=`.
        ValueError: it is pipelined already.
    """
    pure = as_pure(call, model)
    if not pure.takes_pipeline:
        raise TypeError(
            f"{call}: model: expected one whose __call__ takes pipeline=, such as "
            f"jaxcoll.models.PPClassifier, got a {pure.kind}, which can't be cut into stages."
        )
    if pure.pipe is not None:
        raise ValueError(f"{call}: model: it is pipelined already, over {pure.pipe.axis_name!r}.")
    return dataclasses.replace(pure, pipe=pipe)


def pipe_of(
    call: str,
    num_micro_batches: int,
    schedule: Any,
    axis_name: str,
    num_chunks: int | None = None,
    stage_sizes: Sequence[int] | None = None,
) -> Pipe:
    """Returns the arguments of `pipelined`, checked.

    Raises:
        TypeError: the number of micro-batches is none.
        ValueError: one of them makes no sense.
    """
    num_micro_batches = checked_count(call, "num_micro_batches", num_micro_batches, 1)
    try:
        chunks = PipelineSchedule(schedule, 1, num_chunks or 0).num_chunks
    except ValueError as error:
        text = str(error).replace("PipelineSchedule: kind", "PipelineSchedule: schedule")
        raise ValueError(text.replace("PipelineSchedule", call, 1)) from None
    sizes = None
    if stage_sizes is not None:
        sizes = tuple(stage_sizes) if isinstance(stage_sizes, Sequence) else ()
        if not sizes or not all(isinstance(size, Integral) for size in sizes):
            raise ValueError(
                f"{call}: stage_sizes: expected numbers of layers, such as (2, 3), got "
                f"{stage_sizes!r}."
            )
    return Pipe(axis_name, num_micro_batches, schedule, chunks, sizes)

"""Fully sharded training of any model: a state of which each rank keeps a part."""

import dataclasses
from typing import Any

from jaxcoll._errors import checked_count
from jaxcoll.parallel.piecewise import Schedule
from jaxcoll.parallel.precision import MixedPrecisionPolicy
from jaxcoll.parallel.pure_model import PureModel, as_pure
from jaxcoll.parallel.zero import Stage, Zero


def fully_shard(
    model: Any,
    axis_name: str = "data",
    *,
    stage: Stage = 3,
    min_weight_size: int = 1024,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    prefetch: int | None = None,
    bucket_bytes: int = 2**22,
) -> PureModel:
    """Returns a model whose training state is split over the data-parallel ranks.

    It takes the model's place in `jaxcoll.create_train_state` and
    `jaxcoll.data_parallel_train_step`; the step is mapped with `in_specs=(state.specs, P(axis))`
    and `out_specs=(state.specs, P())`. The trained parameters are those of the model itself.

    A parameter, and what the optimizer keeps of it, is split along its largest dimension that the
    axis divides and that is not split already; where there is none, along its largest one, with
    zeros at the end of what is stored (`TrainState.unpadded`). Layers that the model scans over
    (`jax.lax.scan`, `flax.linen.scan`, `flax.nnx.scan`) are never split along the dimension of the
    scan. Scalars and what can't be split stay whole.

    Stage 1 splits the optimizer's state, 2 the gradients too, 3 the parameters too, which are then
    whole only where the model computes with them: the model is traced and cut into pieces by the
    parameters that it reads, whatever it is written with. Those of a piece are gathered together
    and dropped after it. Of layers in a scan one is whole at a time, where the scan goes over the
    parameters themselves, by their first dimension. What stands under one `jax.checkpoint`,
    `jax.custom_vjp` or `jax.lax.cond` is read as one: put them around layers, not around a model.
    What a layer makes of a parameter and multiplies with, such as `w / norm(w)`, is kept whole for
    the backward pass, for every layer, unless there is a `jax.checkpoint` around it.

    Args:
        model: a Flax linen or NNX module, a function that makes an NNX module, or a pair
            `(init, apply)`. An NNX module is whole before; what the function makes never is.
        axis_name: one of the step's axes; others are replicas (hybrid sharding).
        stage: 1, 2 or 3.
        min_weight_size: values from which on a parameter is split.
        mp_policy: in which dtypes to compute and to communicate.
        reshard_after_forward: of stage 3: parameters are dropped after the forward pass and
            gathered again in the backward pass, except those of the last piece. False keeps them
            between: less communication, more memory.
        prefetch: of stage 3: how many pieces ahead parameters are gathered, at most, and, if any,
            one layer ahead in scans; 0 gathers them when what is before has ended. None: 1, and 0
            in scans, where it was not faster on CPU.
        bucket_bytes: of stage 3: whole parameters that make a piece; one that reads a larger
            parameter has no other.

    Raises:
        TypeError: a model of another kind, several axes, or an option of another type.
        ValueError: an unknown stage, a number that is too small, or a model that is sharded
            already.

    Cost: of parameters of S bytes, per step and rank, about: stage 1 an `all_reduce` and an
        `all_gather`, 3 S; stage 2 a `reduce_scatter` and an `all_gather`, 2 S; stage 3 two
        `all_gather` (one, where parameters stay) and a `reduce_scatter` for each micro-batch, 3 S.
        Computed in 16 bits, an `all_reduce` of one number more for each micro-batch, its weight,
        but not beside a pipeline.
        Memory for whole gradients: stage 1 all; stage 2 that of a parameter, or of a layer in a
        scan (on `jax.lax`, and of a scan that stands under one `jax.checkpoint` or the like, those
        of all its layers), but all where a step accumulates, or beside a pipeline. Of stage 3 for
        whole parameters and their gradients: those of a piece, and of as many more as `prefetch`
        says; of layers beside each other, where none waits for another, all gradients may be there
        at once.
    Differentiable: it is what a step differentiates. Optimizers must update element by element;
        others are refused.
    Source: ZeRO, Rajbhandari et al. (2020); fully sharded data parallelism, Zhao et al. (2023), and
        the options of PyTorch's FSDP2.
    """
    call = "fully_shard"
    pure = as_pure(call, model)
    if not isinstance(axis_name, str):
        raise TypeError(
            f"{call}: axis_name: expected the name of one axis, got {axis_name!r}. Others over "
            "which the batch is split hold copies: pass them to the step alone, as "
            'data_parallel_train_step(model, axis_name=("replica", "data")).'
        )
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ValueError(f"{call}: stage: expected one of 1, 2, 3, got {stage!r}.")
    min_weight_size = checked_count(call, "min_weight_size", min_weight_size, 0)
    if prefetch is not None:
        prefetch = checked_count(call, "prefetch", prefetch, 0)
    bucket_bytes = checked_count(call, "bucket_bytes", bucket_bytes, 1)
    if not isinstance(reshard_after_forward, bool):
        raise TypeError(
            f"{call}: reshard_after_forward: expected True or False, got {reshard_after_forward!r}."
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy | None):
        raise TypeError(
            f"{call}: mp_policy: expected a jaxcoll.MixedPrecisionPolicy, got "
            f"{type(mp_policy).__name__}."
        )
    if pure.zero is not None:
        raise ValueError(f"{call}: model: it is sharded already, over {pure.zero.axis_name!r}.")
    zero = Zero(
        axis_name,
        stage,
        min_weight_size,
        mp_policy or MixedPrecisionPolicy(),
        Schedule(bucket_bytes, prefetch, reshard_after_forward),
    )
    return dataclasses.replace(pure, zero=zero)

"""Fully sharded training of any model: a state of which each rank keeps a part."""

import dataclasses
from typing import Any

from jaxcoll._errors import one_of
from jaxcoll.parallel.pure_model import PureModel, as_pure
from jaxcoll.parallel.zero import Stage, Zero


def fully_shard(
    model: Any, axis_name: str = "data", *, stage: Stage = 3, min_weight_size: int = 1024
) -> PureModel:
    """Returns a model whose training state is split over the data-parallel ranks.

    It takes the model's place in `jaxcoll.create_train_state` and
    `jaxcoll.data_parallel_train_step`; the step is mapped with `in_specs=(state.specs, P(axis))`
    and `out_specs=(state.specs, P())`. The trained parameters are those of the model itself.

    A parameter, and what the optimizer keeps of it, is split along its largest dimension that the
    axis divides and that is not split already. Scalars and what can't be split stay whole.

    Stage 1 splits the optimizer's state, 2 the gradients too, 3 the parameters too. That is what a
    rank keeps between steps; within one, stage 3 gathers the whole parameters.

    Args:
        model: a Flax linen or NNX module, or a pair `(init, apply)`.
        axis_name: one of the step's axes; others are replicas (hybrid sharding).
        stage: 1, 2 or 3.
        min_weight_size: values from which on a parameter is split.

    Raises:
        TypeError: a model of another kind.
        ValueError: an unknown stage, or a model that is sharded already.

    Cost: of parameters of S bytes, per step and rank, about: stage 1 an `all_reduce` and an
        `all_gather`, 3 S; stage 2 a `reduce_scatter` and an `all_gather`, 2 S; stage 3 an
        `all_gather` and a `reduce_scatter` for each micro-batch, 2 S.
    Differentiable: it is what a step differentiates. Optimizers must update element by element;
        others are refused.
    Source: ZeRO, Rajbhandari et al. (2020); fully sharded data parallelism, Zhao et al. (2023).
    """
    call = "fully_shard"
    pure = as_pure(call, model)
    if stage not in (1, 2, 3):
        raise ValueError(one_of(call, "stage", stage, ("1", "2", "3")))
    if pure.zero is not None:
        raise ValueError(f"{call}: model: it is sharded already, over {pure.zero.axis_name!r}.")
    return dataclasses.replace(pure, zero=Zero(axis_name, stage, min_weight_size))

"""A model as two functions, whichever library it was written with."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import NamedSharding

from jaxcoll.parallel.partitioned import Partitioned
from jaxcoll.parallel.pipe import Pipe
from jaxcoll.parallel.zero import Zero


@dataclasses.dataclass(frozen=True)
class PureModel:
    """A model as two functions.

    Attributes:
        init: `(rng, inputs) -> variables`, a dict with `"params"` and what else the model keeps.
        apply: `(variables, inputs, rng) -> (outputs, others)`, the others as they are afterwards.
        kind: what it was made of, for texts.
        zero: what of its state is split over the data-parallel ranks; see `jaxcoll.fully_shard`.
        takes_pipeline: whether `apply` takes `pipeline=`.
        pipe: how its layers are spread over the ranks of a pipeline; see `jaxcoll.pipelined`.
    """

    init: Callable[[jax.Array, Any], dict[str, Any]]
    apply: Callable[..., tuple[Any, dict[str, Any]]]
    kind: str = "pair (init, apply)"
    zero: Zero | None = None
    takes_pipeline: bool = False
    pipe: Pipe | None = None


def as_pure(call: str, model: Any) -> PureModel:
    """Returns a linen module, an NNX module or a pair `(init, apply)` as a pure model.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(model, PureModel):
        return model
    if isinstance(model, nn.Module):
        return _of_linen(model)
    if isinstance(model, nnx.Module):
        return _of_nnx(model)
    if isinstance(model, tuple) and len(model) == 2 and all(map(callable, model)):
        init, apply = model
        return PureModel(
            lambda rng, inputs: {"params": init(rng, inputs)},
            lambda variables, inputs, rng, **more: (
                apply(variables["params"], inputs, **more),
                {},
            ),
            takes_pipeline=_takes_pipeline(apply),
        )
    raise TypeError(
        f"{call}: model: expected a Flax linen or NNX module, or a pair of functions (init, "
        f"apply), got {type(model).__name__}."
    )


def _of_linen(model: nn.Module) -> PureModel:
    flags = _training_flags(type(model).__call__)

    def init(rng: jax.Array, inputs: Any) -> dict[str, Any]:
        return dict(model.init(rng, inputs, **flags))

    def apply(variables: dict[str, Any], inputs: Any, rng: Any, **more: Any) -> tuple[Any, Any]:
        outputs, others = model.apply(
            variables,
            inputs,
            rngs={"dropout": rng},
            mutable=[name for name in variables if name != "params"],
            **flags,
            **more,
        )
        return outputs, dict(others)

    kind = f"linen {type(model).__name__}"
    return PureModel(init, apply, kind, takes_pipeline=_takes_pipeline(type(model).__call__))


def _takes_pipeline(call: Callable[..., Any]) -> bool:
    return "pipeline" in inspect.signature(call).parameters


def _training_flags(call: Callable[..., Any]) -> dict[str, Any]:
    """Returns what tells a model that it is being trained, in the names that are in use."""
    known = {"train": True, "training": True, "deterministic": False}
    names = inspect.signature(call).parameters
    return {name: value for name, value in known.items() if name in names}


def _of_nnx(model: nnx.Module) -> PureModel:
    """The module's own values are the first ones, and lie as they do there; a key is not needed.

    Its random keys are replaced in each step by ones of the step's and the rank's.
    """
    graph, params, keys, others = nnx.split(model, nnx.Param, nnx.RngKey, ...)
    params = jax.tree.map(_boxed_as_it_lies, params)
    key_leaves, key_tree = jax.tree.flatten(keys)

    def apply(variables: dict[str, Any], inputs: Any, rng: Any, **more: Any) -> tuple[Any, Any]:
        fresh = [jax.random.fold_in(rng, i) for i in range(len(key_leaves))]
        states = (variables["params"], key_tree.unflatten(fresh), variables["others"])
        module = nnx.merge(graph, *states, copy=True)
        outputs = module(inputs, **more)
        return outputs, {"others": nnx.split(module, nnx.Param, nnx.RngKey, ...)[3]}

    def init(rng: jax.Array, inputs: Any) -> dict[str, Any]:
        del rng, inputs
        return {"params": params, "others": others}

    kind = f"NNX {type(model).__name__}"
    return PureModel(init, apply, kind, takes_pipeline=_takes_pipeline(type(model).__call__))


def _boxed_as_it_lies(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return leaf
    spec = tuple(sharding.spec)
    return Partitioned(leaf, names=spec + (None,) * (leaf.ndim - len(spec)))

"""A model as two functions, whichever library it was written with."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll._sharding import leaf_name
from jaxcoll.parallel.batches import check_takes
from jaxcoll.parallel.one_library import check_one_library, checked_as_it_runs
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
    """Returns a linen module, an NNX module or what makes one, or a pair `(init, apply)`, as pure.

    Raises:
        TypeError: it is none of these, or a module of one library that holds one of the other.
        ValueError: a function that makes no new NNX module, or one of parameters with more or fewer
            dimensions than their metadata.
    """
    if isinstance(model, PureModel):
        return model
    if isinstance(model, nn.Module | nnx.Module):
        check_one_library(call, model)
        return _of_linen(call, model) if isinstance(model, nn.Module) else _of_nnx(model)
    if isinstance(model, tuple) and len(model) == 2 and all(map(callable, model)):
        init, apply = model
        check_takes(call, "model: init", init, "rng", "inputs")
        takes_pipeline = _takes_pipeline(apply)
        if not takes_pipeline:
            check_takes(call, "model: apply", apply, "params", "inputs")
        return PureModel(
            lambda rng, inputs: {"params": init(rng, inputs)},
            lambda variables, inputs, rng, **more: (
                apply(variables["params"], inputs, **more),
                {},
            ),
            takes_pipeline=takes_pipeline,
        )
    if callable(model):
        return _of_nnx_maker(call, model)
    raise TypeError(
        f"{call}: model: expected a Flax linen or NNX module, a function that makes an NNX module, "
        f"or a pair of functions (init, apply), got {type(model).__name__}."
    )


def _of_linen(call: str, model: nn.Module) -> PureModel:
    flags = _training_flags(type(model).__call__)

    def init(rng: jax.Array, inputs: Any) -> dict[str, Any]:
        with checked_as_it_runs(call, model):
            return dict(model.init(rng, inputs, **flags))

    def apply(variables: dict[str, Any], inputs: Any, rng: Any, **more: Any) -> tuple[Any, Any]:
        outputs, others = model.apply(
            variables,
            inputs,
            # Linen takes "params" for streams of other names.
            rngs={"dropout": rng, "params": jax.random.fold_in(rng, 1)},
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
    """The module's own values are the first ones, and lie as they do there."""
    graph, params, keys, others = _parts(model)
    params = jax.tree.map(lambda leaf: _boxed(leaf, _as_it_lies(leaf)), params)
    return _with_fresh_keys(type(model), graph, keys, lambda: (params, others))


def _of_nnx_maker(call: str, make: Callable[[], Any]) -> PureModel:
    """The first values are made where the state is, and lie as the parameters' metadata say."""
    shapes = nnx.eval_shape(lambda: _checked(call, make))
    graph, params, keys, others = _parts(shapes)
    treedef = jax.tree.structure((params, others))
    specs = nnx.get_partition_spec(params)
    _check_metadata(call, params, specs)

    def first() -> tuple[Any, Any]:
        _, params, _, others = _parts(_made(make))
        # Modules may keep what is another one each time they are made, such as a lambda.
        params, others = treedef.unflatten(jax.tree.leaves((params, others)))
        return jax.tree.map(_boxed, params, specs), others

    return _with_fresh_keys(type(shapes), graph, keys, first)


def _made(make: Callable[[], Any]) -> Any:
    # The state's place says where parameters lie, not a mesh around this call.
    with nnx.use_eager_sharding(False):
        return make()


def _checked(call: str, make: Callable[[], Any]) -> nnx.Module:
    """Returns the module that a function makes, under a trace."""
    name = getattr(make, "__name__", type(make).__name__)
    try:
        if isinstance(make, type):  # the signature of NNX classes is their metaclass's
            inspect.signature(make.__init__).bind(None)
        else:
            inspect.signature(make).bind()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{call}: model: expected a function without arguments that makes an NNX module, such "
            f"as lambda: Model(rngs=nnx.Rngs(0)), got {name} ({error})."
        ) from None
    module = _made(make)
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"{call}: model: expected a function that makes an NNX module, but {name} returned "
            f"{type(module).__name__}. Pass a linen module, or a pair of functions, itself."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(module, nnx.Param)):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            raise ValueError(
                f"{call}: model: {name} made no new module: its parameter {leaf_name(path)}, "
                f"{leaf.dtype}{list(leaf.shape)}, was there before. Make it in the function, or "
                "pass the module itself."
            )
    check_one_library(call, module)
    return module


def _check_metadata(call: str, params: Any, specs: Any) -> None:
    """Raises ValueError where a spec has another number of entries than there are dimensions.

    `nnx.vmap` puts a dimension before those that the layers' metadata are about.
    """
    for (path, leaf), spec in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(specs), strict=True
    ):
        if len(spec) not in (0, leaf.ndim):
            raise ValueError(
                f"{call}: model: params{leaf_name(path)} of shape {leaf.shape}: its out_sharding, "
                f"{spec}, must have an entry for each dimension, None for one that is whole. Where "
                "nnx.vmap stacks layers, pass it transform_metadata={nnx.PARTITION_NAME: None}."
            )


def _parts(module: nnx.Module) -> Any:
    return nnx.split(module, nnx.Param, nnx.RngKey, ...)


def _with_fresh_keys(
    kind: type, graph: Any, keys: Any, first: Callable[[], tuple[Any, Any]]
) -> PureModel:
    """Returns a module as pure, whose keys are replaced in each step by ones of step and rank.

    Args:
        kind: the module's class.
        graph: of the module.
        keys: of the module, or their shapes.
        first: returns parameters, and others, to begin with; a key is not needed.
    """
    key_leaves, key_tree = jax.tree.flatten(keys)

    def apply(variables: dict[str, Any], inputs: Any, rng: Any, **more: Any) -> tuple[Any, Any]:
        fresh = [jax.random.fold_in(rng, i) for i in range(len(key_leaves))]
        states = (variables["params"], key_tree.unflatten(fresh), variables["others"])
        module = nnx.merge(graph, *states, copy=True)
        outputs = module(inputs, **more)
        return outputs, {"others": _parts(module)[3]}

    def init(rng: jax.Array, inputs: Any) -> dict[str, Any]:
        del rng, inputs
        params, others = first()
        return {"params": params, "others": others}

    takes_pipeline = _takes_pipeline(kind.__call__)
    return PureModel(init, apply, f"NNX {kind.__name__}", takes_pipeline=takes_pipeline)


def _as_it_lies(leaf: Any) -> P:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return P()
    return sharding.spec


def _boxed(leaf: Any, spec: P) -> Any:
    names = tuple(spec) + (None,) * (leaf.ndim - len(spec))
    return Partitioned(leaf, names=names) if any(names) else leaf

"""The state of training: born on its mesh, in its parts."""

import dataclasses
import functools as ft
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat
from jaxcoll._sharding import auto, checked_sharding, fitted, leaf_name, untyped
from jaxcoll.mesh import check_mesh_axis
from jaxcoll.parallel.batches import inputs_of
from jaxcoll.parallel.elementwise import check_elementwise
from jaxcoll.parallel.first_values import as_operand, first_values
from jaxcoll.parallel.optimizer_state import initialized, specs_of_state
from jaxcoll.parallel.partitioned import is_partitioned
from jaxcoll.parallel.pipe import Pipe
from jaxcoll.parallel.pure_model import PureModel, as_pure
from jaxcoll.parallel.splits import Split, SplitDim, each
from jaxcoll.parallel.stacked import stacked_params
from jaxcoll.parallel.stages import Layers, Spread
from jaxcoll.parallel.synchronize import check_synchronizers, synchronizers
from jaxcoll.parallel.zero import Zero

OfDim = Callable[[jax.Array, Any], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes; a pytree.

    Attributes:
        step: how many steps were made, int32.
        params: the parameters, plain arrays of global shape; see `unpadded`.
        opt_state: the optimizer's state.
        rng: a random key; each step and rank folds in its number.
        variables: what the model keeps beside its parameters, such as batch statistics.
        optimizer: the Optax optimizer; no leaf.
        zero: how `jaxcoll.fully_shard` splits it, or None; no leaf.
        split: the dimension of each parameter that it splits, or None; no leaf.
        pipe: how `jaxcoll.pipelined` runs its layers, or None; no leaf.
        layers: of each parameter how its layers are spread there, or None; no leaf.
        axes: the mesh axes over which the model itself splits parameters; no leaf.
        kind: what the model is, for texts; no leaf.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array
    variables: dict[str, Any]
    optimizer: optax.GradientTransformation = dataclasses.field(metadata={"static": True})
    zero: Zero | None = dataclasses.field(default=None, metadata={"static": True})
    split: Split = dataclasses.field(default=(), metadata={"static": True})
    pipe: Pipe | None = dataclasses.field(default=None, metadata={"static": True})
    layers: Spread = dataclasses.field(default=(), metadata={"static": True})
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    kind: str = dataclasses.field(default="", metadata={"static": True})

    @property
    def specs(self) -> "TrainState":
        """How every leaf lies on its mesh, for `in_specs` and `out_specs`."""
        return jax.tree.map(_spec_of, self)

    def unpadded(self) -> "TrainState":
        """Returns the state with all parameters, and what belongs to them, as the model has them.

        Where `jaxcoll.fully_shard` splits a dimension that its ranks don't divide, what is stored
        has zeros at its end; and `jaxcoll.pipelined` stores layers by stages. Such parameters are
        made anew, one after the other, and split over the same ranks, of another dimension where
        these don't divide it any more; where they divide none, it is whole on every device. Others
        are the same arrays. Outside of `jax.shard_map`; in a job of several processes all of them
        call it.

        Example:
            >>> logits = model.apply({"params": state.unpadded().params}, inputs)
        """
        state = self
        is_padded = any(dim and dim.is_padded for dim in self.split)
        is_arranged = any(layers and not layers.is_as_stored for layers in self.layers)
        over = (self.zero if is_padded else None, self.pipe if is_arranged else None)
        for way in over:
            if way is not None and way.axis_name in _compat.bound_axes():
                raise ValueError(
                    f"TrainState.unpadded: inside a map over {way.axis_name!r} a rank has only "
                    "its part: call it outside of jax.shard_map."
                )
        if is_padded:
            split = tuple(None if dim and dim.is_padded else dim for dim in self.split)
            state = map_params(state, self.split, _unpadded, _unpadded)
            state = dataclasses.replace(state, split=split)
        if is_arranged:
            state = map_params(state, self.layers, _restored, _restored)
            state = dataclasses.replace(state, layers=(), pipe=None)
        return state


def map_params(
    state: TrainState, dims: Sequence[Any], of_params: OfDim, of_optimizer: OfDim
) -> TrainState:
    """Applies `(leaf, how) -> leaf` to parameters, and their moments, for which there is a how."""
    treedef = jax.tree.structure(state.params)

    def mapped(leaf: Any, dim: Any) -> Any:
        is_array = not isinstance(leaf, optax.MaskedNode)
        return of_optimizer(leaf, dim) if dim and is_array else leaf

    opt_state = optax.tree.map_params(
        state.optimizer,
        mapped,
        state.opt_state,
        treedef.unflatten(dim or False for dim in dims),
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    return dataclasses.replace(
        state, params=each(of_params, state.params, dims), opt_state=opt_state
    )


def _unpadded(leaf: jax.Array, dim: SplitDim) -> jax.Array:
    if not dim.is_padded or leaf.shape[dim.index : dim.index + 1] != (dim.stored,):
        return leaf
    return rearranged(leaf, SplitDim.unpadded, dim, dim.index)


def _restored(leaf: jax.Array, layers: Layers) -> jax.Array:
    if layers.is_as_stored or leaf.shape[:1] != (layers.stored,):
        return leaf
    return rearranged(leaf, Layers.restored, layers, 0)


def rearranged(
    leaf: jax.Array, change: Callable[..., jax.Array], how: Hashable, dim: int
) -> jax.Array:
    """Returns an array with a dimension changed, split over as many ranks if they can."""
    if isinstance(leaf, jax.core.Tracer):
        return change(how, leaf)
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        shape = jax.eval_shape(ft.partial(change, how), untyped(leaf)).shape
        # Nothing moves.
        mesh, kind = auto(sharding.mesh), sharding.memory_kind
        leaf = jax.device_put(leaf, NamedSharding(mesh, sharding.spec, memory_kind=kind))
        sharding = fitted(sharding, shape, dim)
    # One after the other: each may be whole on the devices meanwhile.
    return jax.block_until_ready(_rearrangement(change, how, sharding)(leaf))


@ft.lru_cache(maxsize=128)  # parameters of one shape, and their moments, share a program
def _rearrangement(
    change: Callable[..., jax.Array], how: Hashable, sharding: Sharding
) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda leaf: change(how, leaf), out_shardings=sharding)


def _spec_of(leaf: Any) -> P:
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else P()


def create_train_state(
    model: Any,
    optimizer: optax.GradientTransformation,
    rng: jax.Array,
    batch: Any,
    mesh: Mesh | None = None,
) -> TrainState:
    """Returns the state that training begins with.

    Args:
        model: a Flax linen or NNX module, a function that makes an NNX module, a pair
            `(init, apply)`, or what `jaxcoll.fully_shard` returned. The parameters of an NNX module
            are whole before; those of a function, such as `lambda: Model(rngs=nnx.Rngs(0))`, are
            made in their parts, which its own `out_sharding` says beside the rest. What was there
            before, such as pretrained parameters that `init` returns, may lie on any devices of
            this process, or on those of the mesh.
        optimizer: of Optax.
        rng: a key of `jax.random.key`; makes the first parameters, but those of NNX modules, whose
            own `Rngs` do; and stays for dropout.
        batch: an example; only the shapes and dtypes of its inputs matter.
        mesh: where. Each parameter is made in its parts, as the model's `flax.linen.Partitioned`
            say; the optimizer's state lies as its parameter does. Without a mesh, everything is on
            one device.

    Raises:
        TypeError: a model of another kind, an `rng` that is no key, or inputs that are no arrays.
        ValueError: a parameter is split over an axis that the mesh lacks, or can't be split; a
            model of `fully_shard` without a mesh; parameters that are split, and an optimizer that
            is not element by element; a function that returns a module that was there before, or
            one of parameters with more or fewer dimensions than their `out_sharding`.
    """
    call = "create_train_state"
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(mesh, Mesh | None):
        raise TypeError(f"{call}: mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}.")
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"{call}: optimizer: expected one of Optax, such as optax.adamw(1e-3), got "
            f"{type(optimizer).__name__}."
        )
    pure = as_pure(call, model)
    inputs = _zeros_like(call, inputs_of(call, batch))
    init_rng, rng = _two_keys(call, rng)
    program = first_values(lambda: pure.init(init_rng, inputs))

    def make(
        split: Split, layers: Spread, axes: tuple[str, ...], given: list[Any], rng: jax.Array
    ) -> TrainState:
        variables = _without_boxes(program.made(given))
        params = variables.pop("params")
        if pure.pipe and mesh:
            params = each(ft.partial(_arranged, mesh, pure.pipe.axis_name), params, layers)
        stored = each(lambda leaf, dim: dim.padded(leaf), params, split) if split else params
        opt_state = initialized(call, optimizer, stored)
        params = stored if pure.zero and pure.zero.stage == 3 else params
        step = jnp.int32(0)
        static = (optimizer, pure.zero, split, pure.pipe, layers, axes, pure.kind)
        return TrainState(step, params, opt_state, rng, variables, *static)

    given = [as_operand(call, array, mesh) for array in program.given]
    operands = (given, as_operand(call, rng, mesh))
    if mesh is None:
        if pure.zero is not None:
            raise ValueError(f"{call}: mesh: fully_shard needs one, to split the state over.")
        if pure.pipe is not None:
            raise ValueError(f"{call}: mesh: pipelined needs one, to spread the layers over.")
        return jax.jit(make, static_argnums=(0, 1, 2))((), (), (), *operands)

    def shape(split: Split, layers: Spread, axes: tuple[str, ...]) -> TrainState:
        return jax.eval_shape(lambda: make(split, layers, axes, *operands))

    specs = _specs(call, shape, program.shapes, optimizer, mesh, pure, inputs)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    made = jax.jit(make, static_argnums=(0, 1, 2), out_shardings=shardings)
    return made(specs.split, specs.layers, specs.axes, *operands)


def _zeros_like(call: str, inputs: Any) -> Any:
    def zeros(path: Any, leaf: Any) -> jax.Array:
        try:
            return jnp.zeros_like(leaf)
        except TypeError:
            raise TypeError(
                f"{call}: batch: its inputs{jax.tree_util.keystr(path)}: expected an array of "
                f"numbers, got {leaf!r:.80}."
            ) from None

    return jax.tree_util.tree_map_with_path(zeros, inputs)


def _two_keys(call: str, rng: Any) -> tuple[jax.Array, jax.Array]:
    try:
        first, second = jax.random.split(rng)
    except (TypeError, ValueError):
        got = f"{rng.dtype}{list(rng.shape)}" if hasattr(rng, "dtype") else f"{rng!r:.80}"
        raise TypeError(
            f"{call}: rng: expected one key, such as jax.random.key(0), got {got}."
        ) from None
    return first, second


def _arranged(mesh: Mesh, axis: str, leaf: jax.Array, layers: Layers) -> jax.Array:
    """Returns layers as they are stored.

    Until they are, they lie in parts along another dimension, if one can be divided: to put them in
    order, each device would make all of them.
    """
    dims = [i for i in range(1, leaf.ndim) if leaf.shape[i] % mesh.shape[axis] == 0]
    if dims and not layers.is_as_stored:
        spec = [axis if i == dims[0] else P.UNCONSTRAINED for i in range(leaf.ndim)]
        leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(auto(mesh), P(*spec)))
    return layers.arranged(leaf)


def _specs(
    call: str,
    shape: Callable[[Split, Spread, tuple[str, ...]], TrainState],
    boxed: dict[str, Any],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    pure: PureModel,
    inputs: Any,
) -> TrainState:
    """Returns every leaf's spec."""
    variables = _without_boxes(boxed)
    params = variables["params"]
    param_specs = nn.get_partition_spec(boxed["params"])
    layers: Spread = ()
    if pure.pipe is not None:
        check_mesh_axis("pipelined", "axis_name", mesh, pure.pipe.axis_name)
        # `spread` maps the model by its specs, and sees itself to the dimension that counts layers.
        _check_specs(call, params, _without_leading(param_specs, pure.pipe.axis_name), mesh)
        layers = pure.pipe.spread("pipelined", pure, variables, param_specs, inputs, mesh)
        pipe = pure.pipe
        param_specs = each(lambda spec, _: pipe.spec(spec), param_specs, layers)
        params = jax.eval_shape(
            lambda tree: each(lambda x, how: how.arranged(x), tree, layers), params
        )
    _check_specs(call, params, param_specs, mesh)
    opt_specs = param_specs
    axes = tuple(sorted({axis for spec in jax.tree.leaves(param_specs) for axis in _axes_of(spec)}))
    split, zero = (), pure.zero
    if zero is not None:
        check_mesh_axis("fully_shard", "axis_name", mesh, zero.axis_name)
        _check_not_taken(call, params, param_specs, zero.axis_name)
        leaves, treedef = jax.tree.flatten(params)
        whole = treedef.flatten_up_to(param_specs)
        stacked = frozenset()
        if zero.stage > 1 and pure.pipe is None:
            stacked = stacked_params(pure, variables, param_specs, inputs, mesh)
        split = zero.split(leaves, whole, mesh.shape[zero.axis_name], stacked)
        parts = map(zero.spec, whole, (leaf.ndim for leaf in leaves), split)
        opt_specs = treedef.unflatten(parts)
        param_specs = opt_specs if zero.stage == 3 else param_specs
        params = jax.eval_shape(
            lambda tree: each(lambda x, dim: dim.padded(x), tree, split), params
        )
    state = shape(split, layers, axes)
    parts = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            NamedSharding(mesh, spec).shard_shape(leaf.shape), leaf.dtype
        ),
        params,
        opt_specs,
    )
    if jax.tree.map(jnp.shape, parts) != jax.tree.map(jnp.shape, params):
        check_elementwise(call, optimizer, params, parts, opt_specs)
    check_synchronizers(call, state.opt_state, mesh, bool(axes))
    if zero is not None and synchronizers(state.opt_state):
        raise ValueError(
            f"{call}: optimizer: jaxcoll.optax.synchronize averages whole gradients, but the model "
            "of fully_shard has them summed in parts: leave one of the two out."
        )

    of_optimizer = specs_of_state(call, optimizer, state.opt_state, params, opt_specs)
    everywhere = jax.tree.map(lambda _: P(), state)
    return dataclasses.replace(everywhere, params=param_specs, opt_state=of_optimizer)


def _without_leading(specs: Any, axis_name: str) -> Any:
    """Returns specs that split no first dimension over the axis."""

    def without(spec: P) -> P:
        return P(None, *spec[1:]) if len(spec) and spec[0] == axis_name else spec

    return jax.tree.map(without, specs)


def _axes_of(spec: P) -> list[str]:
    return jax.tree.leaves(tuple(spec))


def _check_specs(call: str, params: Any, specs: Any, mesh: Mesh) -> None:
    def check(path: Any, leaf: Any, spec: P) -> None:
        name = f"params{leaf_name(path)}"
        for axis in _axes_of(spec):
            check_mesh_axis(f"{call}: {name} of shape {leaf.shape}", "names", mesh, axis)
        remedy = (
            "choose the model's sizes or the mesh so, or don't split it (PPClassifier: split=False)"
        )
        checked_sharding(call, name, leaf.shape, mesh, spec, remedy)

    jax.tree_util.tree_map_with_path(check, params, specs)


def _check_not_taken(call: str, params: Any, specs: Any, axis_name: str) -> None:
    def check(path: Any, leaf: Any, spec: P) -> None:
        if axis_name in _axes_of(spec):
            raise ValueError(
                f"{call}: params{leaf_name(path)} of shape {leaf.shape}: the model splits it over "
                f'"{axis_name}" itself, {spec}, as fully_shard would: leave that out of the model, '
                "or give fully_shard another axis of the mesh."
            )

    jax.tree_util.tree_map_with_path(check, params, specs)


def _without_boxes(tree: Any) -> dict[str, Any]:
    def value(leaf: Any) -> Any:
        return leaf.value if is_partitioned(leaf) else leaf

    return dict(jax.tree.map(value, tree, is_leaf=is_partitioned))

"""The state of training: born on its mesh, in its parts."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll._sharding import check_divisible, leaf_name
from jaxcoll.mesh import check_mesh_axis
from jaxcoll.parallel.batches import inputs_of
from jaxcoll.parallel.partitioned import is_partitioned
from jaxcoll.parallel.pure_model import as_pure
from jaxcoll.parallel.zero import Split, Zero, check_elementwise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes; a pytree.

    Attributes:
        step: how many steps were made, int32.
        params: the parameters, plain arrays of global shape.
        opt_state: the optimizer's state.
        rng: a random key; each step and rank folds in its number.
        variables: what the model keeps beside its parameters, such as batch statistics.
        optimizer: the Optax optimizer; no leaf.
        zero: how `jaxcoll.fully_shard` splits it, or None; no leaf.
        split: the dimension of each parameter that it splits, or None; no leaf.
        axes: the mesh axes over which the model itself splits parameters; no leaf.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array
    variables: dict[str, Any]
    optimizer: optax.GradientTransformation = dataclasses.field(metadata={"static": True})
    zero: Zero | None = dataclasses.field(default=None, metadata={"static": True})
    split: Split = dataclasses.field(default=(), metadata={"static": True})
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def specs(self) -> "TrainState":
        """How every leaf lies on its mesh, for `in_specs` and `out_specs`."""
        return jax.tree.map(_spec_of, self)


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
        model: a Flax linen or NNX module, a pair `(init, apply)`, or what `jaxcoll.fully_shard`
            returned.
        optimizer: of Optax.
        rng: a key of `jax.random.key`; makes the first parameters, and stays for dropout.
        batch: an example; only the shapes and dtypes of its inputs matter.
        mesh: where. Each parameter is made in its parts, as the model's `flax.linen.Partitioned`
            say; the optimizer's state lies as its parameter does. Without a mesh, everything is on
            one device.

    Raises:
        TypeError: a model of another kind.
        ValueError: a parameter is split over an axis that the mesh lacks, or can't be split; a
            model of `fully_shard` without a mesh; parameters that are split, and an optimizer that
            is not element by element.
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
    inputs = jax.tree.map(jnp.zeros_like, inputs_of(call, batch))
    init_rng, rng = jax.random.split(rng)

    def make(split: Split, axes: tuple[str, ...]) -> TrainState:
        variables = _without_boxes(pure.init(init_rng, inputs))
        params = variables.pop("params")
        opt_state = optimizer.init(params)
        step = jnp.int32(0)
        static = (optimizer, pure.zero, split, axes)
        return TrainState(step, params, opt_state, rng, variables, *static)

    if mesh is None:
        if pure.zero is not None:
            raise ValueError(f"{call}: mesh: fully_shard needs one, to split the state over.")
        return jax.jit(make, static_argnums=(0, 1))((), ())
    boxed = jax.eval_shape(lambda: pure.init(init_rng, inputs))["params"]
    specs = _specs(call, make, boxed, optimizer, mesh, pure.zero)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(make, static_argnums=(0, 1), out_shardings=shardings)(specs.split, specs.axes)


def _specs(
    call: str,
    make: Any,
    boxed: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    zero: Zero | None,
) -> TrainState:
    """Returns every leaf's spec."""
    params = jax.tree.map(
        lambda leaf: leaf.value if is_partitioned(leaf) else leaf, boxed, is_leaf=is_partitioned
    )
    param_specs = opt_specs = nn.get_partition_spec(boxed)
    axes = tuple(sorted({axis for spec in jax.tree.leaves(param_specs) for axis in _axes_of(spec)}))
    split: Split = ()
    if zero is not None:
        check_mesh_axis("fully_shard", "axis_name", mesh, zero.axis_name)
        leaves, treedef = jax.tree.flatten(params)
        whole = treedef.flatten_up_to(param_specs)
        split = zero.split(leaves, whole, mesh.shape[zero.axis_name])
        parts = [
            zero.spec(spec, leaf.ndim, dim)
            for spec, leaf, dim in zip(whole, leaves, split, strict=True)
        ]
        opt_specs = treedef.unflatten(parts)
        param_specs = opt_specs if zero.stage == 3 else param_specs
    _check_specs(call, params, opt_specs, mesh)
    parts = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            NamedSharding(mesh, spec).shard_shape(leaf.shape), leaf.dtype
        ),
        params,
        opt_specs,
    )
    if jax.tree.map(jnp.shape, parts) != jax.tree.map(jnp.shape, params):
        check_elementwise(call, optimizer, params, parts)
    state = jax.eval_shape(lambda: make(split, axes))

    def spec_like(leaf: Any, spec: P, param: Any) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        return spec if leaf.shape == param.shape else P()

    of_optimizer = optax.tree.map_params(
        optimizer,
        spec_like,
        state.opt_state,
        opt_specs,
        params,
        transform_non_params=lambda _: P(),
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    everywhere = jax.tree.map(lambda _: P(), state)
    return dataclasses.replace(everywhere, params=param_specs, opt_state=of_optimizer)


def _axes_of(spec: P) -> list[str]:
    return jax.tree.leaves(tuple(spec))


def _check_specs(call: str, params: Any, specs: Any, mesh: Mesh) -> None:
    def check(path: Any, leaf: Any, spec: P) -> None:
        name = f"params{leaf_name(path)}"
        for axis in _axes_of(spec):
            check_mesh_axis(f"{call}: {name}", "names", mesh, axis)
        sharding = NamedSharding(mesh, spec)
        remedy = (
            "choose the model's sizes or the mesh so, or don't split it (PPClassifier: split=False)"
        )
        check_divisible(call, name, leaf.shape, sharding, remedy)

    jax.tree_util.tree_map_with_path(check, params, specs)


def _without_boxes(tree: Any) -> dict[str, Any]:
    def value(leaf: Any) -> Any:
        return leaf.value if is_partitioned(leaf) else leaf

    return dict(jax.tree.map(value, tree, is_leaf=is_partitioned))

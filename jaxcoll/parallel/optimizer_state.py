"""The state of an optimizer: how it begins, and how it lies beside the parameters."""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from jaxcoll._sharding import leaf_name
from jaxcoll.parallel.synchronize import SynchronizeState


def initialized(call: str, optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Returns the state that an optimizer begins with.

    Raises:
        ValueError: it makes none of these parameters, whose structure its mask may not have.
    """
    try:
        return optimizer.init(params)
    except (TypeError, ValueError) as error:
        names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        shown = ", ".join(f"params{name}" for name in names[:4]) + ", ..." * (len(names) > 4)
        raise ValueError(
            f"{call}: optimizer: its init refuses the model's parameters, {shown or 'none'}: "
            f"{str(error).removesuffix('.')}. Masks and labels, as of optax.masked and "
            "optax.partition, must have the structure of the parameters, or of their top, or be "
            "functions that make it of them."
        ) from error


def updated(
    call: str, optimizer: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    """Returns the updates of parameters, and the optimizer's state after that.

    Raises:
        TypeError: its update needs to be told more than that, such as the loss.
    """
    try:
        return optimizer.update(grads, opt_state, params)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise TypeError(
            f"{call}: optimizer: a training step gives it gradients, its state and parameters, but "
            f"its update needs more: {error}. Use one that does not, or, for "
            "optax.contrib.reduce_on_plateau, optax.inject_hyperparams and a learning rate that "
            "your loop sets in state.opt_state."
        ) from error


def specs_of_state(
    call: str, optimizer: optax.GradientTransformation, opt_state: Any, params: Any, specs: Any
) -> Any:
    """Returns the spec of each array of an optimizer's state.

    Args:
        call: the public function's name, for texts.
        optimizer: which.
        opt_state: shapes and dtypes of its state.
        params: those of the parameters, as they are stored.
        specs: of the parameters; what has the shape of one lies as it does.

    Raises:
        ValueError: parameters are split, and Optax can't tell what of the state belongs to which.
    """
    if any(axis is not None for spec in jax.tree.leaves(specs) for axis in spec):
        lying = _beside_params(call, optimizer, opt_state, params, specs)
    else:
        lying = jax.tree.map(lambda _: P(), opt_state)
    return jax.tree.map(
        lambda node: dataclasses.replace(node, error=P(node.axes)) if _is_synced(node) else node,
        lying,
        is_leaf=lambda node: _is_synced(node) or isinstance(node, P),
    )


def _is_synced(node: Any) -> bool:
    return isinstance(node, SynchronizeState)


def _beside_params(
    call: str, optimizer: optax.GradientTransformation, opt_state: Any, params: Any, specs: Any
) -> Any:
    def spec_like(leaf: Any, spec: P, param: Any) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        return spec if leaf.shape == param.shape else P()

    try:
        return optax.tree.map_params(
            optimizer,
            spec_like,
            opt_state,
            specs,
            params,
            transform_non_params=lambda _: P(),
            is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{call}: optimizer: parameters are split, and its state does not tell what belongs to "
            f"which of them: its init computes with them, as that of optax.flatten does ({error}). "
            "Leave that out, or give it to a model whose parameters are not split."
        ) from error

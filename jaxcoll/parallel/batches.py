"""What a step reads in a batch: its inputs, its labels, and losses with their weights."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcoll._sharding import leaf_name

LossFn = Callable[[Any, Any], Any]


def check_loss_fn(call: str, loss_fn: LossFn | None) -> None:
    """Raises TypeError where a loss function can't be called with outputs and a batch."""
    if loss_fn is not None:
        check_takes(call, "loss_fn", loss_fn, "outputs", "batch")


def check_takes(call: str, argument: str, function: Any, *names: str) -> None:
    """Raises TypeError where an argument can't be called with so many others."""
    wanted = f"expected a function ({', '.join(names)})"
    if not callable(function):
        raise TypeError(f"{call}: {argument}: {wanted}, got {function!r:.80}.")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some that are not written in Python
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise TypeError(f"{call}: {argument}: {wanted}, got one of {signature}: {error}.") from None


def check_examples(call: str, batch: Any) -> None:
    """Raises ValueError where a batch has no values, of which a loss would be NaN."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not any(np.size(leaf) for _, leaf in leaves):
        given = (f"batch{jax.tree_util.keystr(path)} {[*np.shape(leaf)]}" for path, leaf in leaves)
        raise ValueError(
            f"{call}: batch: expected examples, got {', '.join(given) or 'no arrays'}. Leave empty "
            "batches out."
        )


def inputs_of(call: str, batch: Any) -> Any:
    """Returns a batch's inputs; see `_part`."""
    return _part(call, batch, 0, ("inputs",))


def labels_of(call: str, batch: Any) -> Any:
    """Returns a batch's labels; see `_part`."""
    return _part(call, batch, 1, ("labels", "targets"))


def _part(call: str, batch: Any, position: int, names: Sequence[str]) -> Any:
    if isinstance(batch, Mapping):
        for name in names:
            if name in batch:
                return batch[name]
    for name in names:
        if hasattr(batch, name):
            return getattr(batch, name)
    if isinstance(batch, tuple | list) and len(batch) > position:
        return batch[position]
    raise TypeError(
        f"{call}: batch: expected (inputs, labels), a dict with {' or '.join(map(repr, names))}, "
        f"or an object with such an attribute, got "
        f"{list(batch) if isinstance(batch, Mapping) else type(batch).__name__}."
    )


def micro_batches(call: str, argument: str, batch: Any, count: int, name: str = "batch") -> Any:
    """Returns a batch `(examples, ...)` as `(count, examples / count, ...)`.

    Args:
        call: the public function, for texts.
        argument: that says how many, for texts.
        batch: a tree of arrays.
        count: of micro-batches.
        name: of the batch, for texts.

    Raises:
        ValueError: the number does not divide a leaf's examples, or a leaf has none.
    """

    def split(path: Any, leaf: Any) -> Any:
        shape, where = np.shape(leaf), f"{name}{jax.tree_util.keystr(path)}"
        if not shape:
            raise ValueError(
                f"{call}: {argument}: {where} is a scalar, which can't be split into {count} "
                "micro-batches. Repeat it for each example."
            )
        if shape[0] % count:
            raise ValueError(
                f"{call}: {argument}: {shape[0]} examples on each device can't be split into "
                f"{count} micro-batches ({where} of shape {shape}). Use a number that divides them."
            )
        return leaf.reshape(count, shape[0] // count, *shape[1:])

    return jax.tree_util.tree_map_with_path(split, batch)


def cross_entropy(outputs: jax.Array, batch: Any) -> dict[str, Any]:
    """The loss without `loss_fn`: of logits `(..., classes)` and integer labels `(...)`.

    Returns:
        `loss` and `accuracy`, each a sum with its weight, the number of labels.
    """
    labels = labels_of("train_step", batch)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"train_step: batch: expected integer labels, got {labels.dtype}{labels.shape}. For "
            "others, such as one-hot vectors, pass loss_fn=."
        )
    if labels.shape != outputs.shape[:-1]:
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        given = (f"batch{leaf_name(path)} {list(leaf.shape)}" for path, leaf in leaves)
        raise ValueError(
            f"train_step: batch: expected labels of shape {outputs.shape[:-1]}, for outputs "
            f"{outputs.shape}, got {labels.shape}. A device has {', '.join(given)}: give all of a "
            "batch as many examples, or pass loss_fn=."
        )
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
    hits = jnp.argmax(outputs, axis=-1) == labels
    return {"loss": (losses.sum(), labels.size), "accuracy": (hits.sum(), labels.size)}


def sums(call: str, value: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns each metric as a sum with its weight, in float32 or float64.

    Raises:
        TypeError: a loss function returned something else; the text has what.
        ValueError: its dict has no `"loss"`.
    """
    metrics = value if isinstance(value, Mapping) else {"loss": value}
    if "loss" not in metrics:
        raise ValueError(f"{call}: loss_fn: expected a 'loss' in its dict, got {list(metrics)}.")

    kinds: Any = (Number, np.ndarray, np.generic, jax.Array)

    def number(name: str, value: Any, *, is_sum: bool) -> jax.Array:
        if not isinstance(value, kinds) or np.ndim(value):
            got = f"an array of shape {value.shape}" if hasattr(value, "shape") else repr(value)
            got = (
                f"a {type(value).__name__} of {len(value)}"
                if isinstance(value, tuple | list)
                else got
            )
            raise TypeError(
                f"{call}: loss_fn: {name}: expected a scalar, or a pair (sum, weight) of scalars, "
                f"got {got}. Further metrics go into a dict beside 'loss'."
            )
        value = jnp.asarray(value)
        if name == "loss" and is_sum and not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"{call}: loss_fn: loss: expected a float, got {value.dtype}.")
        return value.astype(jnp.promote_types(value.dtype, jnp.float32))

    def pair(name: str, value: Any) -> tuple[jax.Array, jax.Array]:
        if isinstance(value, tuple) and len(value) == 2:
            return number(name, value[0], is_sum=True), number(name, value[1], is_sum=False)
        return number(name, value, is_sum=True), number(name, 1.0, is_sum=False)

    return {name: pair(name, value) for name, value in metrics.items()}

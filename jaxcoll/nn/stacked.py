"""Equal layers of a linen model, their parameters stacked: what a pipeline takes."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from jaxcoll.parallel.partitioned import is_partitioned


def stacked_layers(
    module: nn.Module, name: str, block: nn.Module, num_layers: int, x: Any, **options: Any
) -> tuple[Callable[..., Any], Any]:
    """Returns a layer and the parameters of all of them, for `pipeline(layer, stacked, x)`.

    Args:
        module: whose `__call__` this stands in, under `nn.compact`, or whose `setup`; the
            parameters are its own, under `name`.
        name: of the parameters.
        block: one layer, a module that maps x to its like; made with `parent=None`. It has
            parameters alone, and each layer's are initialized with a key of its own.
        num_layers: how many, 1 or more.
        x: an example of what goes through the layers, a tree of arrays.
        **options: for the block, as `deterministic=True`.

    Returns:
        `layer(params, x, key=None)`, the key for `"dropout"`; and parameters `(num_layers, ...)`
        each. Where the block's say how they are split, so do these.

    Raises:
        ValueError: no layers, a block without parameters or with more than them, or a method of
            the module where Flax allows no parameters.

    Example:
        >>> layer, stacked = jaxcoll.stacked_layers(self, "blocks", Block(parent=None), 8, x)
        >>> x = pipeline(layer, stacked, x)
    """
    if num_layers < 1:
        raise ValueError(f"stacked_layers: num_layers: expected at least 1, got {num_layers}.")

    def init(key: jax.Array) -> Any:
        # A loop, so that a block is traced once.
        made = jax.lax.map(
            lambda key: block.init({"params": key}, x, **options),
            jax.random.split(key, num_layers),
        )
        if [*made] != ["params"]:
            raise ValueError(
                f"stacked_layers: block: expected one with parameters alone, got {type(block)} "
                f"with {', '.join(made) or 'nothing'}."
            )
        stacked = made["params"]
        return jax.tree.map(_with_layers, stacked, is_leaf=is_partitioned)

    def layer(params: Any, x: Any, key: jax.Array | None = None) -> Any:
        rngs = {} if key is None else {"dropout": key}
        return block.apply({"params": params}, x, rngs=rngs, **options)

    # What is there is not compared with what would be made, which would trace every layer.
    if module.has_variable("params", name):
        return layer, nn.unbox(module.get_variable("params", name))
    try:
        return layer, module.param(name, init)
    except ValueError as error:
        if "@compact" not in str(error):
            raise
        raise ValueError(
            f"stacked_layers: module: {type(module).__name__} makes parameters in a method where "
            "Flax allows none. Put @nn.compact on the method, or call stacked_layers in setup, "
            "with an example of x."
        ) from None


def _with_layers(leaf: Any) -> Any:
    """Names the first dimension of a parameter that says how it is split."""
    return leaf.replace(names=(None, *leaf.names)) if is_partitioned(leaf) else leaf

"""Mixed precision: in which dtypes parameters are computed with, and gradients travel."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a model of `jaxcoll.fully_shard` computes. Its state keeps its own dtypes.

    Complex and integer values keep theirs.

    Attributes:
        param_dtype: parameters are gathered, and computed with, in this dtype; their own without.
        reduce_dtype: gradients travel in this dtype, and are added in it or in float32, whichever
            is wider. Without: float32 at least; what stage 3 gathers, in its own dtype, added in
            float32. Not float16, whose range is too small for sums.
        output_dtype: what the model returns is cast to this dtype.
        cast_forward_inputs: the inputs are cast to `param_dtype`.

    Source: `MixedPrecisionPolicy` of PyTorch's FSDP2.

    Example:
        >>> policy = jaxcoll.MixedPrecisionPolicy(jnp.bfloat16, reduce_dtype=jnp.float32)
        >>> model = jaxcoll.fully_shard(model, mp_policy=policy)
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is None:
                continue
            where = f"MixedPrecisionPolicy: {name}"
            try:
                dtype = jnp.dtype(value)
            except TypeError:
                raise TypeError(f"{where}: expected a dtype, got {value!r}.") from None
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"{where}: expected a floating-point dtype, got {dtype}.")
            if name == "reduce_dtype" and dtype == np.float16:
                raise ValueError(
                    f"{where}: float16 can't hold sums of gradients: use bfloat16 or float32."
                )
            object.__setattr__(self, name, dtype)

    def of_params(self, tree: Any) -> Any:
        """Returns parameters as they are computed with."""
        return _cast(tree, self.param_dtype)

    def of_inputs(self, tree: Any) -> Any:
        """Returns inputs as they are given to the model."""
        return _cast(tree, self.param_dtype) if self.cast_forward_inputs else tree

    def of_outputs(self, tree: Any) -> Any:
        """Returns outputs as the loss has them."""
        return _cast(tree, self.output_dtype)

    def of_gradients(self, tree: Any) -> Any:
        """Returns gradients as they travel."""
        return _cast(tree, self.reduce_dtype)


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(leaf: Any) -> Any:
        is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return jnp.asarray(leaf, dtype) if is_float else leaf

    return tree if dtype is None else jax.tree.map(cast, tree)

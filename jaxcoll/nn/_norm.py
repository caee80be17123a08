"""What the norms for linen and NNX share."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcoll._errors import one_of
from jaxcoll.nn._place import Place
from jaxcoll.parallel.tensor import norm


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm over the ranks of an axis; see `jaxcoll.TPRMSNorm`."""

    call: str
    axis_name: str | None
    split: Literal["sequence", "features"]
    subtracts_mean: bool
    epsilon: float

    def __post_init__(self) -> None:
        """Checks the split."""
        if self.split not in ("sequence", "features"):
            raise ValueError(one_of(self.call, "split", self.split, ("sequence", "features")))

    @property
    def spec(self) -> P:
        """How scale and bias `(d,)` lie."""
        return P(self.axis_name) if self.split == "features" and self.axis_name else P()

    def num_features(self, x: jax.Array) -> int:
        """Returns the input's features, of all ranks."""
        place = Place(self.call, self.axis_name, None)
        return place.whole(x.shape[-1]) if self.split == "features" else x.shape[-1]

    def __call__(
        self, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, dtype: Any
    ) -> jax.Array:
        """Returns the normalized input. On global arrays the compiler splits it as they are."""
        y = norm(
            jnp.asarray(x),
            scale,
            bias,
            Place(self.call, self.axis_name, None).local_axis,
            split=self.split,
            subtracts_mean=self.subtracts_mean,
            epsilon=self.epsilon,
        )
        return y if dtype is None else y.astype(dtype)

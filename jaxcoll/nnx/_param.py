"""Parameters of NNX layers: made whole, held in parts."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll.nn._place import Place
from jaxcoll.parallel.partitioned import local_part


def split_param(
    place: Place, init: Callable[..., jax.Array], rngs: nnx.Rngs, spec: P, *arguments: Any
) -> nnx.Param:
    """Returns a parameter that lies on the layer's mesh by its spec, and says so.

    Inside a map over the axis it is this rank's part. With neither, it is whole, and lies where JAX
    puts it.

    Args:
        place: of the layer.
        init: of the whole parameter.
        rngs: its `params` stream is drawn from.
        spec: how it is split.
        *arguments: shape and dtype.
    """
    value = init(rngs.params(), *arguments)
    if place.is_mapped:
        value = local_part(value, tuple(spec))
    elif place.mesh is not None:
        sharding = NamedSharding(place.mesh, spec)
        # Layers may be made under nnx.vmap, which gives a constraint its dimension, too.
        is_traced = isinstance(value, jax.core.Tracer)
        place_on = lax.with_sharding_constraint if is_traced else jax.device_put
        value = place_on(value, sharding)
    return nnx.Param(value, out_sharding=tuple(spec), eager_sharding=False)

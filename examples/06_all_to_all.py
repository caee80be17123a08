"""`all_to_all`: attention over a sequence in four pieces, by trading the sequence for heads."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcoll

jaxcoll.simulate_cpu_devices(4)  # before anything else uses JAX
LENGTH, HEADS, WIDTH = 64, 8, 16
mesh = jax.make_mesh((4,), ("sequence",), axis_types=(AxisType.Auto,))


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of whole sequences: (length, heads, width) each."""
    scores = jnp.einsum("qhd,khd->hqk", q, k) / WIDTH**0.5
    scores = jnp.where(jnp.tri(q.shape[0], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)


def sequence_parallel_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same for a quarter of the sequence: (length / 4, heads, width) each."""

    def to_heads(x: jax.Array) -> jax.Array:  # (length, heads / 4, width)
        return jaxcoll.all_to_all(x, "sequence", split_axis=1, concat_axis=0, tiled=True)

    def to_sequence(x: jax.Array) -> jax.Array:  # and back
        return jaxcoll.all_to_all(x, "sequence", split_axis=0, concat_axis=1, tiled=True)

    return to_sequence(attention(*map(to_heads, (q, k, v))))


split = jax.shard_map(
    sequence_parallel_attention, mesh=mesh, in_specs=P("sequence"), out_specs=P("sequence")
)
qkv = jax.random.normal(jax.random.key(0), (3, LENGTH, HEADS, WIDTH))


def loss(f: Callable[..., jax.Array], qkv: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(f(*qkv)))


for what, transform in (("values", lambda f: f), ("gradients", jax.grad)):
    got, expected = (
        jax.jit(transform(lambda qkv, f=f: loss(f, qkv)))(qkv) for f in (split, attention)
    )
    print(f"{what} equal those of one device:", bool(jnp.allclose(got, expected, atol=1e-4)))
print(jaxcoll.explain(split, *qkv))

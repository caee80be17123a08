"""Numbers in fewer bits: 8-bit integers with a scale for each block."""

import jax
import jax.numpy as jnp

# Of values that share a scale: 1.6 % of 8 bits each are scales.
BLOCK = 256
_LARGEST = 127


def quantized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns int8 values and float32 scales, one for each `BLOCK` values.

    Args:
        x: float32, of shape `(n * BLOCK,)`.

    Returns:
        `(n * BLOCK,)` and `(n,)`; of a block with a value that is not finite, the scale is NaN.
    """
    blocks = x.reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1) / _LARGEST
    scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
    steps = jnp.round(blocks / jnp.where(scales == 0, 1, scales)[:, None])
    return jnp.nan_to_num(steps).astype(jnp.int8).ravel(), scales


def dequantized(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns what `quantized` stands for, to within half a step: a scale."""
    return (values.reshape(-1, BLOCK).astype(jnp.float32) * scales[:, None]).ravel()

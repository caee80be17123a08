"""Sample bytes from a language model, one at a time."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PROMPT = b"\ndef "
_TEMPERATURE = 0.7  # below 1 prefers the likelier bytes


@ft.partial(jax.jit, static_argnames="apply")
def _continue(
    apply: Callable[..., jax.Array],
    params: Any,
    window: jax.Array,
    length: jax.Array,
    keys: jax.Array,
) -> jax.Array:
    context = window.shape[0]

    def append_one(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> Any:
        window, length = carry  # (T,), of which `length` bytes are text
        logits = apply(params, window[None])[0, length - 1]  # (V,)
        byte = jax.random.categorical(key, logits / _TEMPERATURE)
        window = jnp.where(length == context, jnp.roll(window, -1), window)  # full: drop the oldest
        length = jnp.minimum(length + 1, context)
        return (window.at[length - 1].set(byte), length), byte

    # The whole window is computed anew for every byte; a cache would be quicker, and more code.
    return jax.lax.scan(append_one, (window, length), keys)[1]


def generate(model: Any, params: Any, context: int, num_bytes: int, *, seed: int = 0) -> str:
    """Write text as the model would, after `PROMPT`.

    Args:
        model: `model.apply(params, tokens)` maps `(B, T)` token ids to `(B, T, 256)` logits.
        params: Of the model, on any devices.
        context: Bytes that the model sees at once.
        num_bytes: Bytes to write.
        seed: Of the sampling.

    Returns:
        The prompt and what follows it.
    """
    if not num_bytes:
        return ""
    prompt = np.frombuffer(PROMPT[-context:], np.uint8)
    window = np.zeros(context, np.int32)
    window[: len(prompt)] = prompt
    keys = jax.random.split(jax.random.key(seed), num_bytes)
    # On one device: the others would only repeat the work.
    added = _continue(model.apply, jax.device_get(params), window, len(prompt), keys)
    text = PROMPT + np.asarray(added).astype(np.uint8).tobytes()
    return text.decode("utf-8", "replace").replace("\0", "\n")

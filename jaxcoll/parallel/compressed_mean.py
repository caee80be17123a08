"""The mean over ranks of several hosts, of which little travels between the hosts.

The ranks of a host add what they have, each its share, in full precision. Shares travel between
hosts in fewer bits, and what that loses is added the next time (error feedback).

Source: error feedback, Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs" (2014); Karimireddy et al., "Error Feedback Fixes
SignSGD and other Gradient Compression Schemes" (2019).
"""

import functools as ft
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxcoll import _compat
from jaxcoll._config import resolve_backend
from jaxcoll._lax_rules import marked
from jaxcoll.parallel.quantization import BLOCK, dequantized, quantized

Compression = Literal["bf16", "int8"]


def share_size(num_values: int, ranks_of_host: int) -> int:
    """Returns how many values each rank of a host adds, and sends to other hosts."""
    return -(-num_values // (ranks_of_host * BLOCK)) * BLOCK


def compressed_mean(
    x: jax.Array, error: jax.Array, axes: tuple[str, ...], hosts: int, compression: Compression
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean over the ranks of some axes, and what was lost of this rank's share.

    Args:
        x: float32 values, of shape `(n,)`.
        error: what was lost the last time: `(share_size(...),)`; `(0,)` where that is not kept.
        axes: mapped axes; their ranks lie host by host.
        hosts: how many.
        compression: what travels between them.
    """
    backend = resolve_backend("optax.synchronize", None)
    return tuple(
        compressed_mean_p.bind(
            x, error, axes=axes, hosts=hosts, compression=compression, backend=backend
        )
    )


compressed_mean_p = Primitive("compressed_mean")
compressed_mean_p.multiple_results = True


@compressed_mean_p.def_effectful_abstract_eval
def _abstract_eval(x: Any, error: Any, *, axes: tuple[str, ...], **_: Any) -> Any:
    if _compat.tracks_varying_axes():
        kind = x.manual_axis_type
        x = x.update(manual_axis_type=kind.update(varying=kind.varying - set(axes)))
    return [x, error], _compat.named_axis_effects(axes)


def _mean(
    x: jax.Array,
    error: jax.Array,
    *,
    axes: tuple[str, ...],
    hosts: int,
    compression: Compression,
    backend: Any,
) -> list[jax.Array]:
    size = lax.axis_size(axes)
    order = np.arange(size).reshape(hosts, -1)
    inside: dict[str, Any] = {"axis_index_groups": order.tolist(), "tiled": True}
    across: dict[str, Any] = {"axis_index_groups": order.T.tolist()}
    share = share_size(x.size, size // hosts)
    padded = jnp.pad(x, (0, share * (size // hosts) - x.size))
    with marked(backend):
        mine = lax.psum_scatter(padded, axes, **inside) / size
    if compression == "bf16":
        # As integers: XLA sends bfloat16 as float32 on CPU.
        bits = lax.bitcast_convert_type(mine.astype(jnp.bfloat16), jnp.uint16)
        with marked("lax"):
            bits = lax.all_gather(bits, axes, **across)
        parts = lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
    else:
        mine = mine + error
        values, scales = quantized(mine)
        lost = mine - dequantized(values, scales)
        error = jnp.where(jnp.isfinite(lost), lost, 0)
        with marked("lax"):
            values = lax.all_gather(values, axes, **across)
            scales = lax.all_gather(scales, axes, **across)
        parts = jax.vmap(dequantized)(values, scales)
    total = ft.reduce(jnp.add, list(parts))  # in the order of the hosts: the same on all ranks
    with marked(backend):
        return [lax.all_gather(total, axes, **inside)[: x.size], error]


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Sequence[Any]:
    with _compat.without_varying_axes():
        lowered = mlir.lower_fun(ft.partial(_mean, **params), multiple_results=True)
        return lowered(_compat.untyped(ctx), *operands)


mlir.register_lowering(compressed_mean_p, _lower, cacheable=False)

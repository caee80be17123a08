"""The layers for Flax NNX, with the names of those for linen; loaded on first use."""

from typing import TYPE_CHECKING, Any

from jaxcoll._lazy import load

if TYPE_CHECKING:
    from jaxcoll.nnx.attention import TPAttention as TPAttention
    from jaxcoll.nnx.dense import ColumnParallelDense as ColumnParallelDense
    from jaxcoll.nnx.dense import RowParallelDense as RowParallelDense
    from jaxcoll.nnx.dense import TPAsyncDense as TPAsyncDense
    from jaxcoll.nnx.dense import TPDense as TPDense
    from jaxcoll.nnx.dropout import TPDropout as TPDropout
    from jaxcoll.nnx.embed import VocabParallelEmbed as VocabParallelEmbed
    from jaxcoll.nnx.mlp import TPMLP as TPMLP
    from jaxcoll.nnx.norms import TPLayerNorm as TPLayerNorm
    from jaxcoll.nnx.norms import TPRMSNorm as TPRMSNorm

_HOMES = {
    "ColumnParallelDense": "jaxcoll.nnx.dense",
    "RowParallelDense": "jaxcoll.nnx.dense",
    "TPAsyncDense": "jaxcoll.nnx.dense",
    "TPAttention": "jaxcoll.nnx.attention",
    "TPDense": "jaxcoll.nnx.dense",
    "TPDropout": "jaxcoll.nnx.dropout",
    "TPLayerNorm": "jaxcoll.nnx.norms",
    "TPMLP": "jaxcoll.nnx.mlp",
    "TPRMSNorm": "jaxcoll.nnx.norms",
    "VocabParallelEmbed": "jaxcoll.nnx.embed",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load(f"{__name__}.{name}", _HOMES[name], name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

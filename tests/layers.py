"""The table of tensor-parallel layers: each beside plain mathematics on a single device."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxcoll

# Dimensions of x (batch, SEQUENCE, WIDTH), which all numbers of ranks divide.
SEQUENCE, WIDTH, HEADS, HIDDEN, VOCABULARY = 24, 24, 24, 48, 48


# ---- Plain mathematics ---------------------------------------------------------------------------


def dense(params: Any, x: Any) -> Any:
    """`x @ kernel + bias`."""
    y = x @ params["kernel"]
    return y + params["bias"] if "bias" in params else y


def norm(params: Any, x: Any, *, layer: bool) -> Any:
    """An RMS norm, or a layer norm."""
    x = x - x.mean(-1, keepdims=True) if layer else x
    y = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["scale"]
    return y + params["bias"] if "bias" in params else y


def attention(params: Any, x: Any, *, num_kv_heads: int, width: int, seen: Any = None) -> Any:
    """Attention, causal without a mask; `qkv` has one key-value head after another."""
    batch, length, _ = x.shape
    qkv = dense(params["qkv"], x).reshape(batch, length, num_kv_heads, -1, width)
    query, key, value = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    scores = jnp.einsum("bqgrk,bsgk->bgrqs", query, key) / width**0.5
    causal = np.tril(np.ones((length, length), bool))
    scores = jnp.where(causal if seen is None else seen[:, :, None], scores, -jnp.inf)
    mixed = jnp.einsum("bgrqs,bsgk->bqgrk", jax.nn.softmax(scores), value)
    return dense(params["out"], mixed.reshape(batch, length, -1))


def mlp(params: Any, x: Any, *, gated: bool) -> Any:
    """Two dense layers; with gates, they stand before their values."""
    y = dense(params["up"], x)
    y = jax.nn.gelu(y[..., ::2]) * y[..., 1::2] if gated else jax.nn.gelu(y)
    return dense(params["down"], y)


# ---- The table -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layer:
    """A row.

    Attributes:
        name: for test ids.
        linen: `(**options) -> module`, the options with mesh and precision.
        nnx: `(rngs=, **options) -> module`.
        plain: `(params, x)`, on a single device.
        split_in: the dimension of x that is split where the sequence is not, from its end.
        split_out: that of the result.
        follows_sequence: of (x, the result), whether a split sequence is split there instead.
        tokens: x is integers `(batch, SEQUENCE)`.
        method: what is called.
    """

    name: str
    linen: Callable[..., Any]
    nnx: Callable[..., Any]
    plain: Callable[[Any, Any], Any]
    split_in: int | None = None
    split_out: int | None = None
    follows_sequence: tuple[bool, bool] = (False, False)
    tokens: bool = False
    method: str = "__call__"

    @property
    def has_sequence(self) -> bool:
        """Whether it has the options `sequence_parallel` and `overlap`."""
        return any(self.follows_sequence)

    def splits(self, *, sequence_parallel: bool) -> tuple[int | None, int | None]:
        """Returns which dimensions of x and of the result are split."""
        x, y = self.follows_sequence if sequence_parallel else (False, False)
        return -2 if x else self.split_in, -2 if y else self.split_out

    def x(self) -> np.ndarray:
        """Returns the input, of all ranks."""
        rng = np.random.default_rng(0)
        if self.tokens:
            return rng.integers(0, VOCABULARY, (2, SEQUENCE))
        width = HIDDEN if self.name == "row" else WIDTH
        return rng.normal(size=(2, SEQUENCE, width))


def pair(name: str, *features: int, **options: Any) -> tuple[Any, Any]:
    """Returns a layer's two factories; the first number is left out for linen, which sees x."""
    return (
        ft.partial(getattr(jaxcoll, name), *features[1:], **options),
        ft.partial(getattr(jaxcoll.nnx, name), *features, **options),
    )


def _norm(name: str, split: str) -> Layer:
    of_x = -1 if split == "features" else None
    linen, of_nnx = pair(name, WIDTH, split=split)
    return Layer(
        f"{name}_{split}",
        linen,
        of_nnx,
        ft.partial(norm, layer=name == "TPLayerNorm"),
        of_x if split == "features" else -2,
        of_x if split == "features" else -2,
    )


def _tp(name: str, mode: str) -> Layer:
    return Layer(f"{name}_{mode}", *pair(name, WIDTH, HIDDEN, tp_mode=mode), dense, -1, -1)


_SEQUENCE = {"follows_sequence": (True, True)}
LAYERS = (
    Layer(
        "column",
        *pair("ColumnParallelDense", WIDTH, HIDDEN),
        dense,
        split_out=-1,
        follows_sequence=(True, False),
    ),
    Layer(
        "column_gathered",
        *pair("ColumnParallelDense", WIDTH, HIDDEN, gather_output=True),
        dense,
        follows_sequence=(True, False),
    ),
    Layer(
        "row",
        *pair("RowParallelDense", HIDDEN, WIDTH),
        dense,
        split_in=-1,
        follows_sequence=(False, True),
    ),
    Layer(
        "row_without_bias",
        *pair("RowParallelDense", WIDTH, WIDTH, use_bias=False),
        dense,
        split_in=-1,
        follows_sequence=(False, True),
    ),
    Layer(
        "embed",
        ft.partial(jaxcoll.VocabParallelEmbed, VOCABULARY, WIDTH),
        ft.partial(jaxcoll.nnx.VocabParallelEmbed, VOCABULARY, WIDTH),
        lambda params, x: params["embedding"][x],
        follows_sequence=(False, True),
        tokens=True,
    ),
    Layer(
        "attend",
        ft.partial(jaxcoll.VocabParallelEmbed, VOCABULARY, WIDTH),
        ft.partial(jaxcoll.nnx.VocabParallelEmbed, VOCABULARY, WIDTH),
        lambda params, x: x @ params["embedding"].T,
        split_out=-1,
        follows_sequence=(True, False),
        method="attend",
    ),
    Layer(
        "attention",
        *pair("TPAttention", WIDTH, HEADS, is_causal=True),
        ft.partial(attention, num_kv_heads=HEADS, width=WIDTH // HEADS),
        **_SEQUENCE,
    ),
    Layer(
        "attention_of_groups",
        *pair("TPAttention", WIDTH, 2 * HEADS, num_kv_heads=HEADS, head_width=2, is_causal=True),
        ft.partial(attention, num_kv_heads=HEADS, width=2),
        **_SEQUENCE,
    ),
    Layer("mlp", *pair("TPMLP", WIDTH, HIDDEN), ft.partial(mlp, gated=False), **_SEQUENCE),
    Layer(
        "mlp_gated",
        *pair("TPMLP", WIDTH, HIDDEN, gated=True, use_bias=False),
        ft.partial(mlp, gated=True),
        **_SEQUENCE,
    ),
    *(
        _norm(name, split)
        for name in ("TPRMSNorm", "TPLayerNorm")
        for split in ("sequence", "features")
    ),
    *(_tp(name, mode) for name in ("TPDense", "TPAsyncDense") for mode in ("gather", "scatter")),
)


# ---- A layer of either library as a function -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pure:
    """A layer as a function.

    Attributes:
        params: a dict of arrays, of all ranks.
        specs: how they lie.
        apply: `(params, x)`.
    """

    params: Any
    specs: Any
    apply: Callable[[Any, Any], Any]


def pure(row: Layer, library: str, mesh: Any, **options: Any) -> Pure:
    """Returns a row's layer, of parameters that are the same for both libraries."""
    options |= {"param_dtype": np.float64}
    has_mesh = "Norm" not in row.name
    linen = row.linen(**options, **({"mesh": mesh} if has_mesh else {}))
    boxed = jax.eval_shape(ft.partial(linen.init, method=row.method), jax.random.key(0), row.x())
    specs, shapes = nn.get_partition_spec(boxed)["params"], nn.unbox(boxed)["params"]

    def apply_linen(params: Any, x: Any) -> Any:
        return linen.apply({"params": params}, x, method=row.method)

    def apply_nnx(params: Any, x: Any) -> Any:
        made = nnx.eval_shape(lambda: row.nnx(rngs=nnx.Rngs(0), mesh=mesh, **options))
        graph, state, others = nnx.split(made, nnx.Param, ...)
        nnx.replace_by_pure_dict(state, params)
        return getattr(nnx.merge(graph, state, others), row.method)(x)

    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) / 4, shapes)
    return Pure(params, specs, {"linen": apply_linen, "nnx": apply_nnx}[library])

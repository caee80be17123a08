"""Weights in the layouts of other systems: into global shapes, and back.

DistJax and xlstm-jax store what each rank of a tensor- or pipeline-parallel axis holds in a leading
dimension of their arrays, so that the shapes depend on the number of ranks p:

    stacked   TPDense        kernel (p, in, out/p) or (p, in/p, out)
    ring      TPAsyncDense   shard_0 ... shard_{p-1}, each a kernel (p, in/p, out/p), in the order
                             in which a ring brings the blocks to a rank
    stages    pipelines      (p, layers/p, ...), or zeros on all ranks but one

Here, shapes are global, `(in, out)` and `(layers, ...)`, for every number of ranks.

Source: the parameter trees of `xlstm_jax.distributed`, and of DistJax, which share them.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll._errors import one_of
from jaxcoll.parallel.partitioned import is_partitioned

Mode = Literal["gather", "scatter"]
_MODES = ("gather", "scatter")
_LAYOUTS = ("stacked", "ring")


def import_tp_dense(
    params: Mapping[str, Any], tp_mode: Mode, *, split_scatter: bool = False
) -> dict[str, jax.Array]:
    """Returns the global `kernel` and `bias` of another system's tensor-parallel dense layer.

    Args:
        params: the layer's tree: `{"module": {"sharded": {"kernel": ..., "bias": ...}}}` of a
            `TPDense`, `{"shard_0": {"sharded": ...}, ...}` of a `TPAsyncDense`, or, from a single
            rank, a plain dense layer's. `flax.linen.Partitioned` are unboxed.
        tp_mode: `"gather"` or `"scatter"`, as the layer had it.
        split_scatter: the layer had `use_bidirectional_scatter=True`.

    Returns:
        `kernel` `(in, out)` and, where there is one, `bias` `(out,)`: of a stacked scatter layer
        the sum of its p biases, which is what it adds.

    Raises:
        ValueError: an unknown mode, or a tree of another kind.
    """
    call = "import_tp_dense"
    if tp_mode not in _MODES:
        raise ValueError(one_of(call, "tp_mode", tp_mode, _MODES))
    params = _opened(params)
    if "shard_0" in params:
        shards = [_dense(call, params[f"shard_{i}"]) for i in range(len(params))]
        if len(shards) > 1:
            return _from_ring(call, shards, tp_mode, split_scatter)
        return shards[0]
    dense = _dense(call, params)
    if jnp.ndim(dense["kernel"]) == 2:
        return dense
    kernel = jnp.concatenate(list(dense["kernel"]), axis=1 if tp_mode == "gather" else 0)
    if "bias" not in dense:
        return {"kernel": kernel}
    bias = dense["bias"]
    return {"kernel": kernel, "bias": bias.reshape(-1) if tp_mode == "gather" else bias.sum(0)}


def export_tp_dense(
    params: Mapping[str, Any],
    tp_mode: Mode,
    num_ranks: int,
    layout: Literal["stacked", "ring"] = "stacked",
    *,
    split_scatter: bool = False,
) -> dict[str, Any]:
    """Returns a dense layer's tree as another system stores it; `import_tp_dense` is the way back.

    Args:
        params: `kernel` `(in, out)` and perhaps `bias` `(out,)`.
        tp_mode: `"gather"` or `"scatter"`.
        num_ranks: p, which must divide in and out; 1 gives a plain dense layer.
        layout: `"stacked"` for `TPDense`, `"ring"` for `TPAsyncDense`.
        split_scatter: for a ring layer with `use_bidirectional_scatter=True`.

    Raises:
        ValueError: an unknown mode or layout, or features that can't be split.
    """
    call = "export_tp_dense"
    if tp_mode not in _MODES:
        raise ValueError(one_of(call, "tp_mode", tp_mode, _MODES))
    if layout not in _LAYOUTS:
        raise ValueError(one_of(call, "layout", layout, _LAYOUTS))
    params = _dense(call, _opened(params))
    kernel, bias = params["kernel"], params.get("bias")
    for name, count in zip(("input", "output"), kernel.shape, strict=True):
        if count % num_ranks:
            raise ValueError(
                f"{call}: num_ranks: {num_ranks} ranks can't share the kernel's {count} {name} "
                f"features (its shape is {kernel.shape})."
            )
    if num_ranks == 1:
        return {"shard_0": dict(params)} if layout == "ring" else {"Dense_0": dict(params)}
    if layout == "ring":
        return _to_ring(kernel, bias, tp_mode, num_ranks, split_scatter)
    stacked = {
        "kernel": jnp.stack(jnp.split(kernel, num_ranks, axis=1 if tp_mode == "gather" else 0))
    }
    if bias is not None and tp_mode == "gather":
        stacked["bias"] = bias.reshape(num_ranks, -1)
    elif bias is not None:
        # Its p biases are added up: all of it on the first rank.
        stacked["bias"] = jnp.zeros((num_ranks, *bias.shape), bias.dtype).at[0].set(bias)
    return {"module": {"sharded": stacked}}


def _opened(params: Any) -> Any:
    """Returns the tree without boxes."""
    return jax.tree.map(
        lambda leaf: leaf.value if is_partitioned(leaf) else leaf, params, is_leaf=is_partitioned
    )


def _dense(call: str, tree: Any) -> dict[str, Any]:
    """Returns the one dense layer below a tree, whatever its wrappers are called."""
    inner = tree
    while isinstance(inner, Mapping) and "kernel" not in inner and len(inner) == 1:
        (inner,) = inner.values()
    if not isinstance(inner, Mapping) or "kernel" not in inner:
        raise ValueError(
            f"{call}: params: expected the tree of one dense layer, ending in 'kernel' and 'bias', "
            f"or 'shard_0', 'shard_1', ..., got keys {list(tree)}."
        )
    return dict(inner)


def _blocks(tp_mode: Mode, rank: int, shard: int, num_ranks: int, *, down: bool) -> tuple[int, int]:
    """Returns which block of rows and of columns a ring layer's shard is, on a rank.

    Gathering, a rank's i-th input is that of the rank i before it. Scattering, its i-th output goes
    to the rank i + 1 before it; half of the features may go down the ring, to the one after it.
    """
    if tp_mode == "gather":
        return (rank - shard) % num_ranks, rank
    return rank, (rank + shard + 1 if down else rank - shard - 1) % num_ranks


def _to_ring(
    kernel: Any, bias: Any, tp_mode: Mode, num_ranks: int, split_scatter: bool
) -> dict[str, Any]:
    rows, columns = (count // num_ranks for count in kernel.shape)

    def block(rank: int, shard: int, *, down: bool) -> tuple[Any, Any]:
        r, c = _blocks(tp_mode, rank, shard, num_ranks, down=down)
        part = None if bias is None else bias[c * columns : (c + 1) * columns]
        return kernel[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns], part

    def local(rank: int, shard: int) -> tuple[Any, Any]:
        kernel_up, bias_up = block(rank, shard, down=False)
        if not (split_scatter and tp_mode == "scatter"):
            return kernel_up, bias_up
        kernel_down, bias_down = block(rank, shard, down=True)
        half = columns // 2
        joined = jnp.concatenate([kernel_up[:, :half], kernel_down[:, half:]], axis=1)
        if bias is None:
            return joined, None
        return joined, jnp.concatenate([bias_up[:half], bias_down[half:]])

    tree: dict[str, Any] = {}
    for shard in range(num_ranks):
        parts = [local(rank, shard) for rank in range(num_ranks)]
        dense = {"kernel": jnp.stack([kernel for kernel, _ in parts])}
        if shard == 0 and bias is not None:
            dense["bias"] = jnp.stack([part for _, part in parts])
        tree[f"shard_{shard}"] = {"sharded": dense}
    return tree


def _from_ring(
    call: str, shards: list[dict[str, Any]], tp_mode: Mode, split_scatter: bool
) -> dict[str, jax.Array]:
    size = len(shards)
    held, rows, columns = shards[0]["kernel"].shape
    if held != size:
        raise ValueError(
            f"{call}: params: {size} shards of a ring of {held} ranks: expected as many as ranks."
        )
    kernel = np.empty((size * rows, size * columns), shards[0]["kernel"].dtype)
    bias = np.empty(size * columns, kernel.dtype)
    half = columns // 2 if split_scatter and tp_mode == "scatter" else columns
    for rank in range(size):
        for i, shard in enumerate(shards):
            for down, part in ((False, slice(None, half)), (True, slice(half, None))):
                r, c = _blocks(tp_mode, rank, i, size, down=down)
                to = kernel[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns]
                to[:, part] = shard["kernel"][rank][:, part]
                if "bias" in shard:
                    bias[c * columns : (c + 1) * columns][part] = shard["bias"][rank][part]
    whole = {"kernel": jnp.asarray(kernel)}
    return whole | ({"bias": jnp.asarray(bias)} if "bias" in shards[0] else {})


def import_stages(params: Any, *, masked: bool = False) -> Any:
    """Returns a pipeline's parameters with a first dimension that counts layers.

    Args:
        params: a tree of arrays `(p, layers/p, ...)`, by stage and layer, or with `masked`
            `(p, ...)`, which are zeros but for the one rank that uses them: embeddings and heads.
            `flax.linen.Partitioned` are unboxed, wrappers called `sharded` are left out.
        masked: of the second kind.

    Returns:
        `(layers, ...)`, as `jaxcoll.models.PPClassifier` has them; with `masked` `(...)`.
    """

    def whole(value: Any) -> jax.Array:
        value = jnp.asarray(value)
        return value.sum(0) if masked else value.reshape(-1, *value.shape[2:])

    tree = jax.tree.map(whole, _opened(params))
    while isinstance(tree, Mapping) and list(tree) == ["sharded"]:
        tree = tree["sharded"]
    return tree


def export_stages(params: Any, num_stages: int, *, masked_to: int | None = None) -> Any:
    """Returns parameters as a pipeline of another system stores them; see `import_stages`.

    Args:
        params: a tree of arrays `(layers, ...)`, or with `masked_to` of any shape.
        num_stages: p, which must divide the layers.
        masked_to: the rank that keeps the values; the others get zeros.

    Raises:
        ValueError: layers that p does not divide, or no such rank.
    """
    call = "export_stages"
    if masked_to is not None and not 0 <= masked_to < num_stages:
        raise ValueError(
            f"{call}: masked_to: expected a rank from 0 to {num_stages - 1}, got {masked_to}."
        )

    def stages(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if masked_to is not None:
            zeros = jnp.zeros((num_stages, *leaf.shape), leaf.dtype)
            return zeros.at[masked_to].set(leaf)
        if not leaf.ndim or leaf.shape[0] % num_stages:
            raise ValueError(
                f"{call}: num_stages: {num_stages} stages can't share layers of shape {leaf.shape}."
            )
        return leaf.reshape(num_stages, -1, *leaf.shape[1:])

    return {"sharded": jax.tree.map(stages, _opened(params))}

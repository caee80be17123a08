"""From the processes' shares of a batch to global arrays.

A share is the part of a leaf that the devices of one process hold, in the leaf's order: where
several processes hold the same part, as in a mesh that splits the batch inside of each process
only, all of them give that part.
"""

import functools as ft
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxcoll._agreement import differences, processes_of
from jaxcoll._sharding import check_divisible, leaf_name

Layout = Callable[[str, Any], Sharding]


def place(
    call: str,
    tree: Any,
    sharding: Sharding,
    *,
    is_global: bool = False,
    layout: Layout | None = None,
    with_contents: bool = False,
    said: Mapping[str, str] | None = None,
) -> Any:
    """Puts a tree onto the devices of a sharding.

    Where these belong to several processes, each gives its share of every leaf, or with `is_global`
    the whole. A leaf that lies on devices of several processes already is whole.

    Args:
        call: the public function, for texts.
        tree: of arrays.
        sharding: where to.
        is_global: whether all give the whole of each leaf.
        layout: gives the sharding of a leaf, on the same devices, by its name and itself.
        with_contents: whether the processes compare the values too, not those of scalars alone.
        said: what else must be the same on all processes.

    Raises:
        ValueError: a leaf can't be split so, or the processes' trees do not fit together: the text
            names the leaf, and it is raised on all of them.
    """
    if not sharding.is_fully_addressable:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        named = [(leaf_name(path), leaf) for path, leaf in leaves]
        compare(call, named, sharding, is_global, with_contents=with_contents, said=said)

    def put(path: Any, leaf: Any) -> Any:
        name = leaf_name(path)
        target = sharding if layout is None else layout(name, leaf)
        if target.is_fully_addressable or is_whole(leaf):
            _check(call, name, np.shape(leaf), target)
            return jax.device_put(leaf, target)
        if not is_global:
            return _from_share(call, name, _values(leaf), target)
        _check(call, name, np.shape(leaf), target)
        return _from_whole(leaf, target)

    return jax.tree_util.tree_map_with_path(put, tree)


def is_whole(leaf: Any) -> bool:
    """Tells whether a leaf lies on devices of several processes already."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def compare(
    call: str,
    named: list[tuple[str, Any]],
    sharding: Sharding,
    is_global: bool,
    *,
    with_contents: bool = False,
    said: Mapping[str, str] | None = None,
) -> None:
    """Raises ValueError on all processes of a sharding where they do not have the same leaves."""
    processes = processes_of(sharding)
    if jax.process_index() not in processes:
        if is_global:
            return
        raise ValueError(
            f"{call}: this process, {jax.process_index()}, has none of the sharding's devices, and "
            f"hence no share. Processes {', '.join(map(str, processes))} alone call it."
        )
    note = {
        "the call": call,
        "the sharding": _described_sharding(sharding),
        "what is given": "the whole" if is_global else "a share",
        **(said or {}),
        **{name: _described(leaf, with_contents=with_contents) for name, leaf in named},
    }
    if text := differences(call, note, sharding):
        raise ValueError(
            f"{call}: {text}. All processes must call it alike, with the same leaves, dtypes and "
            "shapes: drop or pad what is left of a last batch."
        )


def _described_sharding(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding):
        return type(sharding).__name__
    return f"{sharding.spec} on a mesh of {dict(sharding.mesh.shape)}"


def _described(leaf: Any, *, with_contents: bool) -> str:
    """Returns a leaf's dtype and shape, as in float32[8,2], and the value of a scalar."""
    shape = np.shape(leaf)
    dtype = _dtype(leaf)
    text = f"{dtype}[{','.join(map(str, shape))}]"
    if is_whole(leaf):
        return f"{text}, a global array"
    if shape and not with_contents:
        return text
    values = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    if not shape:
        return f"{text} of value {values}"
    octets = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    digest = hashlib.blake2b(octets.data, digest_size=16)
    return f"{text} with contents {digest.hexdigest()}"


def _dtype(leaf: Any) -> Any:
    """Returns the dtype that JAX gives a leaf; a type's name where it refuses it."""
    if isinstance(leaf, jax.Array):
        return leaf.dtype
    try:
        return jax.dtypes.result_type(leaf)
    except TypeError:
        return type(leaf).__name__


def _check(call: str, name: str, shape: tuple[int, ...], sharding: Sharding, why: str = "") -> None:
    if isinstance(sharding, NamedSharding):
        check_divisible(call, name, shape, sharding, why)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _values(leaf: Any) -> Any:
    """Returns a leaf on the host; NumPy knows all but random keys."""
    return leaf if _is_key(leaf) else np.asarray(leaf)


def _from_share(call: str, name: str, share: Any, sharding: Sharding) -> jax.Array:
    shares = _num_shares(sharding, share.ndim)
    for dimension, count in enumerate(shares):
        if count is None:
            raise ValueError(
                f"{call}: {name}: dimension {dimension} has no even shares: the processes' devices "
                "hold different numbers of its parts, or parts that overlap. Pass the whole on all "
                "processes: shard_batch(..., batch_is_global=True)."
            )
    shape = tuple(n * (count or 1) for n, count in zip(share.shape, shares, strict=True))
    _check(call, name, shape, sharding, f"this process's share has shape {share.shape}")
    return jax.make_array_from_process_local_data(sharding, share, shape)


@ft.lru_cache(maxsize=1024)
def _num_shares(sharding: Sharding, ndim: int) -> tuple[int | None, ...]:
    """Returns how many shares each dimension has; None: they are not even, or overlap."""
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, P(*sharding.spec[:ndim]))
    held: list[dict[int, set[Any]]] = [{} for _ in range(ndim)]
    # Any shape will do; this one is divisible.
    indices = sharding.devices_indices_map((sharding.num_devices,) * ndim)
    for device, index in indices.items():
        for parts, part in zip(held, index or (), strict=True):
            parts.setdefault(device.process_index, set()).add((part.start, part.stop))

    def count(parts: dict[int, set[Any]]) -> int | None:
        shares = {frozenset(share) for share in parts.values()}
        sizes = {len(share) for share in shares}
        disjoint = sum(map(len, shares)) == len(frozenset().union(*shares))
        return len(shares) if disjoint and len(sizes) == 1 else None

    return tuple(map(count, held))


def _from_whole(leaf: Any, sharding: Sharding) -> jax.Array:
    # Not device_put, which sends every leaf from process 0 to all, to compare the values.
    whole, dtype = _values(leaf), _dtype(leaf)
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: whole[index], dtype=dtype
    )

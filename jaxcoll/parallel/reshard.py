"""Moving a tree of arrays from one layout to another."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll._sharding import check_divisible, leaf_name
from jaxcoll.mesh import check_mesh_axis
from jaxcoll.parallel.splits import SplitDim
from jaxcoll.parallel.stages import Layers
from jaxcoll.parallel.state import TrainState, map_params, rearranged


def reshard(state: Any, new_specs: Any, *, mesh: Mesh | None = None) -> Any:
    """Returns the same values, laid out anew.

    Args:
        state: a `TrainState`, or any tree of arrays.
        new_specs: a `jax.P` for each leaf, or one for all leaves of a subtree; of a `TrainState`
            another one's `specs`.
        mesh: of the new layout; without, that of the arrays.

    Returns:
        The tree; donate or drop the old one to free its memory.

    Raises:
        ValueError: specs of another structure, an axis that the mesh lacks, a dimension that can't
            be split so, or no mesh; the text names the leaf.

    Cost: what differs travels, one leaf after the other: device to device, and to other devices
        over the host. Memory on a device: its parts in the old and in the new layout, and at most
        twice the whole of the largest leaf. Where the zeros that `jaxcoll.fully_shard` stores
        change, or how `jaxcoll.pipelined` stores layers, such parameters and moments lie there once
        more, as `TrainState.unpadded` says.
    """
    call = "reshard"
    if isinstance(state, TrainState) and isinstance(new_specs, TrainState):
        stored = (
            state if _is_stored_as(state, new_specs) else _stored_for(state.unpadded(), new_specs)
        )
        moved = reshard(_contents(stored), _contents(new_specs), mesh=mesh)
        how = {name: getattr(new_specs, name) for name in _HOW}
        return dataclasses.replace(state, **moved, **how)
    mesh = _mesh_of(call, state) if mesh is None else mesh

    def put(path: Any, leaf: Any, spec: Any) -> Any:
        name = leaf_name(path)
        if not isinstance(spec, P):
            raise ValueError(f"{call}: new_specs: {name}: expected a jax.P, got {spec!r}.")
        for axis in jax.tree.leaves(tuple(spec)):
            check_mesh_axis(f"{call}: {name}", "new_specs", mesh, axis)
        sharding = NamedSharding(mesh, spec)
        check_divisible(call, name, jnp.shape(leaf), sharding)
        return sharding

    try:
        specs = jax.tree.broadcast(new_specs, state, is_leaf=lambda leaf: isinstance(leaf, P))
    except ValueError as error:
        raise ValueError(f"{call}: new_specs: not the state's structure: {error}") from None
    shardings = jax.tree_util.tree_map_with_path(put, state, specs)
    # One after the other: a move may need the whole of its leaf on each device.
    return jax.tree.map(
        lambda leaf, sharding: jax.block_until_ready(_moved(leaf, sharding)), state, shardings
    )


def _moved(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Returns a leaf elsewhere, in memory of its own even where nothing moves.

    A step may donate it. `jax.device_put` alone shares what lies right already, whatever
    `may_alias` says, and keeps the whole leaf on the host as long as the old array lives.
    """
    old = leaf.sharding if isinstance(leaf, jax.Array) else None
    if isinstance(old, NamedSharding) and _devices(old.mesh) == _devices(sharding.mesh):
        return _copy_to(sharding)(leaf)
    return jax.device_put(jax.jit(jnp.copy)(leaf), sharding)


def _devices(mesh: Any) -> list[Any]:
    return list(mesh.devices.flat)


@ft.lru_cache(maxsize=128)  # leaves of one shape and layout share a program
def _copy_to(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.copy, out_shardings=sharding)


_HOW = ("zero", "split", "pipe", "layers", "axes", "kind")


def _is_stored_as(state: TrainState, specs: TrainState) -> bool:
    in_parts = [s.zero is not None and s.zero.stage == 3 for s in (state, specs)]
    same = state.split == specs.split and state.layers == specs.layers
    return same and in_parts[0] == in_parts[1]


def _stored_for(state: TrainState, specs: TrainState) -> TrainState:
    """Returns a state in the model's shapes with the zeros that another layout stores."""

    def pad(leaf: jax.Array, dim: SplitDim) -> jax.Array:
        changes = leaf.shape[dim.index : dim.index + 1] == (dim.size,) and dim.is_padded
        return rearranged(leaf, SplitDim.padded, dim, dim.index) if changes else leaf

    def arrange(leaf: jax.Array, layers: Layers) -> jax.Array:
        changes = leaf.shape[:1] == (layers.count,) and not layers.is_as_stored
        return rearranged(leaf, Layers.arranged, layers, 0) if changes else leaf

    if specs.layers:
        state = map_params(state, specs.layers, arrange, arrange)
    if not specs.split:
        return state
    in_parts = specs.zero is not None and specs.zero.stage == 3
    return map_params(state, specs.split, pad if in_parts else lambda leaf, dim: leaf, pad)


def _contents(state: TrainState) -> dict[str, Any]:
    names = ("step", "params", "opt_state", "rng", "variables")
    return {name: getattr(state, name) for name in names}


def _mesh_of(call: str, state: Any) -> Mesh:
    for leaf in jax.tree.leaves(state):
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf.sharding.mesh
    raise ValueError(f"{call}: mesh: no array of the state lies on one yet. Pass mesh=.")

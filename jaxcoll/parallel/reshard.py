"""Moving a tree of arrays from one layout to another."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll._sharding import checked_sharding, leaf_name, untyped
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
        twice the whole of the largest leaf, also where the zeros that `jaxcoll.fully_shard` stores
        change, or how `jaxcoll.pipelined` stores layers.
    """
    call = "reshard"
    if isinstance(state, TrainState) and isinstance(new_specs, TrainState):
        stored = _to_be_stored_as(state, new_specs)
        moved = reshard(_contents(stored), _contents(new_specs), mesh=mesh)
        how = {name: getattr(new_specs, name) for name in _HOW}
        return dataclasses.replace(state, **moved, **how)
    mesh = _mesh_of(call, state) if mesh is None else mesh

    def put(path: Any, leaf: Any, spec: Any) -> Any:
        name = leaf_name(path)
        if not isinstance(spec, P):
            raise ValueError(f"{call}: new_specs: {name}: expected a jax.P, got {spec!r}.")
        for axis in jax.tree.leaves(tuple(spec)):
            where = f"{call}: {name} of shape {np.shape(leaf)}"
            check_mesh_axis(where, "new_specs", mesh, axis)
        return checked_sharding(call, name, np.shape(leaf), mesh, spec)

    try:
        specs = jax.tree.broadcast(new_specs, state, is_leaf=lambda leaf: isinstance(leaf, P))
    except ValueError as error:
        raise ValueError(
            f"{call}: new_specs: expected a jax.P for each leaf of the state, or one for all of a "
            f"part of it, but it has another structure: {error}"
        ) from None
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
    is_made = isinstance(leaf, _Later)
    leaf = leaf.made() if is_made else leaf
    old = leaf.sharding if isinstance(leaf, jax.Array) else None
    if isinstance(old, NamedSharding) and _devices(old.mesh) == _devices(sharding.mesh):
        return _copy_to(sharding)(leaf)
    # On a device that gets nothing, nobody else waits for the copy, which holds two of the leaf.
    leaf = leaf if is_made else jax.block_until_ready(jax.jit(jnp.copy)(leaf))
    return jax.device_put(leaf, sharding)


def _devices(mesh: Any) -> list[Any]:
    return list(mesh.devices.flat)


@ft.lru_cache(maxsize=128)  # leaves of one shape and layout share a program
def _copy_to(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.copy, out_shardings=sharding)


_HOW = ("zero", "split", "pipe", "layers", "axes", "kind")


# What is done with a whole array, in which way, and the dimension that changes.
_Step = tuple[Callable[..., jax.Array], SplitDim | Layers, int]


@dataclasses.dataclass(frozen=True)
class _Later:
    """An array as it will be stored, made when its turn comes: no others are there twice."""

    leaf: jax.Array
    steps: tuple[_Step, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        made = jax.eval_shape(lambda leaf: _Later(leaf, self.steps).made(), untyped(self.leaf))
        return made.shape

    def made(self) -> jax.Array:
        return ft.reduce(lambda leaf, step: rearranged(leaf, *step), self.steps, self.leaf)


@dataclasses.dataclass(frozen=True)
class _Way:
    """How what belongs to a parameter is stored."""

    layers: Layers | None
    split: SplitDim | None


def _to_be_stored_as(state: TrainState, specs: TrainState) -> TrainState:
    """Returns a state whose arrays are, or will be, stored as those of another layout."""
    if jax.tree.structure(state.params) != jax.tree.structure(specs.params):
        return state  # of another model: no layout of this one

    def changed(leaf: jax.Array, ways: tuple[_Way, _Way]) -> Any:
        steps = _steps(leaf.shape, *ways)
        return _Later(leaf, steps) if steps else leaf

    def changed_param(leaf: jax.Array, ways: tuple[_Way, _Way]) -> Any:
        old, new = (
            way if of.zero is not None and of.zero.stage == 3 else _Way(way.layers, None)
            for way, of in zip(ways, (state, specs), strict=True)
        )
        return changed(leaf, (old, new))

    ways = list(zip(_ways(state), _ways(specs), strict=True))
    if not any(way.layers or way.split for both in ways for way in both):
        return state
    return map_params(state, ways, changed_param, changed)


def _ways(state: TrainState) -> list[_Way]:
    none = (None,) * len(jax.tree.leaves(state.params))
    return list(map(_Way, state.layers or none, state.split or none))


def _steps(shape: tuple[int, ...], old: _Way, new: _Way) -> tuple[_Step, ...]:
    """Returns what makes an array the model's own, and from there the new layout's.

    What the optimizer keeps of a parameter may have another shape: its sizes tell.
    """
    if old == new:
        return ()
    sizes = dict(enumerate(shape))
    steps: list[_Step] = []

    def add(change: Any, how: SplitDim | Layers, dim: int, before: int, after: int) -> None:
        if sizes.get(dim) == before:
            steps.append((change, how, dim))
            sizes[dim] = after

    if (split := old.split) and split.is_padded:
        add(SplitDim.unpadded, split, split.index, split.stored, split.size)
    if (layers := old.layers) and not layers.is_as_stored:
        add(Layers.restored, layers, 0, layers.stored, layers.count)
    if (layers := new.layers) and not layers.is_as_stored:
        add(Layers.arranged, layers, 0, layers.count, layers.stored)
    if (split := new.split) and split.is_padded:
        add(SplitDim.padded, split, split.index, split.size, split.stored)
    return tuple(steps)


def _contents(state: TrainState) -> dict[str, Any]:
    names = ("step", "params", "opt_state", "rng", "variables")
    return {name: getattr(state, name) for name in names}


def _mesh_of(call: str, state: Any) -> Mesh:
    for leaf in jax.tree.leaves(state):
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf.sharding.mesh
    raise ValueError(f"{call}: mesh: no array of the state lies on one yet. Pass mesh=.")

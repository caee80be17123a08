"""The synchronisation of gradients as an Optax transformation, compressed between hosts."""

import contextlib
import contextvars
import dataclasses
import functools as ft
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

from jaxcoll import _compat, _engine
from jaxcoll._config import logger
from jaxcoll._errors import checked_count, names_of_axes, one_of
from jaxcoll.collectives._arguments import check_mapped
from jaxcoll.collectives.all_reduce import all_reduce
from jaxcoll.mesh import check_mesh_axis
from jaxcoll.parallel.compressed_mean import Compression, compressed_mean, share_size
from jaxcoll.parallel.quantization import BLOCK

_CALL = "optax.synchronize"
_is_off: contextvars.ContextVar[bool] = contextvars.ContextVar("is_off", default=False)


@jax.jit
def jaxcoll_average(tree: Any) -> Any:
    """Stands, under a name by which it is found, where `synchronize` would average."""
    return lax.optimization_barrier(tree)


@contextlib.contextmanager
def without_synchronization() -> Iterator[None]:
    """Traces optimizers as if each was alone, for a look at what they do."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SynchronizeState:
    """What `synchronize` keeps.

    Attributes:
        error: what int8 has lost so far, float32; every rank has its own part, split over `axes`.
        axes: the mapped axes; no leaf.
        compression: what travels between hosts; no leaf.
    """

    error: jax.Array
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    compression: Compression | None = dataclasses.field(default=None, metadata={"static": True})


def synchronize(
    axis_name: str | Sequence[str] = "data",
    compression: Compression | None = None,
    *,
    mesh: Mesh | None = None,
    hosts: int | None = None,
) -> optax.GradientTransformation:
    """Returns a transformation that averages gradients over the ranks of a mesh axis.

    First in `optax.chain`, inside `jax.shard_map`, on gradients of each rank's own loss. In
    `jaxcoll.data_parallel_train_step` it takes the place of the step's own sum, which stays for
    leaves that `optax.masked` or `optax.partition` leave out; what comes before it must be linear,
    and without a state: a norm, or moments, would be of each rank's own gradients.

    Compression is for what travels between hosts: the ranks of a host add their gradients in full
    precision, and each sends its share of the sum. Where all ranks are on one host it is off, and a
    line of the log says so. Parameters must not be split over other axes then. No two parameters
    share a scale of 8 bits, but inside of `optax.flatten`, where all are one array.

    Inside of `optax.MultiSteps` a step sums all micro-batches in full precision: what is trained is
    right, but compression is off, and a line of the log says so. Before it, as
    `optax.chain(synchronize(...), optax.MultiSteps(...).gradient_transformation())`, every
    micro-batch is compressed. `accumulate=` of the step communicates once for all of them.

    Args:
        axis_name: the mapped axis, or axes, over which the batch is split.
        compression: None; `"bf16"` rounds, half the bytes; `"int8"` has 8 bits a value and a scale
            for each 256, a quarter of the bytes, and adds what it lost to the next gradients.
        mesh: on which the axes are; all devices of the job, in their order, without.
        hosts: on how many hosts the ranks are, one after the other; the job's without.

    Returns:
        An `optax.GradientTransformation`. Of its state every rank has a part:
        `SynchronizeState.error` is to be split over the axes (`P(axis_name)`), as
        `create_train_state` does. Gradients that are typed as the same on all ranks are left as
        they are.

    Raises:
        ValueError: an unknown compression, an axis that the mesh lacks, ranks that the hosts don't
            divide, or a state of another number of ranks.
        TypeError: gradients that are not floating-point numbers, where there is compression; an
            argument of another type.

    Cost: None: an `all_reduce`. Else, of S bytes of float32 on h hosts of r ranks, a
        `reduce_scatter` and an `all_gather` on each host, and between hosts (h - 1) S / 2 r or
        (h - 1) S / 4 r for each rank: for a few hosts. Memory: for int8, S / r for each rank.
    Deterministic: yes, the same bits on all ranks.
    Source: error feedback, Seide et al. (2014), Karimireddy et al. (2019).

    Example:
        >>> optimizer = optax.chain(jaxcoll.optax.synchronize("data", "int8"), optax.adamw(1e-3))
    """
    axes = names_of_axes(_CALL, "axis_name", axis_name)
    if compression not in (None, "bf16", "int8"):
        raise ValueError(one_of(_CALL, "compression", compression, ("None", "bf16", "int8")))
    if not isinstance(mesh, Mesh | None):
        raise TypeError(f"{_CALL}: mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}.")
    if mesh is not None:
        for axis in axes:
            check_mesh_axis(_CALL, "axis_name", mesh, axis)
    if hosts is not None:
        hosts = checked_count(_CALL, "hosts", hosts, 1)

    @ft.cache
    def num_hosts() -> int:
        """How many hosts compressed values travel between; 1: there is no compression."""
        if compression is None:
            return 1
        found = _hosts(axes, mesh) if hosts is None else hosts
        if isinstance(found, str):
            logger.warning("jaxcoll: %s: compression=%r is off: %s", _CALL, compression, found)
            return 1
        if _num_ranks(axes, mesh) % found:
            raise ValueError(
                f"{_CALL}: hosts: {_num_ranks(axes, mesh)} ranks can't be on {found} hosts alike."
            )
        return found

    def init(params: Any) -> Any:
        size, count = 0, _num_ranks(axes, mesh)
        if compression == "int8" and num_hosts() > 1:
            size = share_size(_num_values(jax.tree.leaves(params)), count // num_hosts())
        if not all(axis in _compat.bound_axes() for axis in axes):
            return SynchronizeState(jnp.zeros(size * count, jnp.float32), axes, compression)
        error = jnp.zeros(size, jnp.float32)
        typed = _compat.tracks_varying_axes()
        error = lax.pcast(error, axes, to="varying") if typed else error
        return SynchronizeState(error, axes, compression)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        if _is_off.get():
            return jaxcoll_average(updates), state
        check_mapped(_CALL, axes, updates)
        leaves, treedef = jax.tree.flatten(updates)
        if not any(_varies(leaf, axes) for leaf in leaves):
            return updates, state  # the same on all ranks already
        if num_hosts() == 1:
            return all_reduce(updates, axes, op="mean"), state
        mean, error = _compressed(leaves, state.error, axes, num_hosts(), compression)
        return treedef.unflatten(mean), dataclasses.replace(state, error=error)

    return optax.GradientTransformation(init, update)


def synchronizers(opt_state: Any) -> list[SynchronizeState]:
    """Returns the states of all `synchronize` in an optimizer."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_state)
    return [node for node in nodes if _is_state(node)]


def synchronizes(opt_state: Any) -> bool:
    """Tells whether an optimizer averages gradients itself, each time: not under `MultiSteps`."""
    kinds = (SynchronizeState, optax.MultiStepsState)
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kinds))
    return any(_is_state(node) for node in nodes)


def check_synchronizers(call: str, opt_state: Any, mesh: Mesh, is_split: bool) -> None:
    """Raises ValueError where an optimizer could not average the gradients of a model.

    Args:
        call: the public function's name, for texts.
        opt_state: of the optimizer.
        mesh: on which the state is to lie.
        is_split: whether the model's parameters are split over other axes.
    """
    found = synchronizers(opt_state)
    for axis in (axis for node in found for axis in node.axes):
        check_mesh_axis(f"{call}: optimizer: {_CALL}", "axis_name", mesh, axis)
    compressed = [node for node in found if node.compression]
    kinds = (optax.ApplyIfFiniteState, optax.ConditionallyTransformState)
    for node in jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kinds)):
        if isinstance(node, kinds) and synchronizers(node.inner_state):
            raise ValueError(
                f"{call}: optimizer: {_CALL} stands inside a transformation that leaves it out at "
                f"times, {type(node).__name__}, and not at the same times on all ranks. Put it "
                "outside: optax.chain(synchronize(...), ...)."
            )
    if compressed and is_split:
        raise ValueError(
            f"{call}: optimizer: {_CALL}: compression={compressed[0].compression!r} is for models "
            "whose parameters are on every rank, and this one's are split: pass compression=None."
        )
    if compressed and not synchronizes(opt_state):
        logger.warning(
            "jaxcoll: %s: compression=%r is off under optax.MultiSteps, which adds what the step "
            "has summed in full: use accumulate= of the step instead, or put it before, "
            "optax.chain(synchronize(...), optax.MultiSteps(...).gradient_transformation())",
            *(_CALL, compressed[0].compression),
        )


def check_axes(call: str, opt_state: Any, axes: tuple[str, ...]) -> None:
    """Raises ValueError where an optimizer averages over other axes than a step sums over."""
    for node in synchronizers(opt_state):
        if {*node.axes} != {*axes}:
            raise ValueError(
                f"{call}: optimizer: {_CALL} averages over {node.axes}, but the batch is split "
                f"over {axes}: give both the same axes."
            )


def _is_state(node: Any) -> bool:
    return isinstance(node, SynchronizeState)


def _varies(leaf: Any, axes: tuple[str, ...]) -> bool:
    if not _compat.tracks_varying_axes():
        return True
    return any(axis in _compat.varying_axes(jax.typeof(leaf)) for axis in axes)


def _num_ranks(axes: tuple[str, ...], mesh: Mesh | None) -> int:
    return int(np.prod([mesh.shape[axis] for axis in axes])) if mesh else jax.device_count()


def _hosts(axes: tuple[str, ...], mesh: Mesh | None) -> int | str:
    """Returns on how many hosts the ranks are, host by host, or why there is no telling."""
    if jax.process_count() == 1:
        return "there is one process, and communication on a host is faster than compression"
    if not _engine.knows_hosts():
        return "jaxcoll.initialize() was not called, which finds out who is on which host"
    groups = np.array(jax.devices())[None]
    if mesh is not None:
        at = [mesh.axis_names.index(axis) for axis in axes]
        groups = np.moveaxis(mesh.devices, at, range(-len(at), 0)).reshape(
            -1, _num_ranks(axes, mesh)
        )
    patterns = {tuple(_engine.host_of(d.process_index) for d in group) for group in groups}
    counts = {_blocks(pattern) for pattern in patterns}
    if len(counts) > 1 or None in counts:
        return "the hosts have different numbers of ranks, or ranks that do not follow each other"
    (count,) = counts
    return count if count and count > 1 else "all ranks are on one host, where it takes longer"


def _blocks(hosts: Sequence[str]) -> int | None:
    """Returns how many hosts there are; None where they don't lie in equal blocks."""
    known = list(dict.fromkeys(hosts))
    size = len(hosts) // len(known)
    return len(known) if list(hosts) == [host for host in known for _ in range(size)] else None


def _padded_size(leaf: Any) -> int:
    return -(-int(np.prod(leaf.shape)) // BLOCK) * BLOCK  # no two leaves share a scale


def _num_values(leaves: Sequence[Any]) -> int:
    return sum(map(_padded_size, leaves))


def _compressed(
    leaves: Sequence[jax.Array],
    error: jax.Array,
    axes: tuple[str, ...],
    hosts: int,
    compression: Any,
) -> tuple[list[jax.Array], jax.Array]:
    if wrong := [leaf.dtype for leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.floating)]:
        raise TypeError(
            f"{_CALL}: compression={compression!r}: expected floating-point gradients, got "
            f"{wrong[0]}. Leave such leaves out with optax.masked."
        )
    share = share_size(_num_values(leaves), lax.axis_size(axes) // hosts)
    if compression == "int8" and error.shape != (share,):
        raise ValueError(
            f"{_CALL}: its state has {error.size} values on each of {lax.axis_size(axes)} ranks, "
            f"where {share} are expected. Make it with mesh=, the mesh of this shard_map, and map "
            f"SynchronizeState.error with jax.P({axes})."
        )
    flat = [
        jnp.pad(leaf.astype(jnp.float32).ravel(), (0, _padded_size(leaf) - leaf.size))
        for leaf in leaves
    ]
    joined = jnp.concatenate(flat)
    if _compat.tracks_varying_axes():
        missing = tuple(a for a in axes if a not in _compat.varying_axes(jax.typeof(joined)))
        joined = lax.pcast(joined, missing, to="varying") if missing else joined
    mean, error = compressed_mean(joined, error, axes, hosts, compression)
    ends = np.cumsum([part.size for part in flat])[:-1]
    parts = zip(jnp.split(mean, ends), leaves, strict=True)
    return [part[: leaf.size].reshape(leaf.shape).astype(leaf.dtype) for part, leaf in parts], error

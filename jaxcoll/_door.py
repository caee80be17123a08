"""The door through which XLA's own collectives come to the engine: its interface to MPI.

`csrc/mpi/door.h` says what XLA asks for there. Before a program runs for the first time, the groups
of devices that it has and no program had before are told to the engine, and a little program has
XLA ask for their communicators; it communicates with nobody, so that processes need not agree.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcoll import _compat, _compiled, _mpi_library, _native
from jaxcoll._config import accelerate_context, logger

# What XLA's calls have: counts are int, and all but reductions and all_gather count bytes.
_MAX_COUNT = 2**31 - 1
_MAX_RANKS = 256  # csrc/host/work.h, kMaxRanks
# As XLA writes them.
_TYPES = frozenset(
    [*("pred", "s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"), "f32", "f64", "c64", "c128"]
)

# As csrc/host/communicator.h, Operation::Kind.
_KINDS = {
    "all-reduce": 0,
    "all-gather": 1,
    "reduce-scatter": 2,
    "all-to-all": 3,
    "collective-permute": 4,
}

_lock = threading.RLock()
_is_open = False
_warming = threading.local()
# Client of JAX -> the groups that XLA has communicators for, by the ids of their devices.
_known: weakref.WeakKeyDictionary[Any, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()
# Group between processes -> whether programs with it are for several devices of this process.
_users: dict[tuple[int, ...], set[bool]] = {}


def problem() -> str | None:
    """Says why XLA's collectives can't come to the engine in this process, or None."""
    if reason := _native.missing_reason():
        return reason
    if reason := _compat.door_problem():
        return reason
    if _compat.backends_are_initialized():
        return "JAX has started already: call jaxcoll.initialize(accelerate=True) first"
    library = _mpi_library.path()
    if library is None:
        return "jaxcoll was installed without libjaxcoll_mpi.so"
    try:
        _mpi_library.ensure_loaded(library)
    except RuntimeError as error:
        return str(error)
    core = _native.core()
    assert core is not None
    return core.connect_mpi(library) or None


def open_() -> None:
    """Has XLA's collectives run on the engine; where `problem` has nothing to say."""
    global _is_open
    _choose()
    _compat.before_cpu_client(_choose)  # a script may have chosen another meanwhile
    _compat.hide_own_frames()
    _compat.before_loading(_announce)
    _is_open = True
    logger.info("jaxcoll: XLA's own collectives run on jaxcoll's engine")


def _choose() -> None:
    jax.config.update("jax_cpu_collectives_implementation", "mpi")


def is_open() -> bool:
    """Tells whether XLA's collectives run on the engine."""
    return _is_open


def reset() -> None:
    """Lets XLA's calls begin anew after one has failed."""
    core = _native.core()
    if _is_open and core is not None:
        core.reset_mpi()


def _announce(executable: Any, devices: Sequence[Any]) -> None:
    """Tells the engine of the groups of a program that is about to be loaded."""
    if len(devices) == 1 or devices[0].platform != "cpu" or getattr(_warming, "now", False):
        return
    try:
        collectives = _compiled.collectives_of(executable, len(devices))
    except ValueError as error:
        raise NotImplementedError(
            f"jaxcoll: a program has {error}. XLA's collectives run on jaxcoll's engine here, "
            "which has to know their groups: leave accelerate=True out."
        ) from error
    for collective in collectives:
        _refuse_what_mpi_has_not(collective)
    client = devices[0].client
    with _lock:
        known = _known.setdefault(client, set())
        for groups in dict.fromkeys(collective.groups for collective in collectives):
            for size in {len(group) for group in groups}:
                if size == 1:  # alone it would be optimised away
                    cliques = [(device,) for device in devices]
                else:
                    cliques = [tuple(devices[i] for i in g) for g in groups if len(g) == size]
                new = [clique for clique in cliques if _ids(clique) not in known]
                if any(device.process_index == client.process_index() for device in sum(new, ())):
                    _introduce(new, cliques if size == 1 else new, known)
    _warn_of_two_kinds(collectives, devices)
    for collective in collectives:
        _describe(collective, devices)


def _warn_of_two_kinds(collectives: Sequence[_compiled.Collective], devices: Sequence[Any]) -> None:
    """Says that programs can run at once on one device, and so mix up the calls of a group.

    JAX runs those for several devices of a process one after the other, and those for one; but not
    one kind after the other.
    """
    here = devices[0].client.process_index()
    has_several = sum(device.process_index == here for device in devices) > 1
    for group in dict.fromkeys(group for c in collectives for group in c.groups):
        processes = {devices[i].process_index for i in group}
        if here not in processes or len(processes) == 1:
            continue
        clique = _ids([devices[i] for i in group])
        kinds = _users.setdefault(clique, set())
        if kinds and has_several not in kinds:
            logger.warning(
                "jaxcoll: programs for one and for several devices of this process communicate "
                "over devices %s. JAX runs the two kinds at once, which gives wrong values where "
                "it does: wait for the results of one before the other starts.",
                list(clique),
            )
        kinds.add(has_several)


def _describe(collective: _compiled.Collective, devices: Sequence[Any]) -> None:
    """Tells the engine, for its errors, what the program calls a collective for."""
    core = _native.core()
    assert core is not None
    for group in collective.groups:
        if not any(devices[i].process_index == devices[0].client.process_index() for i in group):
            continue
        ids = [devices[i].id for i in group]
        for dtype, count in collective.operands:
            if (kind := _KINDS.get(collective.op)) is not None:
                core.describe_mpi(
                    ids, kind, _count(collective, dtype, count, len(group)), collective.origin
                )


def _count(collective: _compiled.Collective, dtype: str, count: int, num_ranks: int) -> int:
    """Returns what XLA counts when it passes on an operand of `count` elements."""
    match collective.op:
        case "reduce-scatter":
            return count // num_ranks
        case "collective-permute":
            return count * _compiled.bytes_of(dtype)
        case "all-to-all":  # with an operand for each rank, or one of all
            is_split = len(collective.operands) >= num_ranks
            return count * _compiled.bytes_of(dtype) // (1 if is_split else num_ranks)
        case _:
            return count


def _ids(clique: Sequence[Any]) -> tuple[int, ...]:
    return tuple(device.id for device in clique)


def _introduce(
    new: Sequence[Sequence[Any]], cliques: Sequence[Sequence[Any]], known: set[tuple[int, ...]]
) -> None:
    """Has XLA ask for the communicators of new groups, by a program over `cliques`.

    These have one size, and no device is in two of them. XLA asks once: so this can't be left half
    done, and an interrupt waits for its end.
    """
    core = _native.core()
    assert core is not None
    here = new[0][0].client.process_index()
    core.expect_communicators(
        [list(_ids(clique)) for clique in new],
        [[device.process_index for device in clique] for clique in new],
        jax.process_count() > 1,
    )
    failures: list[BaseException] = []
    # A thread of its own: what is being traced in this one, and its settings, are none of ours.
    ended = threading.Event()  # an interrupted join would take the thread for ended
    threading.Thread(target=_ask, args=(cliques, failures, ended), name="jaxcoll-door").start()
    interrupt: BaseException | None = None
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException as error:  # of a signal's handler
            interrupt = error
    made = core.expect_communicators([], [], False)
    expected = sum(device.process_index == here for clique in new for device in clique)
    if made == expected:
        known.update(map(_ids, new))
    if failures:
        raise failures[0]
    if made != expected:
        raise RuntimeError(
            f"jaxcoll: XLA asked for {made} communicators instead of {expected}: "
            f"jax {jax.__version__} is not known to this version of jaxcoll. Leave "
            "accelerate=True out."
        )
    if interrupt is not None:
        raise interrupt


def _ask(
    cliques: Sequence[Sequence[Any]], failures: list[BaseException], ended: threading.Event
) -> None:
    _warming.now = True
    try:
        with accelerate_context(False), jax.disable_jit(False), jax.debug_nans(False):
            mesh = Mesh(np.array(cliques), ("group", "rank"))
            program = jax.shard_map(
                lambda: jax.lax.psum(jax.lax.axis_index("rank").astype(jnp.float32), "rank"),
                mesh=mesh,
                in_specs=(),
                out_specs=P(),
                check_vma=False,
            )
            jax.jit(program)().block_until_ready()
    except BaseException as error:  # for the thread that waits
        failures.append(error)
    finally:
        ended.set()


def _refuse_what_mpi_has_not(collective: _compiled.Collective) -> None:
    """Raises for what XLA would pass on wrongly, or not at all, where it uses an MPI library."""
    for dtype, count in collective.operands:
        counts_elements = collective.op in ("all-reduce", "reduce-scatter", "all-gather")
        if count * (1 if counts_elements else _compiled.bytes_of(dtype)) > _MAX_COUNT:
            raise NotImplementedError(_text(collective, "XLA can't pass on so large an operand"))
        if counts_elements and dtype not in _TYPES:
            raise NotImplementedError(_text(collective, f"XLA has no MPI type for {dtype}"))
    if (size := max(map(len, collective.groups))) > _MAX_RANKS:
        raise NotImplementedError(
            _text(collective, f"a group has {size} ranks, more than {_MAX_RANKS}")
        )


def _text(collective: _compiled.Collective, problem: str) -> str:
    operands = ", ".join(f"{dtype}[{count}]" for dtype, count in collective.operands)
    return (
        f"jaxcoll: {collective.op} of {operands} ({collective.origin or 'of unknown origin'}): "
        f"{problem}. XLA's collectives run on jaxcoll's engine here; leave accelerate=True out, or "
        "call jaxcoll's function inside jax.shard_map."
    )

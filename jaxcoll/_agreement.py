"""Whether the processes of a job are about to do the same.

Cost where they are: one `all_gather` of 8 bytes from each process, which the caller waits for.
"""

import dataclasses
import functools as ft
import hashlib
import itertools as it
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxcoll._board import Board
from jaxcoll._errors import CollectiveError
from jaxcoll.collectives.all_gather import all_gather_invariant

_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """One device of each of some processes, and a program on them.

    Attributes:
        processes: who meets, in rising order.
        device: this process's.
        sharding: of the digests, one on each device.
        gather: gives all digests to each process.
        quarrels: how often they have disagreed, which all of them count alike.
    """

    processes: tuple[int, ...]
    device: Any
    sharding: NamedSharding
    gather: Callable[[jax.Array], jax.Array]
    quarrels: Iterator[int]


@ft.lru_cache(maxsize=256)
def processes_of(sharding: Sharding) -> tuple[int, ...]:
    """Returns the processes that have devices of a sharding, in rising order."""
    return tuple(sorted({device.process_index for device in sharding.device_set}))


def differences(call: str, note: Mapping[str, str], sharding: Sharding) -> str | None:
    """Says how the notes of a sharding's processes differ; None where they are the same.

    All of these processes must call it, each with its own note: what it has, by name. The text is
    the same on all, and about the first name that they do not have alike.

    Raises:
        CollectiveError: a process does not come, or calls something else.
    """
    meeting = _meeting_of(sharding)
    digest = _digest(note)
    try:
        digests = jax.block_until_ready(meeting.gather(_row(meeting, digest)))
    except (RuntimeError, ValueError) as error:  # a jitted call raises either
        raise CollectiveError(f"{call}: the processes could not compare: {error}") from error
    gathered = np.asarray(digests.addressable_data(0))
    if (gathered == digest).all():
        return None
    prefix = f"jaxcoll/quarrels/{','.join(map(str, meeting.processes))}/{next(meeting.quarrels)}"
    board = Board(call, prefix, jax.process_index(), meeting.processes)
    return _difference(meeting.processes, board.exchange("notes", dict(note)))


def _digest(note: Mapping[str, str]) -> np.ndarray:
    text = json.dumps(list(note.items()))
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.uint32)


def _row(meeting: _Meeting, digest: np.ndarray) -> jax.Array:
    mine = jax.device_put(digest[None], meeting.device)
    shape = (len(meeting.processes), *digest.shape)
    return jax.make_array_from_single_device_arrays(shape, meeting.sharding, [mine])


@ft.lru_cache(maxsize=256)
def _meeting_of(sharding: Sharding) -> _Meeting:
    devices: dict[int, Any] = {}
    for device in sorted(sharding.device_set, key=lambda device: device.id):
        devices.setdefault(device.process_index, device)
    return _meeting(tuple(devices[process] for process in processes_of(sharding)))


@ft.cache
def _meeting(devices: tuple[Any, ...]) -> _Meeting:
    mesh = Mesh(np.array(devices), ("processes",))

    def compare_processes(digests: jax.Array) -> jax.Array:
        return all_gather_invariant(digests, "processes", axis=0)

    gather = jax.shard_map(compare_processes, mesh=mesh, in_specs=P("processes"), out_specs=P())
    processes = tuple(device.process_index for device in devices)
    mine = devices[processes.index(jax.process_index())]
    sharding = NamedSharding(mesh, P("processes"))
    return _Meeting(processes, mine, sharding, jax.jit(gather), it.count())


def _difference(processes: Sequence[int], notes: Sequence[Mapping[str, Any]]) -> str:
    """Names the first thing that is not the same on all, and who has what."""
    for name in dict.fromkeys(it.chain.from_iterable(notes)):
        holders: dict[str, list[int]] = {}
        for process, note in zip(processes, notes, strict=True):
            holders.setdefault(note.get(name, "nothing"), []).append(process)
        if len(holders) > 1:
            return f"{name}: " + "; ".join(map(_held, holders.values(), holders))
    return "the order of the leaves differs between processes"


def _held(processes: Sequence[int], text: str) -> str:
    named = ", ".join(map(str, processes[:_MOST_NAMED]))
    more = f" and {len(processes) - _MOST_NAMED} more" if len(processes) > _MOST_NAMED else ""
    return f"process {named}{more} has {text}"

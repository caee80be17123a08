"""How much of the cores' time calls take from computing, by the engine's records."""

import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxcoll.diagnosis import black_box
from jaxcoll.diagnosis.records import Dumps, Place, dumps_of
from jaxcoll.diagnosis.timeline import spans
from jaxcoll.diagnosis.trace import Collector

# What a device may run on, by number.
Cores = tuple[int, ...]


def of_steps(step: Any, state: Any, batch: Any, count: int = 5) -> float:
    """Makes some steps on all devices of the job; returns `share` of them."""
    import jax

    box = black_box.own()
    assert box is not None, "benchmarks need the extension"
    collector = Collector(box)
    collector.start()
    for _ in range(count):
        state, _ = jax.block_until_ready(step(state, batch))
    parts = _gathered({**collector.end(), "cores": sorted(os.sched_getaffinity(0))})
    devices = range(jax.local_device_count())
    cores = {Place(i, device): tuple(parts[i]["cores"]) for i in parts for device in devices}
    return share(dumps_of(parts), cores)


def share(dumps: Dumps, cores: Mapping[Place, Cores]) -> float:
    """Returns the share of the cores' time that calls took from computing, from first to last.

    A device computes where it is in no call, or in a collective matmul for which all have come. In
    other calls it moves bytes, for which it needs a core as well, or waits for those that have not
    come. Devices on the same cores share them evenly, so nothing is lost where one waits while
    others keep these busy. What a device computes beside a call is not seen: as much less is lost.
    """
    changes: dict[int, list[tuple[Place, int, int]]] = defaultdict(list)
    calls = spans(dumps)
    if not calls:
        return 0.0
    for call, met, end in calls:
        changes[call.arrived].append((call.place, 1, 0))
        changes[met].append((call.place, 0, 1))
        changes[end].append((call.place, -1, -1))
    neighbors: dict[Cores, list[Place]] = defaultdict(list)
    for place, own in cores.items():
        neighbors[own].append(place)
    inside, moving = Counter[Place](), Counter[Place]()
    lost = 0.0
    for begin, end in itertools.pairwise(sorted(changes)):
        for place, of_inside, of_moving in changes[begin]:
            inside[place] += of_inside
            moving[place] += of_moving
        for own, places in neighbors.items():
            computing = sum(not inside[place] for place in places)
            busy = computing + sum(moving[place] > 0 for place in places)
            used = min(len(own), len(places))
            lost += (end - begin) * used * (1 - computing / max(busy, used))
    used = sum(min(len(own), len(places)) for own, places in neighbors.items())
    span = max(call.resumed for call, *_ in calls) - min(changes)
    return lost / (used * span)


def _gathered(part: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns the parts of all processes, of which this one's is given."""
    import jax
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(part).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(text.size)))
    padded = np.pad(text, (0, sizes.max() - text.size))
    texts = np.reshape(multihost_utils.process_allgather(padded), (jax.process_count(), -1))
    return {i: json.loads(bytes(texts[i][:size])) for i, size in enumerate(sizes)}

"""Ways to do the same thing, measured in turns: medians, and ratios of the same rounds."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from gpu_jobs import Together

LEAST_ROUNDS = 3


def in_turns(
    ways: Mapping[str, Callable[[], object]],
    together: Together,
    budget_s: float,
    most: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Returns the seconds of each way in each round; a way returns when its work is done.

    The first call of each, which may compile, does not count; the second says how many rounds
    there is time for, on process 0 for all.
    """
    for way in ways.values():
        way()
    begun = clock()
    for way in ways.values():
        way()
    one = max(clock() - begun, 1e-9)
    rounds = together.first(int(min(most, max(LEAST_ROUNDS, budget_s / one))))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            begun = clock()
            ways[name]()
            seconds[name].append(clock() - begun)
    return seconds


def summary(seconds: Mapping[str, Sequence[float]], calls: int) -> dict[str, dict[str, float]]:
    """Returns each way's median in us a call, and the median of its ratios to ours."""
    medians = {name: 1e6 * statistics.median(found) / calls for name, found in seconds.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(found, seconds["ours"], strict=True))
        for name, found in seconds.items()
        if name != "ours"
    }
    return {"us": medians, "over ours": ratios}

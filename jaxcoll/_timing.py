"""Alternating measurements: the machine's drift hits all variants alike, and cancels in ratios."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

Program = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of each variant, one entry a round; entry i of all variants is from one round."""

    seconds: Mapping[str, list[float]]

    def median_us(self, variant: str) -> float:
        """Returns the median over rounds, in microseconds."""
        return statistics.median(self.seconds[variant]) * 1e6

    def percentile_us(self, variant: str, percent: float) -> float:
        """Returns a percentile over rounds, in microseconds."""
        return float(np.percentile(self.seconds[variant], percent)) * 1e6

    def ratio(self, slower: str, faster: str) -> float:
        """Returns the median over rounds of slower / faster."""
        pairs = zip(self.seconds[slower], self.seconds[faster], strict=True)
        return statistics.median(a / b for a, b in pairs)


def measure(programs: Mapping[str, Program], rounds: int, budget_s: float = 1.5) -> Timing:
    """Runs all programs once a round, in turn, until `rounds` or the budget is reached.

    At least three rounds are made. Every program has run once before the first. Each round begins
    with another program: which one a program follows decides what it finds in caches and heap.
    """
    for program in programs.values():
        jax.block_until_ready(program())
    names = list(programs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - begin > budget_s:
            break
        first = done % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            jax.block_until_ready(programs[name]())
            seconds[name].append(time.perf_counter() - start)
    return Timing(seconds)


def slopes(short: Timing, long: Timing, short_calls: int, long_calls: int) -> Timing:
    """Returns seconds per call: what a longer chain costs more, so that the launch drops out.

    A round in which a variant's slope does not explain half of its longer chain was disturbed, and
    is dropped for all variants.
    """
    kept: dict[str, list[float]] = {name: [] for name in short.seconds}
    for i in range(min(len(next(iter(t.seconds.values()))) for t in (short, long))):
        slope = {
            name: (long.seconds[name][i] - short.seconds[name][i]) / (long_calls - short_calls)
            for name in kept
        }
        if all(slope[name] * long_calls > 0.5 * long.seconds[name][i] for name in kept):
            for name, value in slope.items():
                kept[name].append(value)
    return Timing(kept)


def count_wrong(got: Any, expected: Any) -> int:
    """Counts the elements of two trees that differ."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return sum(int((np.asarray(a) != np.asarray(b)).sum()) for a, b in pairs)

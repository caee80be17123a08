"""What rows of calls between processes are to reach, and what became of it.

An aim that is missed is excused where there is nothing to gain: where the least that a call can
take (bare_chains.py), measured in the same rounds, is not fast enough either, or ours takes no more
than that.
"""

import math
import statistics
from typing import Any

from report import KIB

Row = dict[str, Any]

OTHERS = ("lax", "mpi4jax")
# Of all rows that a library can be compared in, for each number of processes, chained and single.
MEAN_AIMS = {"mpi4jax": 2.0}
# The time of a data-parallel training step on lax over ours, by the number of processes.
STEP_AIMS = {2: 1.3}
# What is to be the least that a call takes is none where somebody takes so much less.
BEATEN = 0.9
# What takes so little more than the least takes the least: scatter is more.
AT_THE_LEAST = 1.05


def aim(row: Row, other: str) -> float | None:
    """Returns what `other`'s time over ours is to be at least; None: no aim, or not measured."""
    if f"{other}_over_native" not in row:
        return None
    if other == "mpi4jax":
        return 1.2
    if row["processes"] != 2 or row["how"] != "chained":
        return None
    if row["bytes"] > 64 * KIB:
        return 4.0
    if row["op"] != "all_reduce":
        return 10.0
    return 40.0 if row["bytes"] <= 4 * KIB else 20.0


def at_most(row: Row, other: str) -> float | None:
    """Returns the ratio of a library that takes the least; None: not known.

    A least that ours or `other` undercuts is not known: it bounds nothing.
    """
    if f"{other}_over_least" not in row:
        return None
    best = row[f"{other}_over_least"]
    return best if min(best, row["native_over_least"]) >= BEATEN else None


def verdict(ratio: float, wanted: float, best: float | None, over_least: float = math.inf) -> str:
    """Returns "met"; "limit", where the least can't meet it either, or is taken; or "open"."""
    if ratio >= wanted:
        return "met"
    if best is None:
        return "open"
    return "limit" if best < wanted or over_least <= AT_THE_LEAST else "open"


def verdict_of(row: Row, other: str) -> str:
    """Returns what became of a row's aim; "" where it has none."""
    wanted = aim(row, other)
    if wanted is None:
        return ""
    ratio, over_least = row[f"{other}_over_native"], row.get("native_over_least", math.inf)
    return verdict(ratio, wanted, at_most(row, other), over_least)


def verdict_of_step(row: Row) -> str:
    """Returns what became of a training step's aim; "" where it has none.

    At most it is lax's time over that of the step alone, without communication.
    """
    wanted = STEP_AIMS.get(row["processes"])
    if wanted is None:
        return ""
    return verdict(row["lax_over_native"], wanted, row["lax_over_alone"])


def mean(rows: list[Row], other: str) -> tuple[float, float | None, str]:
    """Returns rows' geometric mean, what it is at most if that is known, and its verdict.

    A row whose least says nothing counts with the best that anybody took.
    """
    found = statistics.geometric_mean(row[f"{other}_over_native"] for row in rows)
    bests = [
        best
        if (best := at_most(row, other)) is not None
        else max(1.0, row[f"{other}_over_native"], row[f"{other}_over_least"])
        for row in rows
        if f"{other}_over_least" in row
    ]
    best = statistics.geometric_mean(bests) if len(bests) == len(rows) else None
    wanted = MEAN_AIMS.get(other)
    return found, best, "" if wanted is None else verdict(found, wanted, best)

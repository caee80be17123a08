"""Which cases of a product of factors a test runs on."""

import functools as ft
import itertools as it
import random
from collections.abc import Sequence
from typing import Any

Choice = tuple[int, int]  # a factor, and one of its values


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns few tuples, one value of each factor in each, that hold every pair of values."""
    rng = random.Random(0)  # breaks ties
    choices = [[(i, a) for a in range(len(factor))] for i, factor in enumerate(factors)]
    missing = {pair for two in it.combinations(choices, 2) for pair in it.product(*two)} or {
        (choice,) for choice in choices[0]
    }
    cases = []
    while missing:
        case = list(min(missing))
        for k in set(range(len(factors))) - {i for i, _ in case}:
            options = rng.sample(choices[k], len(choices[k]))
            case.append(max(options, key=ft.partial(_gain, case, missing)))
        missing -= {*it.combinations(sorted(case), 2), *((choice,) for choice in case)}
        cases.append(tuple(factors[i][a] for i, a in sorted(case)))
    return cases


def each_value(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns few tuples that hold every value of each factor, in an order that mixes them."""
    rng = random.Random(0)
    count = max(map(len, factors))
    columns = [(list(factor) * count)[:count] for factor in factors]
    return list(zip(*(rng.sample(column, count) for column in columns), strict=True))


def pairwise_but(alone: int, *factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns tuples that hold every pair of values, but of one factor each value alone."""
    others = pairwise(*factors[:alone], *factors[alone + 1 :])
    count = max(len(others), len(factors[alone]))
    drawn = random.Random(0).sample((list(factors[alone]) * count)[:count], count)
    return [
        (*case[:alone], value, *case[alone:])
        for value, case in zip(drawn, it.cycle(others), strict=False)
    ]


def pairwise_of_some(
    which: int, some: Sequence[Any], *factors: Sequence[Any]
) -> list[tuple[Any, ...]]:
    """Returns tuples that hold every pair of values, but of one factor only pairs of `some` values.

    Each of its other values occurs once.
    """
    pairs = pairwise(*factors[:which], some, *factors[which + 1 :])
    others = [value for value in factors[which] if value not in some]
    mixed = random.Random(0).sample(pairs, len(pairs))
    return pairs + [
        (*case[:which], value, *case[which + 1 :])
        for value, case in zip(others, it.cycle(mixed), strict=False)
    ]


def _gain(case: list[Choice], missing: set[tuple[Choice, ...]], option: Choice) -> int:
    return sum(tuple(sorted((choice, option))) in missing for choice in case)

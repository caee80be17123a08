"""The choice of cases: what it must cover, and that it is small."""

import itertools as it

import pytest
from cases import each_value, pairwise

FACTORS = ("abcdefg", "12345", (True, False), "xyz", "u")


@pytest.mark.parametrize("count", range(1, len(FACTORS) + 1))
def test_every_value_and_every_pair(count: int):
    factors = FACTORS[:count]
    pairs, values = pairwise(*factors), each_value(*factors)
    for i, factor in enumerate(factors):
        assert {case[i] for case in pairs} == {case[i] for case in values} == set(factor)
    for i, j in it.combinations(range(count), 2):
        assert {(case[i], case[j]) for case in pairs} == set(it.product(factors[i], factors[j]))
    assert len(values) == 7
    assert len(pairs) < 1.5 * 7 * (5 if count > 1 else 1)


def test_the_same_cases_every_time():
    assert pairwise(*FACTORS) == pairwise(*FACTORS)
    assert each_value(*FACTORS) == each_value(*FACTORS)

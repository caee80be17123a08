"""The choice of cases: what it must cover, and that it is small."""

import itertools as it

import pytest
from cases import each_value, pairwise, pairwise_but, pairwise_of_some

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


@pytest.mark.parametrize("alone", range(len(FACTORS)))
def test_every_pair_but_of_one_factor(alone: int):
    cases = pairwise_but(alone, *FACTORS)
    assert {case[alone] for case in cases} == {*FACTORS[alone]}
    others = [i for i in range(len(FACTORS)) if i != alone]
    for i, j in it.combinations(others, 2):
        assert {(case[i], case[j]) for case in cases} == {*it.product(FACTORS[i], FACTORS[j])}
    assert len(cases) <= max(7, len(pairwise(*(FACTORS[i] for i in others))))


@pytest.mark.parametrize("which", range(4))
def test_every_pair_of_some_values(which: int):
    some = FACTORS[which][:2]
    cases = pairwise_of_some(which, some, *FACTORS)
    assert {case[which] for case in cases} == {*FACTORS[which]}
    chosen = [*FACTORS[:which], some, *FACTORS[which + 1 :]]
    for i, j in it.combinations(range(len(FACTORS)), 2):
        assert {(case[i], case[j]) for case in cases} >= {*it.product(chosen[i], chosen[j])}
    assert len(cases) == len(pairwise(*chosen)) + len(FACTORS[which]) - len(some)


def test_the_same_cases_every_time():
    assert pairwise(*FACTORS) == pairwise(*FACTORS)
    assert pairwise_but(1, *FACTORS) == pairwise_but(1, *FACTORS)
    assert pairwise_of_some(0, "ab", *FACTORS) == pairwise_of_some(0, "ab", *FACTORS)
    assert each_value(*FACTORS) == each_value(*FACTORS)

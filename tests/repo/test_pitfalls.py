"""`pitfalls.py` has every pitfall of docs/proof.md, and edits that fit; one of them is tried."""

import dataclasses
import pathlib

import pytest
from pages import named_tests, pitfalls
from repo.pitfalls import MUTANTS, WITHOUT, Mutant, check

PACKAGE = pathlib.Path(__file__).parents[2] / "jaxcoll"


def test_every_pitfall_is_there():
    broken = {mutant.pitfall for mutant in MUTANTS}
    assert broken | {*WITHOUT} == {pitfall for pitfall, _ in pitfalls()}
    assert not broken & {*WITHOUT}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.pitfall)
def test_the_text_stands_once(mutant: Mutant):
    assert (PACKAGE / mutant.file).read_text().count(mutant.old) == 1
    file, name = mutant.test.partition("[")[0].split("::")
    assert (file, name) in named_tests(dict(pitfalls())[mutant.pitfall])


def test_a_test_that_fails_with_its_mutant_alone():
    (mutant,) = (m for m in MUTANTS if m.file == "parallel/stages.py")
    assert check(mutant) is not None
    assert check(dataclasses.replace(mutant, new=mutant.old)) is None

"""The rules that `tests/cpp/mutants.py` breaks stand in the sources as it says."""

import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def _mutants() -> list:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests/cpp/mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # which dataclasses look up
    spec.loader.exec_module(module)
    return module.MUTANTS


@pytest.mark.parametrize("mutant", _mutants(), ids=lambda mutant: mutant.rule)
def test_the_text_stands_once(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    test = (ROOT / f"tests/cpp/{mutant.test[0]}_test.cc").read_text()
    assert f'"{mutant.test[1]}"' in test

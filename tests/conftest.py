"""Eight simulated devices for every test of this process, and the choice of cases.

`@pytest.mark.product(op=OPS, size=SIZES)` runs a test on enough cases that every pair of values
occurs; with `--full`, on the whole product.
"""

import functools as ft
import itertools as it
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
from checks import native_missing

import jaxcoll

# Not what somebody once measured on this machine.
os.environ["JAXCOLL_CROSSOVERS"] = os.devnull + "/none"
jaxcoll.simulate_cpu_devices(8)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run whole products of cases")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "product(**factors): cases for each pair of values")
    config.addinivalue_line("markers", "full: runs only with --full")


def pytest_report_header() -> str:
    reason = native_missing()
    return f"jaxcoll: backend={jaxcoll.config.backend}, native {reason or 'available'}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("product")
    if marker is None:
        return
    names, factors = list(marker.kwargs), [list(values) for values in marker.kwargs.values()]
    cases = list(it.product(*factors)) if metafunc.config.option.full else pairwise(*factors)
    ids = ["-".join(map(_id, names, case)) for case in cases]
    metafunc.parametrize(names, cases if len(names) > 1 else [case[0] for case in cases], ids=ids)


def _id(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    return (
        f"{name}{value}" if isinstance(value, int) else getattr(value, "name", None) or str(value)
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.full:
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="runs with --full"))


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


def _gain(case: list[Choice], missing: set[tuple[Choice, ...]], option: Choice) -> int:
    return sum(tuple(sorted((choice, option))) in missing for choice in case)

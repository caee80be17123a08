"""Eight simulated devices for every test of this process, and the choice of cases.

`@pytest.mark.product(op=OPS, size=SIZES)` runs a test on enough cases that every pair of values
occurs, where the path, native or lax, and the version of JAX are two more factors: natively on one
JAX all pairs of the others, on lax and with `--each-value` on another JAX each value, as for tests
that compile long, `@pytest.mark.slow`, of which another JAX gets every fourth case; of those with
`@pytest.mark.slow("size")` all pairs but those of the size. Where all ops of one function are alike
to what a test looks at, `@pytest.mark.alike`, pairs hold one op of each function, and the others
occur once. With `--full`, all run the whole product.

Of cases in a plain list, `--each-value` runs every eighth, and without a product nothing that is
slow.
"""

import collections
import gc
import itertools as it
import os
import pathlib
from typing import Any

import pytest
import quick
from cases import each_value, pairwise, pairwise_but, pairwise_of_some
from checks import auto_is_native, native_missing
from helpers import EXAMPLES

import jaxcoll

TESTS = pathlib.Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run whole products of cases")
    parser.addoption("--quick", action="store_true", help="compile as quickly with --full")
    parser.addoption(
        "--each-value",
        action="store_true",
        help="run each value of a product, not each pair, and an eighth of other lists of cases",
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(50_000, 20, 50)  # JAX makes much that lives long
    # Not what somebody once measured on this machine.
    os.environ["JAXCOLL_CROSSOVERS"] = os.devnull + "/none"
    os.environ["JAXCOLL_DUMP_DIR"] = "none"  # tests that fail calls leave nothing
    os.environ.pop("OPENBLAS_CORETYPE", None)  # or "auto" leaves matmuls to XLA
    if config.option.quick or not config.option.full:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick.XLA_FLAGS}".strip()
        quick.draw_quickly()
    jaxcoll.simulate_cpu_devices(8)
    config.addinivalue_line("markers", "product(**factors): cases for each pair of values")
    config.addinivalue_line("markers", "slow(factor): of a product, or that factor, each value;")
    config.addinivalue_line("markers", "slow: without a product, --each-value leaves it out")
    config.addinivalue_line("markers", "alike: of a product, pairs of one op of each function")
    config.addinivalue_line("markers", "full: runs only with --full")
    config.addinivalue_line("markers", "long: the same, and CI leaves it to `make test-all`")


def pytest_report_header() -> str:
    reason = native_missing()
    return f"jaxcoll: backend={jaxcoll.config.backend}, native {reason or 'available'}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("product")
    if marker is None:
        return
    names, factors = list(marker.kwargs), [list(values) for values in marker.kwargs.values()]
    slow = _slow(metafunc)
    if metafunc.config.option.full:
        cases = list(it.product(*factors))
    elif metafunc.config.option.each_value or not auto_is_native() or slow == ():
        cases = each_value(*factors)
        if metafunc.config.option.each_value and auto_is_native() and slow == ():
            cases = cases[::4]
    elif slow:
        cases = pairwise_but(names.index(*slow), *factors)
    elif metafunc.definition.get_closest_marker("alike"):
        which = names.index("op")
        some = [op for op in factors[which] if op in EXAMPLES]
        cases = pairwise_of_some(which, some, *factors)
    else:
        cases = pairwise(*factors)
    ids = ["-".join(map(_id, names, case)) for case in cases]
    metafunc.parametrize(names, cases, ids=ids)


def _slow(metafunc: pytest.Metafunc) -> tuple[str, ...] | None:
    """Returns what the mark `slow` names, or None without it."""
    marker = metafunc.definition.get_closest_marker("slow")
    return None if marker is None else marker.args


def _id(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    if isinstance(value, int):
        return f"{name}{value}"
    return getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)


# Few tests that take long: begun first, so that no worker is left with them at the end.
LONG = ("processes", "stress", "examples", "docs", "test_bench.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.relative_to(TESTS).parts[0] not in LONG)
    if config.option.each_value:
        left_out = {*_seven_of_eight(items), *_slow_without_a_product(items)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if not config.option.full:
        for item in items:
            if item.get_closest_marker("full") or item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="runs with --full"))


def _slow_without_a_product(items: list[pytest.Item]) -> list[pytest.Item]:
    return [
        item
        for item in items
        if item.get_closest_marker("slow") and not item.get_closest_marker("product")
    ]


def _seven_of_eight(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns those of each plain list of cases that `--each-value` leaves out."""
    counts: collections.Counter[str] = collections.Counter()
    found = []
    for item in items:
        name, _, case = item.nodeid.partition("[")
        if case and item.get_closest_marker("product") is None:
            if counts[name] % 8:
                found.append(item)
            counts[name] += 1
    return found

"""What the pages of `benchmarks/zero_step.py` and `plan_step.py` say of rows that are behind."""

import importlib
from typing import Any

import pytest
from benchmark_modules import importable

from jaxcoll.diagnosis.records import Call, Dumps, Place

with importable():
    lost_time: Any = importlib.import_module("lost_time")
    three_ways: Any = importlib.import_module("three_ways")
    PAGES: Any = {
        "zero": importlib.import_module("zero_report").markdown,
        "plan": importlib.import_module("plan_report").PAGES["plan"],
    }


def row(lax: float, limit: float, better: float = 1.0, **columns: Any) -> dict[str, Any]:
    ratio = {"lax": lax, "better": better}
    usual = {"processes": 2, "devices": 1, "axes": {"data": 2}, "strategy": "ZeRO-1"}
    usual |= {"schedule": "1f1b"}
    times = dict.fromkeys(three_ways.WAYS, 1.0)
    usual |= {"model": [160, 4, 3, 16, 128], "ms": times, "peak bytes": times, "equal": True}
    return {**usual, "ratio": ratio, "limit": limit, **columns}


def listed(section: Any, *rows: dict[str, Any]) -> list[list[str]]:
    """Returns the cells of a section's table, but for the first."""
    lines = section(list(rows), lambda row: row["strategy"])
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("|---")) + 1 :]
    return [line.strip("| ").split(" | ")[1:] for line in table]


@pytest.mark.parametrize(
    ("lax", "limit", "expected"),
    [
        (1.04, 1.25, "our calls take 16.8% of the cores' time: no faster ones reach 1.3"),
        (1.17, 1.299, "our calls take 9.9% of the cores' time: no faster ones reach 1.3"),
        (1.17, 1.3, "our calls take 10.0% of the cores' time"),
        (1.299, 2.598, "our calls take 50.0% of the cores' time"),
        # A pipeline in its bubble alone.
        (1.05, 1.05, "our calls take 0.0% of the cores' time: no faster ones reach 1.3"),
    ],
)
def test_why_a_row_is_not_far_enough_before_lax(lax: float, limit: float, expected: str):
    cells = [f"{lax:.2f}", f"{limit:.2f}", expected]
    assert listed(three_ways.below_aim, row(lax, limit)) == [cells]


def test_rows_below_the_aim():
    """Of several processes alone, the farthest behind first."""
    rows = row(1.3, 2.0), row(1.2, 2.0), row(1.1, 2.0, processes=4), row(1.0, 2.0, processes=1)
    assert [cells[0] for cells in listed(three_ways.below_aim, *rows)] == ["1.10", "1.20"]


@pytest.mark.parametrize(("lax", "cause"), [(0.96, "GSPMD"), (0.94, "our calls, 6%; GSPMD")])
def test_why_a_row_is_behind_the_better(lax: float, cause: str):
    rows = row(lax, 2.0, better=0.9), row(lax, 2.0, better=0.95)
    assert listed(three_ways.losing, *rows) == [["0.90", f"{lax:.2f}", cause]]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_both_sections(name: str):
    of = {"date": "", "cores": 2, "cpu": "", "jax": "", "python": ""}
    result = {"command": "", "environment": of, "rounds": 9, "rows": [row(1.2, 1.6, better=0.9)]}
    page = PAGES[name](result)
    for title in ("Below 0.95 of the better of both", "Below 1.3 of lax between processes"):
        assert f"\n## {title}\n" in page


def test_lost_time_by_hand():
    """Of 100 ms: a wait of 30, 10 to move; a wait of 10 and a collective matmul of 40."""
    calls = [
        Call(Place(p, d), 1, site, 9, rank, execution, 1, *(10**6 * t for t in (a, a, e, e)))
        for site, execution, rank, p, d, a, e in (
            (1, 1, 0, 0, 0, 0, 40), (1, 1, 1, 1, 0, 30, 40),
            (2, 2, 0, 0, 0, 60, 100), (2, 2, 1, 1, 0, 50, 100),
        )
    ]  # fmt: skip
    sites = {"1": [{"op": "all_reduce"}], "2": [{"op": "all_gather_matmul"}]}
    dumps = Dumps({0: {"sites": sites}, 1: {"sites": sites}}, calls)
    # Each on its core: 40, and 10 and 10, of 200.
    assert lost_time.share(dumps, {Place(0, 0): (0,), Place(1, 0): (1,)}) == pytest.approx(0.3)
    # Both on one: only while both are in calls.
    assert lost_time.share(dumps, {Place(0, 0): (0,), Place(1, 0): (0,)}) == pytest.approx(0.1)
    # A third that makes no call computes meanwhile, and shares the core with those that move.
    places = {Place(0, 0): (0,), Place(1, 0): (0,), Place(1, 1): (0,)}
    assert lost_time.share(dumps, places) == pytest.approx(0.1 * 2 / 3)
    # Three on two cores: nothing is lost by waiting, and a third of those of the 10 ms.
    places = dict.fromkeys(places, (0, 1))
    assert lost_time.share(dumps, places) == pytest.approx(0.1 * 2 / 3)

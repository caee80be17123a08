"""What the pages of `benchmarks/zero_step.py` and `plan_step.py` say of rows that are behind."""

import importlib
import pathlib
import sys
from typing import Any

import pytest

# For a moment: benchmarks have modules of the same names as tests.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
try:
    three_ways: Any = importlib.import_module("three_ways")
    PAGES: Any = {
        "zero": importlib.import_module("zero_report").markdown,
        "plan": importlib.import_module("plan_report").PAGES["plan"],
    }
finally:
    del sys.path[0]


def row(lax: float, limit: float, better: float = 1.0, **columns: Any) -> dict[str, Any]:
    ratio = {"lax": lax, "better": better}
    usual = {"processes": 2, "devices": 1, "axes": {"data": 2}, "strategy": "ZeRO-1"}
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
        (1.04, 1.25, "our calls take 16.8% of the step: no faster ones reach 1.3"),
        (1.17, 1.299, "our calls take 9.9% of the step: no faster ones reach 1.3"),
        (1.17, 1.3, "our calls take 10.0% of the step"),
        (1.299, 2.598, "our calls take 50.0% of the step"),
        # A pipeline in its bubble alone.
        (1.05, 1.05, "our calls take 0.0% of the step: no faster ones reach 1.3"),
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

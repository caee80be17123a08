"""What `benchmarks/matmul.py` makes of its times: ratios of rounds, and aims that are missed."""

import importlib
from typing import Any

import pytest
from benchmark_modules import importable

with importable():
    matmul_report: Any = importlib.import_module("matmul_report")

USUAL = {"native": 1.3, "auto": 1.2, "two steps": 2.0, "ring": 1.8, "alone": 1.0, "collective": 0.4}


def row(*, processes: int = 2, m: int = 1024, rounds: int = 3, **seconds: float) -> dict[str, Any]:
    times = {way: [one] * rounds for way, one in {**USUAL, **seconds}.items()}
    return {"processes": processes, "devices": 1, "m": m, "k": 1024, "n": 256, "times": times}


def test_figures():
    found = matmul_report.figures(row(shared=0.3, read=0.2))
    assert found["ratio"] == pytest.approx(1.8 / 1.3)
    assert found["auto ratio"] == pytest.approx(1.8 / 1.2)
    assert found["beside alone"] == pytest.approx(1.2)
    assert found["moved"] == pytest.approx(200.0)
    assert found["beside least"] == pytest.approx(1.2 / 1.2)
    assert found["hidden"] == pytest.approx((0.4 + 1.0 - 1.2) / 0.4)
    assert found["rounds"] == 3


def test_ratios_are_of_rounds():
    one = row()
    one["times"] |= {"auto": [1.0, 10.0, 3.0], "ring": [2.0, 10.0, 9.0], "alone": [1.0, 5.0, 3.0]}
    found = matmul_report.figures(one)
    assert found["auto ratio"] == pytest.approx(2 / 3)  # of two steps, whose median is less
    assert found["beside alone"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ({"auto": 1.04}, ""),
        ({"auto": 1.06, "shared": 0.0}, "beyond alone"),
        ({"auto": 1.06, "shared": 0.02}, "limit"),
        ({"auto": 1.06, "shared": 0.02, "processes": 1}, ""),  # one process has no such aim
        ({"auto": 1.06, "shared": 0.0, "m": 1023}, ""),
        ({"auto": 1.04, "ring": 0.98}, "slower than lax"),
        ({"auto": 1.04, "ring": 1.0}, ""),
        ({"auto": 1.2, "shared": 0.1, "ring": 1.0}, "slower than lax, beyond alone"),
    ],
)
def test_aims(of: dict[str, Any], expected: str):
    assert matmul_report.figures(row(**{"shared": 0.0, **of}))["misses"] == expected


def test_the_page():
    rows = []
    for auto in (1.04, 1.1, 1.2):
        one = row(auto=auto, shared=0.1)
        one |= {"kind": "all_gather_matmul", "path": "two-step", "equal": True}
        one |= matmul_report.figures(one)
        rows.append(one)
    environment = {"date": "2026-01-01", "cores": 2, "cpu": "A", "jax": "1", "python": "3"}
    result = {"environment": environment, "command": "it", "blas": "B", "rounds": 3, "rows": rows}
    page = matmul_report.markdown(result)
    said = "Of 3 such rows 1 are within 5% of the matmul alone, 1 more within 5% of the least"
    assert said in page
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert "| 1024, 1024, 256 | two-step | 1300.000 | 1200.000 |" in table[-1]
    assert table[-1].endswith("| 3 | beyond alone | equal |")

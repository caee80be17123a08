"""What `benchmarks/processes.py` makes of its rows: aims met, aims out of reach, and others."""

import importlib
from typing import Any

import pytest
from benchmark_modules import importable

with importable():
    process_aims: Any = importlib.import_module("process_aims")
    process_report: Any = importlib.import_module("process_report")


def row(**columns: Any) -> dict[str, Any]:
    usual = {"op": "ppermute", "processes": 2, "bytes": 256, "how": "chained"}
    return {**usual, "native_us": 1.0, "rounds": 5, "wrong": 0, **columns}


def test_rows_of_several_jobs_become_one():
    jobs = [
        [row(native_us=us, least_way=way, line_ns=[ns, ns], lax_rounds=2, wrong=wrong)]
        for us, way, ns, wrong in ((1.0, "read", 1, 0), (9.0, "window", 2, 3), (2.0, "read", 3, 0))
    ]
    expected = row(
        **{"native_us": 2.0, "least_way": "read, window", "line_ns": [1, 1, 2, 2, 3, 3]},
        **{"rounds": 15, "lax_rounds": 6, "wrong": 3},
    )
    assert process_report.pooled(jobs) == [expected]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"bytes": 4 << 10}, 10.0),
        ({"bytes": 64 << 10}, 10.0),
        ({"bytes": 1 << 20}, 4.0),
        ({"op": "all_reduce", "bytes": 4 << 10}, 40.0),
        ({"op": "all_reduce", "bytes": 64 << 10}, 20.0),
        ({"op": "all_reduce", "bytes": 1 << 20}, 4.0),
        ({"how": "single"}, None),
        ({"processes": 4}, None),
    ],
)
def test_aims(columns: dict[str, Any], expected: float | None):
    measured = row(**columns, lax_over_native=1.0, mpi4jax_over_native=1.0)
    assert process_aims.aim(measured, "lax") == expected
    assert process_aims.aim(measured, "mpi4jax") == 1.2
    assert process_aims.aim(row(**columns), "mpi4jax") is None  # not measured


@pytest.mark.parametrize(
    ("ours", "theirs_to_least", "ours_to_least", "expected"),
    [
        (1.2, 1.3, 1.1, "met"),
        (1.2, None, None, "met"),
        (1.0, 1.19, 1.2, "limit"),
        (1.0, 1.2, 1.2, "open"),
        # Who takes the least has nothing to gain.
        (1.0, 1.2, 1.05, "limit"),
        (1.0, 1.2, 1.06, "open"),
        (1.0, None, None, "open"),
        # What is undercut is not the least: by them, by us, by no more than noise.
        (1.0, 0.89, 0.9, "open"),
        (1.0, 1.1, 0.89, "open"),
        (1.0, 0.9, 0.9, "limit"),
    ],
)
def test_verdicts(
    ours: float, theirs_to_least: float | None, ours_to_least: float | None, expected: str
):
    measured = row(mpi4jax_over_native=ours)
    if theirs_to_least is not None:
        measured |= {"mpi4jax_over_least": theirs_to_least, "native_over_least": ours_to_least}
    assert process_aims.verdict_of(measured, "mpi4jax") == expected
    assert process_aims.verdict_of(measured, "lax") == ""


@pytest.mark.parametrize(
    ("processes", "ratio", "best", "expected"),
    [(2, 1.3, 1.4, "met"), (2, 1.2, 1.29, "limit"), (2, 1.2, 1.3, "open"), (4, 1.0, 1.1, "")],
)
def test_what_became_of_the_training_step(processes: int, ratio: float, best: float, expected: str):
    step = {"processes": processes, "lax_over_native": ratio, "lax_over_alone": best}
    assert process_aims.verdict_of_step(step) == expected


def test_means():
    two = [
        row(mpi4jax_over_native=1.0, mpi4jax_over_least=1.0, native_over_least=1.0),
        row(mpi4jax_over_native=2.25, mpi4jax_over_least=3.61, native_over_least=1.6),
    ]
    assert process_aims.mean(two, "mpi4jax") == (1.5, pytest.approx(1.9), "limit")
    two[1]["mpi4jax_over_least"] = 4.41
    assert process_aims.mean(two, "mpi4jax") == (1.5, pytest.approx(2.1), "open")
    two[0] |= {"native_over_least": 0.5, "mpi4jax_over_least": 0.5}  # the best is theirs, and ours
    assert process_aims.mean(two, "mpi4jax") == (1.5, pytest.approx(2.1), "open")
    del two[0]["mpi4jax_over_least"]  # what one row can be is not known
    assert process_aims.mean(two, "mpi4jax") == (1.5, None, "open")


def test_the_page():
    rows = [
        row(
            **{"lax_us": 20.0, "lax_over_native": 20.0, "lax_over_least": 25.0},
            **{"mpi4jax_us": 1.1, "mpi4jax_over_native": 1.1, "mpi4jax_over_least": 1.375},
            **{"least_us": 0.8, "least_way": "window", "native_over_least": 1.25},
            nothing_us=0.2,
            line_ns=[105, 520],
            lax_rounds=3,
        ),
        row(bytes=1 << 20, mpi4jax_us=1.0, mpi4jax_over_native=1.0),
    ]
    environment = {"date": "2026-01-01", "cores": 2, "cpu": "A", "jax": "1", "python": "3"}
    step = {"processes": 2, "parameters": 1000, "tokens_per_step": 8, "rounds": 10}
    step |= {"native_ms": 4.0, "lax_ms": 5.0, "alone_ms": 3.9}
    step |= {"lax_over_native": 1.25, "lax_over_alone": 1.28}
    results = {
        "environment": environment,
        "processes": rows,
        "train_step": [step],
        "command": "a command",
    }
    lines = process_report.markdown(results).splitlines()
    shown = (
        "| ppermute | 256 B | chained | 1.0 | 20.0 | 1.1 | 0.8 | window "
        "| 20.0 | 25 | 10 | met | 1.1 | 1.375 | 1.2 | open | 105, 520 | 3 | 5 | 0 |"
    )
    assert shown in lines
    assert "| 2 | chained | lax | 1 | 0 | 0 | 20.00 | 25.00 |  |  |" in lines
    assert "| 2 | chained | mpi4jax | 0 | 0 | 2 | 1.05 |  | 2 | open |" in lines
    missed = lines[lines.index("### Missed") : lines.index("### What of a short call is XLA's own")]
    assert missed[4:-1] == [
        "| 2 | ppermute | 256 B | chained | mpi4jax | 1.1 | 1.375 | 1.2 | 1.25 | open |",
        "| 2 | ppermute | 1 MiB | chained | mpi4jax | 1.0 |  | 1.2 |  | open |",
    ]
    assert "| 2 | ppermute | 256 B | 1.0 | 1.1 | 0.8 | 0.2 |" in lines
    assert lines[-1] == "| 2 | 1,000 | 8 | 4.0 | 5.0 | 3.9 | 1.25 | 1.28 | 1.3 | limit | 10 |"
    widths = {line.count("|") for line in lines if line.startswith("| ") and "window" in line}
    assert widths == {lines[lines.index(shown) - 1].count("|")}

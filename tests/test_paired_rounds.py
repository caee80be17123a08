"""How the benchmarks time variants in turn (`benchmarks/paired_rounds.py`)."""

import functools as ft
import importlib
from typing import Any

from benchmark_modules import importable

with importable():
    paired_rounds: Any = importlib.import_module("paired_rounds")

ROUNDS = 20


def test_programs_run_in_every_order():
    """Or the launch of whatever always runs first of a variant counts for the others' calls."""
    ran: list[str] = []
    programs = {name: [ft.partial(ran.append, f"{name}{i}") for i in (0, 1)] for name in "ab"}
    seconds = paired_rounds.measure(programs, lambda: None, budget_s=0, least_rounds=ROUNDS)
    assert {name: [len(of) for of in times] for name, times in seconds.items()} == {
        "a": [ROUNDS, ROUNDS],
        "b": [ROUNDS, ROUNDS],
    }
    timed = ran[-4 * ROUNDS :]
    rounds = [timed[4 * i : 4 * i + 4] for i in range(ROUNDS)]
    assert all(sorted(of) == ["a0", "a1", "b0", "b1"] for of in rounds)
    for one, other in (("a0", "a1"), ("a0", "b0"), ("b0", "b1")):
        assert {of.index(one) < of.index(other) for of in rounds} == {True, False}

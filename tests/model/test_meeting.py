"""The meeting of one process's ranks in every order of their steps, deadlines among them."""

import dataclasses

import pytest
from model.explore import ViolationError
from model.meeting import RULES, Job

JOBS = [
    Job(ranks=2, runs=3),
    Job(ranks=3, runs=2, chunks=3, helpers=0),
    Job(ranks=2, runs=3, deadlines=1),
    Job(ranks=3, runs=3, helpers=0, deadlines=1),
    Job(ranks=3, runs=2, helpers=0, early=True, deadlines=1),
    Job(ranks=3, runs=2, helpers=0, early=True, cores=1),
    Job(ranks=2, runs=3, early=True, deadlines=1),
    Job(ranks=3, runs=1, early=True, deadlines=1),
    Job(ranks=2, runs=2, chunks=3, helpers=2),
]
# With the most orders of steps.
LARGE = Job(ranks=3, runs=2, early=True, deadlines=1)


def _id(job: Job) -> str:
    early = ", early" if job.early else ""
    faults = f"{job.deadlines} deadlines{early}"
    return f"{job.ranks} ranks, {job.runs} runs, {job.helpers} helpers, {faults}"


@pytest.mark.parametrize("job", [*JOBS, pytest.param(LARGE, marks=pytest.mark.long)], ids=_id)
def test_every_order_of_steps_ends_right(job: Job):
    assert job.explored() > 100


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str):
    for job in JOBS:
        try:
            dataclasses.replace(job, without=frozenset({rule})).explored()
        except ViolationError:
            return
    raise AssertionError(f"without the rule {rule!r}, nothing goes wrong: the model misses it")

"""The protocols between processes in every order of their steps, with faults at every step."""

import dataclasses

import pytest
from model import bell
from model.explore import ViolationError, explore
from model.protocol import RULES, Job

NO_FAULTS = [
    Job(processes=2, calls=3),
    Job(processes=3, calls=3),
    Job(processes=2, calls=2, rounds=4),
    Job(processes=3, calls=1, rounds=3),
]
WITH_FAULTS = [
    Job(processes=2, calls=3, faults=1, kinds=frozenset({"crash"})),
    Job(processes=3, calls=2, faults=1, kinds=frozenset({"crash"})),
    Job(processes=2, calls=3, faults=1, kinds=frozenset({"stop", "deadline"})),
    Job(processes=3, calls=2, faults=1, kinds=frozenset({"stop", "deadline"})),
    Job(processes=2, calls=2, rounds=3, faults=1, kinds=frozenset({"crash", "stop", "deadline"})),
]


def run(job: Job) -> int:
    return explore(job.start(), job.steps, job.check, job.check_end)


def _id(job: Job) -> str:
    kinds = "-".join(sorted(job.kinds)) or "no faults"
    return f"{job.processes} processes, {job.calls} calls, {job.rounds} rounds, {kinds}"


@pytest.mark.parametrize("job", [*NO_FAULTS, *WITH_FAULTS], ids=_id)
def test_every_order_of_steps_ends_right(job: Job):
    assert run(job) > 100


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str):
    broken = []
    for job in [*NO_FAULTS, *WITH_FAULTS]:
        try:
            run(dataclasses.replace(job, without=frozenset({rule})))
        except ViolationError as violation:
            broken.append(violation)
            break
    assert broken, f"without the rule {rule!r}, nothing goes wrong: the model does not see it"


def test_no_wake_up_is_lost():
    assert bell.run() > 10


@pytest.mark.parametrize("rule", bell.RULES)
def test_each_rule_of_the_bell_is_needed(rule: str):
    with pytest.raises(ViolationError, match="sleeps for ever"):
        bell.run(without=rule)

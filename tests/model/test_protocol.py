"""The protocols between processes in every order of their steps, with faults at every step."""

import dataclasses

import pytest
from model import bell
from model.explore import ViolationError, explore
from model.protocol import RULES, Job

NO_FAULTS = [
    Job(processes=2, calls=3),
    Job(processes=2, calls=2, rounds=4),
    Job(processes=3, calls=1, rounds=3),
    Job(processes=3, calls=4, routes=("from 0",)),
    Job(processes=3, calls=3, routes=("from 0", "all", "from 1")),
    Job(processes=2, calls=3, rounds=3, routes=("from 0", "ring")),
    Job(processes=2, calls=4, routes=("direct from 0", "from 1", "from 1")),
    Job(processes=2, calls=3, routes=("direct all", "from 0")),
]
CRASH = frozenset({"crash"})
WITH_FAULTS = [
    Job(processes=2, calls=3, faults=1, kinds=CRASH),
    Job(processes=3, calls=2, faults=1, kinds=CRASH),
    Job(processes=2, calls=3, faults=1, kinds=frozenset({"stop", "deadline"})),
    Job(processes=2, calls=2, rounds=3, faults=1, kinds=frozenset({"crash", "stop", "deadline"})),
    Job(processes=2, calls=4, routes=("from 0",), faults=1, kinds=CRASH),
    Job(processes=3, calls=2, routes=("from 0", "ring"), faults=1, kinds=CRASH),
]
# With the most orders of steps. Where a process may give up, no state is one in which all wait for
# ever: each of these jobs is explored without deadlines, too.
STOP, ANY = frozenset({"stop"}), frozenset({"crash", "stop", "deadline"})


def _with_any_fault(*routes: str) -> list[Job]:
    kinds = (frozenset(), CRASH, STOP, ANY)
    return [Job(processes=3, calls=3, routes=routes, faults=bool(of), kinds=of) for of in kinds]


LARGE = [
    Job(processes=3, calls=4, routes=("ring",)),
    *_with_any_fault("all"),
    *_with_any_fault("direct ring", "ring")[:-1],
]
LARGEST = [
    _with_any_fault("direct ring", "ring")[-1],
    *_with_any_fault("direct ring", "from 1"),
    *_with_any_fault("from 0", "all", "from 1"),
]


def run(job: Job) -> int:
    return explore(job.start(), job.steps, job.check, job.check_end)


def _id(job: Job) -> str:
    kinds = "-".join(sorted(job.kinds)) or "no faults"
    routes = ", ".join(job.routes)
    return f"{job.processes} processes, {job.calls} calls: {routes}, {job.rounds} rounds, {kinds}"


@pytest.mark.parametrize(
    "job",
    [
        *NO_FAULTS,
        *WITH_FAULTS,
        *(pytest.param(job, marks=pytest.mark.full) for job in LARGE),
        *(pytest.param(job, marks=pytest.mark.long) for job in LARGEST),
    ],
    ids=_id,
)
def test_every_order_of_steps_ends_right(job: Job):
    assert run(job) > 100


# Whose jobs have so many orders of steps that it takes ten seconds and more.
LONG = {"failure before result"}


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[pytest.mark.full] * (rule in LONG)) for rule in RULES]
)
def test_each_rule_is_needed(rule: str):
    broken = []
    for job in [*NO_FAULTS, *WITH_FAULTS, *LARGE, *LARGEST]:
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

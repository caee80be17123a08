"""The memory that processes share: named where it must be, and lax where there is none."""

import concurrent.futures
from pathlib import Path

import pytest
from checks import native_missing
from processes.run_job import run_job

full = pytest.mark.full
pytestmark = pytest.mark.skipif(
    native_missing() is not None, reason="the engine across processes is native"
)


def test_a_named_segment_leaves_nothing():
    for said in run_job("segments.py", "named", processes=2).values():
        assert "no file is left" in said


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("little memory", r"of shared memory: half of what is left are 0 MiB"),
        pytest.param("forbidden", "not here", marks=full),
        pytest.param("closed to others", "process 0's memory can't be opened", marks=full),
    ],
    ids=["little", "forbidden", "closed"],
)
def test_a_slower_path_where_memory_cannot_be_shared(kind: str, reason: str):
    for said in run_job("segments.py", kind, processes=2, devices=2).values():
        assert any(line.startswith("reason: ") and reason in line for line in said), said


@full
def test_settings_that_differ_are_named_on_all():
    for said in run_job("segments.py", "settings", processes=2).values():
        (text,) = [line for line in said if line.startswith("error: ")]
        assert "reset(): backend differs between the processes of the job" in text
        assert "process 0 has 'auto', process 1 has 'lax'" in text


@full
def test_two_jobs_at_once():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [pool.submit(run_job, "values.py", "some", processes=2) for _ in range(2)]
        for job in jobs:
            for said in job.result().values():
                assert "all values are right" in said


def test_steps_in_flight_at_the_end():
    """A process that ends has made its calls, and none waits for it for ever."""
    for said in run_job("in_flight.py", processes=2, devices=2, limit_s=60).values():
        assert "all steps are launched" in said


def test_nothing_is_left_when_all_are_killed(tmp_path: Path):
    before = set(Path("/dev/shm").iterdir())
    run_job("killed.py", processes=3, expect=128 + 9)
    assert set(Path("/dev/shm").iterdir()) <= before

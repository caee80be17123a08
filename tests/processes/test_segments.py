"""The memory that processes share: named where it must be, and lax where there is none."""

import concurrent.futures
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checks import native_missing
from processes.run_job import JOBS, ROOT, job_environment, run_job

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


SMALL_SHM = [
    *("unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])),
    *("sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh"),
]


def test_a_full_dev_shm():
    """Natively without it; and where only it is left, on lax, as each process says."""
    try:
        size = subprocess.check_output(
            [*SMALL_SHM, "df", "--output=size", "/dev/shm"], stderr=subprocess.STDOUT, text=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespaces: {getattr(error, 'output', None) or error}")
    assert size.split() == ["1K-blocks", "64"]
    job = [sys.executable, "-P", "-m", "jaxcoll", "run", "-n", "2", str(JOBS / "segments.py")]
    done = subprocess.run(
        [*SMALL_SHM, *job, "full"],
        env=job_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"[{rank}] no file is left" in done.stdout
        for cause in ("half of what is left are 0 MiB", "No space left on device"):
            warning = (
                rf"\[{rank}\] jaxcoll: no native calls between processes \(process 0: no \d+ "
                rf"MiB of shared memory: {cause}\. Give the processes more memory, or set "
                r"JAXCOLL_SEGMENT_BYTES to less than \d+, .*\); they run on jax\.lax\."
            )
            assert re.search(warning, done.stderr), done.stderr


@full
def test_one_that_may_not_read_the_others_memory_decides_for_all():
    """As in a container. Process 1 is refused each reading, so that a single one would fail."""
    lines = run_job("segments.py", "unread", processes=2, devices=2)
    if reasons := [line for line in lines[1] if line.startswith("no seccomp: ")]:
        pytest.skip(reasons[0])
    for rank, said in lines.items():
        assert f"may read: {rank == 0}" in said
        assert "will read: False" in said
        assert "all values are right" in said


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

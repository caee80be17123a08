"""Whichever process of a job is killed, and whenever: all of it ends soon, and nothing is left."""

import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from checks import native_missing
from processes.run_job import JOBS, ROOT, job_environment

pytestmark = pytest.mark.skipif(
    native_missing() is not None, reason="the engine across processes is native"
)
full, long = pytest.mark.full, pytest.mark.long
RANKS = 3


class Job:
    """A job that does not end by itself; knows its processes by a mark in their environment."""

    def __init__(self, folder: Path, accelerate: bool) -> None:
        self._mark = f"JAXCOLL_TESTS_JOB={uuid.uuid4().hex}"
        self._output = folder / "output"
        self.seen: set[int] = set()
        name, _, value = self._mark.partition("=")
        command = [sys.executable, "-P", "-m", "jaxcoll", "run", "-n", str(RANKS)]
        command += ["--accelerate"] * accelerate
        backend = {"JAXCOLL_BACKEND": "lax"} if accelerate else {}
        with self._output.open("wb") as output:
            self.launcher = subprocess.Popen(
                [*command, str(JOBS / "endless.py")],
                env=job_environment() | {name: value} | backend,
                stdout=output,
                stderr=output,
                cwd=ROOT,
            )

    def output(self) -> str:
        return self._output.read_text()

    def processes(self) -> dict[int, list[str]]:
        """Returns the environments of those that live; a zombie has none."""
        found: dict[int, list[str]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                if self._mark in environment:
                    found[int(folder.name)] = environment
        self.seen |= found.keys()
        return found

    def ranks(self) -> dict[int, int]:
        """Returns the process of each rank, which leads a group of its own."""
        return {
            int(match[1]): pid
            for pid, environment in self.processes().items()
            for match in map(re.compile(r"JAXCOLL_PROCESS_ID=(\d+)").fullmatch, environment)
            if match and _leads_a_group(pid)
        }

    def files(self) -> list[str]:
        """Returns what is left in /dev/shm of any process that was seen."""
        files = [file.name for file in Path("/dev/shm").iterdir()]
        return [name for name in files if self.seen & set(map(int, re.findall(r"\d+", name)))]


def _leads_a_group(pid: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(pid) == pid
    return False


@contextmanager
def job(folder: Path, accelerate: bool = False) -> Iterator[Job]:
    """Starts a job, yields it when all ranks have been started, and asserts that none is left."""
    started = Job(folder, accelerate)
    try:
        assert soon(lambda: len(started.ranks()) == RANKS, 60), started.output()
        yield started
        left = list(started.processes())
        assert not left, started.output()
        assert not started.files()
    finally:
        for pid in started.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.launcher.wait()


def soon(what: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


# Of each half, with XLA's collectives on the engine and without, CI has a few.
MOMENTS = [
    2,
    *(pytest.param(seed, marks=full if seed < 5 else long) for seed in range(12) if seed != 2),
]


@pytest.mark.parametrize("seed", MOMENTS)
def test_one_rank_is_killed_at_any_moment(seed: int, tmp_path: Path):
    """While it imports, attaches, compiles, or runs our collectives, or XLA's."""
    draw = random.Random(seed)
    victim, delay_s = draw.randrange(RANKS), draw.uniform(0.1, 5)
    with job(tmp_path, accelerate=seed % 2 == 1) as running:
        time.sleep(delay_s)
        assert running.launcher.poll() is None, running.output()
        os.kill(running.ranks()[victim], signal.SIGKILL)
        assert running.launcher.wait(30) == 128 + signal.SIGKILL, running.output()
        assert f"rank {victim} failed first: killed by SIGKILL" in running.output()


@pytest.mark.parametrize("seed", [None, *(pytest.param(seed, marks=full) for seed in (1, 2))])
def test_all_ranks_are_killed_at_once(seed: int | None, tmp_path: Path):
    """While they run our collectives, or at any moment before."""
    with job(tmp_path) as running:
        if seed is None:
            assert soon(lambda: running.output().count("begins") == RANKS, 60), running.output()
        else:
            time.sleep(random.Random(seed).uniform(0.1, 3))
        for pid in running.ranks().values():
            os.kill(pid, signal.SIGKILL)
        assert running.launcher.wait(30) == 128 + signal.SIGKILL, running.output()


def test_the_launcher_is_killed(tmp_path: Path):
    with job(tmp_path) as running:
        assert soon(lambda: running.output().count("begins") == RANKS, 60), running.output()
        running.launcher.kill()
        running.launcher.wait()
        assert soon(lambda: not running.processes(), 10), running.output()

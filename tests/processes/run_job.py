"""Starts a script of jobs/ as a job of several processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import quick

# What tests/processes/jobs/world.py says at the end of each rank.
DOOR = "XLA's collectives came to the engine: True"
JOBS = Path(__file__).parent / "jobs"
ROOT = Path(__file__).parents[2]


def job_environment() -> dict[str, str]:
    """Returns what a job needs: nothing of this process's devices, and the tests' modules.

    Without PYTHONSAFEPATH, since a job's script finds what lies beside it.
    """
    ours = ("PJRT_NPROC", "JAX_NUM_CPU_DEVICES", "JAXCOLL_CROSSOVERS", "PYTHONSAFEPATH")
    path = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **{name: value for name, value in os.environ.items() if name not in ours},
        "PYTHONPATH": os.pathsep.join(path),
        "XLA_FLAGS": quick.XLA_FLAGS,
    }


def run_job(
    script: str,
    *arguments: object,
    processes: int,
    devices: int = 1,
    limit_s: float = 120,
    expect: int | None = 0,
    accelerate: bool = False,
    max_restarts: int = 0,
    **environment: str,
) -> dict[int, list[str]]:
    """Runs `jaxcoll run` and returns the lines of each rank.

    `expect` is the exit status that is right; None: any.
    """
    command = [sys.executable, "-P", "-m", "jaxcoll", "run", "-n", str(processes)]
    command += ["--accelerate"] * accelerate
    if accelerate:
        environment["JAXCOLL_TEST_DOOR"] = "1"
    command += ["--max-restarts", str(max_restarts)]
    command += ["--devices-per-process", str(devices), str(JOBS / script), *map(str, arguments)]
    done = subprocess.run(
        command,
        env=job_environment() | environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        cwd=ROOT,
    )
    if expect is not None:
        assert done.returncode == expect, done.stdout + done.stderr
    lines: dict[int, list[str]] = {rank: [] for rank in range(processes)}
    for line in done.stdout.splitlines():
        if match := re.match(r"\[ *(\d+)\] (.*)", line):
            lines[int(match[1])].append(match[2])
    for said in lines.values():
        if accelerate and expect == 0:  # else all of it could have gone through Gloo
            assert DOOR in said, said
            said.remove(DOOR)
    return lines

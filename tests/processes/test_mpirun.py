"""A script under Open MPI's `mpirun`, unchanged."""

import shutil
import subprocess
import sys

import pytest
from checks import native_missing
from processes.run_job import JOBS, ROOT, job_environment


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun")
@pytest.mark.skipif(native_missing() is not None, reason="the engine across processes is native")
def test_every_kind_of_op():
    command = ["mpirun", "-n", "2", "--oversubscribe", "--allow-run-as-root", sys.executable]
    done = subprocess.run(
        [*command, str(JOBS / "values.py"), "some"],
        env=job_environment() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all values are right") == 2

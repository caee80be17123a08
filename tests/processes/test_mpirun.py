"""A script under Open MPI's `mpirun`, unchanged."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checks import native_missing
from processes.run_job import JOBS, ROOT


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun")
@pytest.mark.skipif(native_missing() is not None, reason="the engine across processes is native")
def test_every_kind_of_op(tmp_path: Path):
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PJRT_NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    command = ["mpirun", "-n", "2", "--oversubscribe", "--allow-run-as-root", sys.executable]
    done = subprocess.run(
        [*command, str(JOBS / "values.py"), "some"],
        env=inherited | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all values are right") == 2

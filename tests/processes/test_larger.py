"""A model for which one process has no memory, and four have."""

import re
import subprocess
import sys

import pytest
from checks import native_missing
from processes.run_job import ROOT, job_environment

SCRIPT = ROOT / "examples" / "15_larger_than_one_process.py"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        native_missing() is not None, reason="the same bits on any layout are the native path's"
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts there"),
]


def run(*launcher: str, mib: int | None) -> tuple[int, str]:
    limit = ["--mib", str(mib)] if mib else []
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *limit],
        capture_output=True,
        text=True,
        timeout=240,
        env=job_environment(),
    )
    return done.returncode, done.stdout + done.stderr


def test_larger_than_one_process():
    code, said = run(mib=None)
    assert code == 0, said
    expected = re.findall(r"loss \S+", said)
    code, said = run(mib=500)
    assert code != 0
    assert re.search("RESOURCE_EXHAUSTED|Out of memory|bad_alloc|MemoryError", said), said
    code, said = run("-m", "jaxcoll", "run", "-n", "4", mib=500)
    assert code == 0, said
    assert re.findall(r"loss [^,\s]+,?", said) == expected
    assert len(re.findall(r"peak \d+ MiB", said)) == 4

"""A process that finds its programs compiled, while the others still compile."""

import re
from pathlib import Path

import pytest
from checks import native_missing
from processes.run_job import run_job

pytestmark = pytest.mark.skipif(
    native_missing() is not None, reason="the engine across processes is native"
)


@pytest.mark.full
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (3, 1)])
def test_a_compilation_cache_of_one_process(processes: int, devices: int, tmp_path: Path):
    """Of process 0, since JAX has no other one write."""
    for again in (False, True):
        lines = run_job("compiling.py", tmp_path, 0, processes=processes, devices=devices)
        for rank, said in lines.items():
            assert "all rounds are right" in said
            (found,) = [line for line in said if line.startswith("the first round: ")]
            if rank > 0:
                assert found == "the first round: 0 hits, 0 misses"
            else:
                expected = r"[1-9]\d* hits, 0 misses" if again else r"0 hits, [1-9]\d* misses"
                assert re.search(expected, found), found

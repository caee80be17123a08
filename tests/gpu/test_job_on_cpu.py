"""The jobs of `make test-gpu` on CPU devices: that they work, but for the hardware."""

import re
from typing import Any

import pytest
from checks import native_missing
from gpu import faults
from gpu.bench import gpu_jobs
from gpu.test_gpu import JOB, assert_blocks, assert_small, assert_whole
from processes.run_job import job_environment

pytestmark = pytest.mark.skipif(native_missing() is not None, reason="about native calls")

QUICK = {"XLA_FLAGS": job_environment()["XLA_FLAGS"]}


def run(what: str, processes: int, devices: int = 1, **options: Any) -> list[Any]:
    needed = gpu_jobs.environment("cpu", devices=devices, **QUICK)
    return gpu_jobs.run([JOB, what], processes, needed, 120, **options)


@pytest.mark.parametrize(
    ("processes", "devices", "what"),
    [
        pytest.param(2, 1, "few", marks=pytest.mark.full),
        pytest.param(1, 2, "whole", marks=pytest.mark.long),
        pytest.param(1, 1, "whole", marks=pytest.mark.long),
    ],
)
def test_what_is_right(processes: int, devices: int, what: str):
    assert_whole(run(what, processes, devices))


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.full)])
def test_small_sums(processes: int):
    assert_small(run("small", processes))


@pytest.mark.full
def test_collective_matmuls():
    assert_blocks(run("blocks", 2), "on CPU")


@pytest.mark.full
@pytest.mark.parametrize("kind", faults.FAULTS)
def test_the_others_raise(kind: str):
    fault = faults.FAULTS[kind]
    *others, last = run(kind, 2, end_together=False)
    for text, status in others:
        assert status == 0, text
        assert re.search(rf"^raised after [0-9] s: .*{fault.op} over", text, re.M), text
    assert fault.says in last.text

"""Collective matmuls across processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checks import native_missing
from processes.run_job import job_environment, run_job

pytestmark = pytest.mark.skipif(
    native_missing() is not None, reason="the engine across processes is native"
)


@pytest.mark.parametrize(
    ("processes", "devices", "segment"),
    [
        (2, 2, "1M"),
        pytest.param(3, 1, "1M", marks=pytest.mark.full),
        pytest.param(2, 1, "", marks=pytest.mark.full),
        pytest.param(4, 1, "", marks=pytest.mark.full),
    ],
)
def test_every_kind_has_numpys_values(processes: int, devices: int, segment: str):
    lines = run_job(
        "products.py", processes=processes, devices=devices, JAXCOLL_SEGMENT_BYTES=segment
    )
    for said in lines.values():
        assert "all products are right" in said, said


def test_shapes_take_what_is_faster():
    for said in run_job("matmul_paths.py", processes=2).values():
        assert "all ways are the faster ones" in said, said


def test_where_processes_multiply_otherwise_all_take_two_steps():
    for said in run_job("matmul_differences.py", processes=2).values():
        assert any("two-step" in line and "same processor and BLAS" in line for line in said), said
        assert "all products are right" in said, said


@pytest.mark.full
def test_measured_between_processes(tmp_path: Path):
    """By one of them; what is stored is of groups in several processes."""
    file = tmp_path / "crossovers.json"
    bench = ["bench", "all_gather_matmul", "--sizes", "1K:4K", "--rounds", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxcoll", "run", "-n", "2", "-m", "jaxcoll", *bench],
        env={**job_environment(), "JAXCOLL_CROSSOVERS": str(file)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks in several processes, f32" in done.stdout
    assert f"[0] stored for auto: {file}" in done.stdout
    stored = json.loads(file.read_text())["one_call"]
    assert list(stored) == ["several processes"]
    assert set(stored["several processes"]["all_gather_matmul"]) == {"2"}

"""Small sums and blocks over the memory of other processes; the kernels' body is real."""

import pathlib
import re
from collections.abc import Callable

import pytest
from checks import auto_is_native
from processes.run_job import run_job

JOB = pathlib.Path(__file__).with_name("job_sums.py")

pytestmark = pytest.mark.skipif(not auto_is_native(), reason="about native calls")

Run = Callable[..., dict[int, list[str]]]


@pytest.fixture
def run(libraries: pathlib.Path, peers: object, tmp_path: pathlib.Path) -> Run:
    """Returns what runs job_sums.py, where all processes have one GPU, or each one of its own."""
    del peers  # without which nothing of this is there

    def job(kind: str, processes: int, gpus: str = "shared", **options: int | None):
        world = {"FAKE_CUDA_FOLDER": str(tmp_path), "JAXCOLL_TEST_GPUS": gpus}
        return run_job(str(JOB), kind, libraries, processes=processes, **options, **world)

    return job


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "gpus"),
    [
        (2, "shared"),
        *(pytest.param(*job, marks=pytest.mark.full) for job in [(2, "own"), (4, "shared")]),
    ],
)
def test_sums_of_all_dtypes(processes: int, gpus: str, run: Run):
    for lines in run("sums", processes, gpus).values():
        assert "all right" in lines
        assert "and after a reset" in lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "gpus"), [pytest.param(2, "shared", marks=pytest.mark.full), (3, "own")]
)
def test_collective_matmuls(processes: int, gpus: str, run: Run):
    for lines in run("blocks", processes, gpus).values():
        assert "all right" in lines


@pytest.mark.slow
def test_what_one_cannot_do_nobody_does(run: Run):
    for lines in run("refused", 2).values():
        (reason,) = (line for line in lines if line.startswith("reason: "))
        assert reason.startswith("reason: rank 1: can't reach the memory of rank 0: cudaIpcOpenMem")
        (said,) = (line for line in lines if line.startswith("said: "))
        assert re.search(r"small sums of devices .* are NCCL's: rank 1: can't reach", said)


@pytest.mark.slow
def test_a_reset_that_comes_too_early_is_made_again(run: Run):
    """And what runs between the two neither starts nor leaves anything that others might find."""
    for lines in run("reset", 2).values():
        assert "all right" in lines


@pytest.mark.slow
def test_who_cannot_take_part_says_so_to_all(run: Run):
    for rank, lines in run("unable", 2).items():
        (raised,) = (line for line in lines if line.startswith("raised after "))
        named = "" if rank else "no communicator of devices .*: rank 1: "
        assert re.search(rf"after [0-9] s: .*{named}cudaStreamCreateWithPriority", raised), raised


@pytest.mark.slow
def test_one_that_is_killed_is_named_long_before_the_limit(run: Run):
    lines = run("killed", 2, expect=None)[0]
    (raised,) = (line for line in lines if line.startswith("raised after "))
    named = r'all_reduce over "x" of .*: waited \d\.\d s for rank 1 \(process 1, pid \d+, gone\)'
    assert re.search(rf"^raised after [0-9] s: .*{named}", raised), raised
    assert "missing: [(1, 'gone')]" in lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "op", "why"),
    [
        ("failed", "all_reduce", r"devices 0, 2048, rank 1: communication: fake NCCL error"),
        ("unprepared", "all_gather_matmul", "cublasLtMatmulDescCreate"),
    ],
)
def test_one_in_which_the_group_fails_is_named_long_before_the_limit(kind, op, why, run: Run):
    """The others could wait for it on their devices until then."""
    lines = run(kind, 2, expect=None)[0]
    (raised,) = (line for line in lines if line.startswith("raised after "))
    named = rf'{op} over "x" of .*: waited \d\.\d s for rank 1 \(process 1, pid \d+, failed\)'
    assert re.search(rf"^raised after [1-9] s: .*{named}", raised), raised
    why = rf"^  rank 1: .*{why}"
    assert any(re.search(why, line) for line in lines), lines
    assert "missing: [(1, 'failed')]" in lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["late", pytest.param("late for a block", marks=pytest.mark.full)])
def test_one_that_does_not_come_is_named(kind: str, run: Run):
    lines = run(kind, 2, expect=None)[0]
    (raised,) = (line for line in lines if line.startswith("raised after "))
    op = "all_gather_matmul" if kind == "late for a block" else "all_reduce"
    named = rf'{op} over "x" of .*: waited 1\.\d s for rank 1 \(process 1, pid \d+, running\)'
    assert re.search(rf"^raised after [1-4] s: .*{named}", raised), raised
    did = rf"^  rank 1: last call, ended \d\.\d s ago: {op} over "
    assert any(re.search(did, line) for line in lines), lines
    assert any(re.match(r"    File .*job_sums\.py., line \d+, in _wait", line) for line in lines), (
        lines
    )
    assert "missing: [(1, 'running')]" in lines

"""`examples/train_lm.py` in several processes: the losses of one process, to the last bit."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checks import native_missing
from processes.run_job import JOBS, ROOT

SCRIPT = ROOT / "examples" / "train_lm.py"
TINY = (
    *("--steps=24", "--batch=8", "--context=16", "--num-layers=2", "--width=32", "--num-heads=2"),
    *("--eval-windows=16", "--sample-bytes=8", "--compare-seconds=0", "--checkpoint-every=6"),
    "--devices=4",
)
KILLED = JOBS / "killed_train_lm.py"
TWO_PROCESSES = ("-m", "jaxcoll", "run", "-n", "2", "--devices-per-process", "2")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        native_missing() is not None, reason="the same bits on any layout are the native path's"
    ),
]


def run(*command: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def saved_losses(out: Path) -> list[float]:
    """Read in a process of its own: the examples' `support` is not on the tests' path."""
    code = (
        "import pathlib, sys; from support.checkpoints import Checkpoints; "
        "print(Checkpoints(pathlib.Path(sys.argv[1]), keep=True).latest_record()[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out / "checkpoints")],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT / "examples",
    )
    return eval(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def losses_of_one(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("one")
    run(SCRIPT, f"--out={out}", *TINY)
    losses = saved_losses(out)
    assert len(losses) == 24
    return losses


@pytest.mark.long
def test_two_processes(losses_of_one: list[float], tmp_path: Path):
    output = run(*TWO_PROCESSES, SCRIPT, f"--out={tmp_path}", *TINY)
    assert "on 4 simulated devices in 2 processes" in output
    assert saved_losses(tmp_path) == losses_of_one


long = pytest.mark.long
OF_FSDP, OF_PIPE = "data=2,fsdp=2,tensor=2", "pipe=2,data=2,tensor=2"


@pytest.mark.parametrize(
    ("mesh", "axes", "between"),
    [
        ("data=2,tensor=2", "2 of data x 2 of tensor", OF_FSDP),
        pytest.param(OF_FSDP, "2 of data x 2 of fsdp x 2 of tensor", "fsdp=4", marks=long),
        pytest.param(OF_PIPE, "2 of pipe x 2 of data x 2 of tensor", OF_PIPE, marks=long),
    ],
)
def test_any_product(
    mesh: str, axes: str, between: str, losses_of_one: list[float], tmp_path: Path
):
    """Interrupted and resumed: the losses of data parallelism, nearly."""
    devices = 2 ** mesh.count("=")
    processes = ("-m", "jaxcoll", "run", "-n", "2", "--devices-per-process", devices // 2)
    split = (f"--mesh={mesh}", f"--out={tmp_path}")
    collective = () if "pipe" in mesh else ("--async-tp",)
    output = run(*processes, SCRIPT, *split, *collective, *TINY, "--stop-after=9")
    assert f"on {devices} simulated devices ({axes}) in 2 processes" in output
    assert "stopped after step 9" in output
    # Resumed in one process.
    run(SCRIPT, f"--out={tmp_path}", "--resume", *TINY, f"--mesh={between}", "--stop-after=15")
    run(*processes, SCRIPT, *split, *collective, *TINY, "--resume")
    losses = saved_losses(tmp_path)
    assert len(losses) == 24
    assert max(abs(a - b) for a, b in zip(losses, losses_of_one, strict=True)) < 1e-3


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    output = run(*TWO_PROCESSES, KILLED, "-", SCRIPT, out, *TINY)
    assert "goes on" not in output
    # Each process makes its own share of a batch alone.
    assert sorted(re.findall(r"drew windows \[(.*)\]", output)) == ["0, 1, 2, 3", "4, 5, 6, 7"]
    return out


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_and_a_restart(
    killed: int, losses_of_one: list[float], undisturbed: Path, tmp_path: Path
):
    """The job goes on from its last checkpoint, and ends with the same state to the last bit."""
    job = (KILLED, killed, SCRIPT, tmp_path)
    output = run(*TWO_PROCESSES, "--max-restarts", 1, *job, *TINY)
    assert f"rank {killed} failed first: killed by SIGKILL" in output
    assert "restart 1 of 1" in output
    steps = re.findall(r"goes on after step (\d+)", output)
    assert len(steps) == 2
    assert steps[0] == steps[1] in ("6", "12", "18")
    assert saved_losses(tmp_path) == saved_losses(undisturbed) == losses_of_one
    for rank in (0, 1):
        ours, theirs = (np.load(out / f"{rank}.npz") for out in (tmp_path, undisturbed))
        assert len(ours.files) == len(theirs.files) > 20
        for name in ours.files:
            np.testing.assert_array_equal(ours[name], theirs[name])

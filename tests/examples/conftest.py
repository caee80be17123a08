"""How the examples are run: as a user would, each in a process of its own."""

import functools as ft
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

# The examples find `support` beside themselves; so do these tests.
sys.path.insert(0, str(EXAMPLES))

TINY = (
    "--num-layers=1",
    "--width=16",
    "--num-heads=2",
    "--context=16",
    "--batch=8",
    "--eval-windows=8",
    "--sample-bytes=8",
)


@pytest.fixture
def tiny() -> tuple[str, ...]:
    """Return the arguments of a model that trains in a second."""
    return TINY


@pytest.fixture
def examples_folder() -> pathlib.Path:
    """Return the folder of the examples."""
    return EXAMPLES


def run(name: str, *arguments: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Run an example in `folder`; return its exit code and output."""
    # With PYTHONSAFEPATH, a script does not find what lies beside it.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        cwd=folder,
        # Most of a tiny run is compilation: leave out what only makes the programs quicker.
        env={**environment, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def run_example(tmp_path: pathlib.Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs an example in an empty folder."""
    return ft.partial(run, folder=tmp_path)


@pytest.fixture(scope="session")
def whole_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], pathlib.Path]:
    """Train the tiny model without interruption, into `out/train_lm` of the folder returned."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = (*TINY, "--steps=6", "--compare-seconds=0.01")
    return run("train_lm.py", *arguments, folder=folder), folder

"""The numbered examples: each runs, stays short, and prints what the list of examples shows."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import quick
from checks import native_missing
from pages import is_as_shown

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SECTION = re.compile(r"^## (\S+)\n\n\S.*?\n\n```text\n(.*?)^```$", re.M | re.S)
NUMBERED = sorted(path.name for path in EXAMPLES.glob("[0-9][0-9]_*.py"))
SHOWN = dict(SECTION.findall((EXAMPLES / "README.md").read_text()))


def test_the_list_has_them_all():
    assert list(SHOWN) == NUMBERED


@pytest.mark.parametrize("name", NUMBERED)
def test_it_stays_short(name: str):
    assert len((EXAMPLES / name).read_text().splitlines()) < 100


def run(name: str, folder: pathlib.Path) -> tuple[int, str]:
    """Runs an example in an empty folder; returns its exit code and all that it said."""
    # Safe paths, where a wheel is tested, would hide what lies beside an example.
    without = ("JAXCOLL_BACKEND", "PJRT_NPROC", "PYTHONSAFEPATH")
    environment = {key: value for key, value in os.environ.items() if key not in without}
    done = subprocess.run(
        [sys.executable, "-u", EXAMPLES / name],
        cwd=folder,
        env=environment | {"XLA_FLAGS": quick.inherited()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout.replace(f"{EXAMPLES}{os.sep}", "")


# Those that train, and half of the others: CI runs all.
TRAINS = ("_digits_", "_larger_", "_any_product")
SOME = [name for name in NUMBERED if not any(t in name for t in TRAINS)][::2]
LISTED = [name if name in SOME else pytest.param(name, marks=pytest.mark.full) for name in NUMBERED]


@pytest.mark.skipif(native_missing() is not None, reason="the list shows the native path")
@pytest.mark.parametrize("name", LISTED)
def test_it_prints_what_the_list_shows(name: str, tmp_path: pathlib.Path):
    code, said = run(name, tmp_path)
    assert code == 0, said
    assert is_as_shown(said, SHOWN[name]), said


@pytest.mark.skipif(native_missing() is None, reason="runs where there is no extension")
@pytest.mark.parametrize("name", NUMBERED)
def test_it_runs_without_the_extension(name: str, tmp_path: pathlib.Path):
    code, said = run(name, tmp_path)
    if name == "07_missing_rank.py":
        assert code == 1, said
        assert "not run: jaxcoll was installed without" in said
    else:
        assert code == 0, said

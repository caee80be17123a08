"""The public names and their signatures are a contract; a change of it must show in review."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_public_signatures_equal_the_committed_snapshot():
    command = [sys.executable, ROOT / "tools" / "signatures.py"]
    now = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    committed = (ROOT / "tests" / "repo" / "signatures.txt").read_text()
    assert now.splitlines() == committed.splitlines(), "run `make signatures` and review the diff"

"""jaxcoll/_core.pyi says what the extension has: type checkers and readers see only the stub."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_committed_stub_equals_the_generated_one(tmp_path: pathlib.Path):
    stub = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "jaxcoll._core", "-o", stub]
    subprocess.run(command, check=True, cwd=tmp_path)
    committed = (ROOT / "jaxcoll" / "_core.pyi").read_text()
    assert stub.read_text().splitlines() == committed.splitlines(), "run `make stubs`"

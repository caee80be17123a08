"""Every code block of README and docs runs, and prints what the page says."""

import os
import pathlib
import subprocess
import sys

import pytest
from checks import native_missing
from pages import is_as_shown, python_blocks

import jaxcoll

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MARK = "----- end of block -----"


@pytest.mark.skipif(
    jaxcoll.config.backend == "lax" or native_missing() is not None,
    reason="the pages show what the native path prints",
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_and_print_what_the_page_says(page: pathlib.Path, tmp_path: pathlib.Path):
    found = python_blocks(page)
    if not found:
        assert "```python" not in page.read_text()
        return
    script = tmp_path / "page.py"
    script.write_text("\n".join(f"{code}\nprint({MARK!r})" for code, _ in found))
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=environment,
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    outputs = done.stdout.split(f"{MARK}\n")[:-1]
    for (code, expected), output in zip(found, outputs, strict=True):
        assert not expected or is_as_shown(output, expected), (code, expected, output)

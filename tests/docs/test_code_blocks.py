"""Every code block of README and docs runs, and prints what the page says."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from checks import native_missing

import jaxcoll

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "----- end of block -----"


def blocks(page: pathlib.Path) -> list[tuple[str, str]]:
    """Returns (code, expected output) of a page's Python blocks, in order."""
    found: list[tuple[str, str]] = []
    text = page.read_text()
    end = None
    for match in BLOCK.finditer(text):
        kind, body = match.groups()
        if kind == "python":
            found.append((body, ""))
        elif kind == "text" and found and end is not None and not text[end : match.start()].strip():
            found[-1] = (found[-1][0], body)
        end = match.end()
    return found


def pattern(expected: str) -> str:
    """Returns a regular expression of an output in which `...` stands for anything."""
    parts = [r"\s+".join(map(re.escape, part.split())) for part in expected.split("...")]
    return r"\s*" + r".*".join(rf"\s*{part}\s*" for part in parts) + r"\s*"


@pytest.mark.skipif(
    jaxcoll.config.backend == "lax" or native_missing() is not None,
    reason="the pages show what the native path prints",
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_and_print_what_the_page_says(page: pathlib.Path, tmp_path: pathlib.Path):
    found = blocks(page)
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
        if expected:
            assert re.fullmatch(pattern(expected), output, re.DOTALL), (code, expected, output)

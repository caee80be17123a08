"""Every code block of README and docs runs, and prints what the page says."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import quick
from checks import native_missing
from pages import commands, is_as_shown, python_blocks

import jaxcoll

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MARK = "----- end of block -----"
# Blocks that import one of these run where it is installed; no other block builds on them.
OPTIONAL = ("datasets", "grain")

pytestmark = pytest.mark.skipif(
    jaxcoll.config.backend == "lax", reason="the pages show what JAXCOLL_BACKEND=lax switches off"
)


def run(folder: pathlib.Path, *arguments: object) -> str:
    """Runs Python in a folder, without this process's devices; returns its standard output."""
    environment = {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment | {"XLA_FLAGS": quick.inherited()},
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lacks(code: str) -> bool:
    """Tells whether a block imports an optional package that is not installed."""
    return any(
        re.search(rf"^(from|import) {name}\b", code, re.MULTILINE)
        and importlib.util.find_spec(name) is None
        for name in OPTIONAL
    )


def having(find: Callable[[pathlib.Path], object]) -> pytest.MarkDecorator:
    """Parametrizes over the pages with something to run; of the how-tos with --full."""
    pages = [
        pytest.param(page, id=page.name, marks=[pytest.mark.full] * (page.parent.name == "how-to"))
        for page in PAGES
        if find(page)
    ]
    return pytest.mark.parametrize("page", pages)


@having(python_blocks)
def test_blocks_run_and_print_what_the_page_says(page: pathlib.Path, tmp_path: pathlib.Path):
    found = python_blocks(page)
    if native_missing() and "This page needs the native path" in page.read_text():
        pytest.skip("the page needs the native path")
    assert len(found) == page.read_text().count("```python")
    found = [(code, expected) for code, expected in found if not lacks(code)]
    script = tmp_path / "page.py"
    script.write_text("\n".join(f"{code}\nprint({MARK!r})" for code, _ in found))
    outputs = run(tmp_path, script).split(f"{MARK}\n")[:-1]
    for (code, expected), output in zip(found, outputs, strict=True):
        # Without the extension the paths differ, and with them what some blocks print.
        as_shown = not expected or native_missing() or is_as_shown(output, expected)
        assert as_shown, (code, expected, output)
    for drawn in tmp_path.glob("*.svg"):
        assert drawn.read_text() == (ROOT / "docs" / "images" / drawn.name).read_text(), drawn.name


@pytest.mark.full
@having(commands)
def test_commands_run(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXCOLL_CROSSOVERS", str(tmp_path / "crossovers.json"))
    for command in commands(page):
        # One round is enough to see that it runs.
        rounds = ["--rounds", "1"] * (command[0] == "bench")
        assert run(tmp_path, "-m", "jaxcoll", *command, *rounds)

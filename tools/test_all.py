"""Runs everything that can be tested here and writes what came out to tests/RESULTS.md.

The C++ layers under three builds, then the whole Python suite, slow tests included, on the native
path and on jax.lax, then the release path. Ends with 1 if anything failed.
"""

import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Step:
    """One run: what the report calls it, the command, what it needs in its environment."""

    name: str
    command: list[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def steps() -> list[Step]:
    """Returns the runs in order."""
    ctest = [
        Step(f"C++, {p}", ["cmake", "--workflow", "--preset", p])
        for p in ("release", "asan", "tsan")
    ]
    pytest = [str(pathlib.Path(sys.executable).parent / "pytest")]
    return [
        *ctest,
        Step("Python, native path", [*pytest, "--full", "-m", "not release"]),
        Step(
            "Python, jax.lax",
            [*pytest, "--full", "-m", "not release", "--ignore=tests/repo"],
            {"JAXCOLL_BACKEND": "lax"},
        ),
        Step("Release path", [*pytest, "-m", "release"]),
    ]


def counts(report: pathlib.Path) -> str:
    """Returns "12 passed, 1 skipped" from a JUnit file, or "-" where there is none."""
    if not report.exists():
        return "-"
    suites = [suite.attrib for suite in ET.parse(report).getroot().iter("testsuite")]
    total, failed, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    parts = {
        "failed": failed + errors,
        "passed": total - failed - errors - skipped,
        "skipped": skipped,
    }
    return ", ".join(f"{count} {what}" for what, count in parts.items() if count)


def run(step: Step) -> tuple[str, bool]:
    """Runs one step; returns its row of the table and whether it passed."""
    print(f"\n==== {step.name}: {' '.join(step.command)}", flush=True)
    command, report = list(step.command), ROOT / "build" / "junit.xml"
    report.unlink(missing_ok=True)
    if command[0].endswith("pytest"):
        command.append(f"--junitxml={report}")
    start = time.monotonic()
    passed = subprocess.run(command, cwd=ROOT, env=os.environ | step.environment).returncode == 0
    took = datetime.timedelta(seconds=round(time.monotonic() - start))
    return (
        f"| {step.name} | {'passed' if passed else 'FAILED'} | {counts(report)} | {took} |",
        passed,
    )


def main() -> int:
    start = time.monotonic()
    results = [run(step) for step in steps()]
    took = datetime.timedelta(seconds=round(time.monotonic() - start))
    versions = ", ".join(
        f"{p} {importlib.metadata.version(p)}" for p in ("jax", "jaxlib", "numpy", "flax")
    )
    text = f"""# The last run of `make test-all`

{datetime.date.today()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores, \
Python {platform.python_version()}, {versions}. All in all {took}.

| what | result | tests | time |
|---|---|---|--:|
"""
    (ROOT / "tests" / "RESULTS.md").write_text(text + "\n".join(row for row, _ in results) + "\n")
    print(f"\n{text}" + "\n".join(row for row, _ in results))
    return 0 if all(passed for _, passed in results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Runs everything that can be tested here and writes what came out to tests/RESULTS.md.

The C++ layers under three builds and with each rule of the engine broken in turn; the pitfalls of
parallel training, brought about; the whole Python suite, slow tests and whole products included, on
the oldest and the newest JAX, on the native path and on jax.lax, and on a wheel without the
extension; the release path. On the native path of the oldest JAX programs are compiled as users'
are, elsewhere quickly (`--quick`). Ends with 1 if anything failed.

    python tools/test_all.py                           # all, many hours on two cores
    python tools/test_all.py "release path" "without"  # those named so; other rows stay
"""

import dataclasses
import datetime
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterable

from newest_python import newest_python

ROOT = pathlib.Path(__file__).parents[1]
JUNIT = ROOT / "build" / "junit.xml"
RESULTS = ROOT / "tests" / "RESULTS.md"
SUITE = [
    "-n",
    "auto",
    "--maxprocesses=8",
    "--dist=loadfile",
    "--no-loadscope-reorder",
    "--full",
    "-m",
    "not release",
]
# Of the suite, so that each can be run by itself.
PARALLEL = ["tests/parallel"]
PROCESSES = ["tests/processes", "tests/stress", "tests/model"]
PARTS = {
    "parallel training": PARALLEL,
    "several processes": PROCESSES,
    "the rest": [f"--ignore={folder}" for folder in (*PARALLEL, *PROCESSES)],
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One run: what the report calls it, the command, what it needs in its environment."""

    name: str
    command: list[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def oldest_jax() -> str:
    """Returns the version that the package is built against."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (version,) = (r for r in project["build-system"]["requires"] if r.startswith("jax=="))
    return version.removeprefix("jax==")


def make_environments() -> list[tuple[str, pathlib.Path]]:
    """Makes one environment for the oldest JAX and one for the newest; returns JAX and folder."""
    chosen = [(".venv", [f"JAX={oldest_jax()}"])]
    if python := newest_python():
        chosen.append((".venv-newest", [f"PYTHON={python}"]))
    environments = []
    for venv, variables in chosen:
        subprocess.run(["make", "env", f"VENV={venv}", *variables], cwd=ROOT, check=True)
        version = (
            "import jax, sys; "
            "print('jax {}, Python {}.{}'.format(jax.__version__, *sys.version_info))"
        )
        python = ROOT / venv / "bin" / "python"
        name = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True)
        environments.append((name.stdout.strip(), ROOT / venv))
    return environments


def steps(environments: list[tuple[str, pathlib.Path]]) -> list[Step]:
    """Returns the runs in order."""
    all_steps = [
        Step(f"C++, {preset}", ["cmake", "--workflow", "--preset", preset])
        for preset in ("release", "asan", "tsan")
    ]
    all_steps.append(Step("C++, broken rules", [sys.executable, "tests/cpp/mutants.py"]))
    python = str(environments[0][1] / "bin" / "python")
    all_steps.append(Step("Python, pitfalls brought about", [python, "tests/repo/pitfalls.py"]))
    for jax, venv in environments:
        pytest = [str(venv / "bin" / "pytest"), *SUITE]
        is_oldest = jax == environments[0][0]
        for path, more, environment in (
            ("native path", [] if is_oldest else ["--quick"], {}),
            ("on jax.lax", ["--quick", "--ignore=tests/repo"], {"JAXCOLL_BACKEND": "lax"}),
        ):
            all_steps += [
                Step(f"{jax}, {path}, {part}", [*pytest, *more, *which], environment)
                for part, which in PARTS.items()
                # Tests of several processes are mostly of the engine and its errors, in whose place
                # they would meet Gloo's. Those of lax set it themselves.
                if not (environment and which is PROCESSES)
            ]
    fallback = ["make", "test-fallback", f"JAX={oldest_jax()}"]
    for part, which in PARTS.items():
        arguments = " ".join(["--full --quick", *which, f"--junitxml={JUNIT}"])
        name = f"{environments[0][0]}, without the extension, {part}"
        all_steps.append(Step(name, [*fallback, f"ARGS={arguments}"]))
    pytest = str(environments[0][1] / "bin" / "pytest")
    return [*all_steps, Step("Release path", [pytest, "-m", "release", "--full"])]


def counts() -> str:
    """Returns "12 passed, 1 skipped" of the last run of pytest, or "-" if it was none."""
    if not JUNIT.exists():
        return "-"
    suites = [suite.attrib for suite in ET.parse(JUNIT).getroot().iter("testsuite")]
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


def run(step: Step, commit: str) -> tuple[str, bool]:
    """Runs one step; returns its row of the table and whether it passed."""
    print(f"\n==== {step.name}: {' '.join(step.command)}", flush=True)
    command = list(step.command)
    JUNIT.unlink(missing_ok=True)
    if pathlib.Path(command[0]).name == "pytest":
        command.append(f"--junitxml={JUNIT}")
    start = time.monotonic()
    passed = subprocess.run(command, cwd=ROOT, env=os.environ | step.environment).returncode == 0
    took = datetime.timedelta(seconds=round(time.monotonic() - start))
    verdict = "passed" if passed else "FAILED"
    return f"| {step.name} | {verdict} | {counts()} | {took} | {commit} |", passed


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "?"


def earlier_rows() -> dict[str, str]:
    """Returns the rows of RESULTS.md by the name of their step."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| what")]
    return {row.split("|")[1].strip(): row for row in rows}


def _total(rows: Iterable[str]) -> datetime.timedelta:
    times = re.findall(r"\| (\d+):(\d\d):(\d\d) \|", "\n".join(rows))
    seconds = sum(3600 * int(h) + 60 * int(m) + int(s) for h, m, s in times)
    return datetime.timedelta(seconds=seconds)


def write(rows: list[str]) -> str:
    """Writes the report; returns it."""
    text = f"""# The last run of `make test-all`

{datetime.date.today()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores. \
All in all {_total(rows)}. A step may have been repeated by itself; rows have commits.

| what | result | tests | time | commit |
|---|---|---|--:|---|
"""
    text += "\n".join(rows) + "\n"
    RESULTS.write_text(text)
    return text


def main() -> int:
    wanted = [word.lower() for word in sys.argv[1:]]
    environments = make_environments()
    all_steps = steps(environments)
    commit = _commit()  # before RESULTS.md is another one
    earlier, failed = earlier_rows() if wanted else {}, 0
    rows = {step.name: f"| {step.name} | not run | - | - | - |" for step in all_steps} | earlier
    if len(environments) == 1:
        rows["newest JAX"] = "| newest JAX | NOT TESTED: no Python >= 3.12 here | - | - | - |"
    for step in all_steps:
        if not wanted or any(word in step.name.lower() for word in wanted):
            rows[step.name], passed = run(step, commit)
            failed += not passed
            write(list(rows.values()))  # what is stopped later has lost nothing
    print(f"\n{write(list(rows.values()))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

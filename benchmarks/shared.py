"""What benchmarks share: jobs, what a compiled step needs, and the pages of results."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from environment import machine

from jaxcoll._environment import needed_environment

PROCESS_TIMEOUT_S = 3600


def job(
    script: str, processes: int, devices: int, *arguments: object, cores: int | None = None
) -> list[dict[str, Any]]:
    """Runs a script in so many processes of so many devices each, on so many cores, or all.

    Returns:
        The rows that its first process has printed, a line of JSON each.

    Raises:
        RuntimeError: it failed; the text is what it said.
    """
    command, environment = [sys.executable], {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    mine = sorted(os.sched_getaffinity(0))[:cores]
    if processes > 1:
        command += ["-m", "jaxcoll", "run", "-n", str(processes)]
    else:  # what `jaxcoll run` and `simulate_cpu_devices` set as well
        environment |= needed_environment(devices, len(mine), environment)
    done = subprocess.run(
        [*command, script, *map(str, arguments)],
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, mine),
        capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return rows_of(done.stdout)


def rows_of(said: str) -> list[dict[str, Any]]:
    """Returns the rows in what a job has said; of several processes, the first one's."""
    lines = [line.removeprefix("[0] ") for line in said.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def peak_bytes(compiled: Any) -> int:
    """Returns what a step needs on a device: its state, its batch, and what is between."""
    need = compiled.memory_analysis()
    return (
        need.argument_size_in_bytes
        + need.output_size_in_bytes
        - need.alias_size_in_bytes
        + need.temp_size_in_bytes
    )


def command() -> str:
    """Returns how this program was started."""
    return "python " + " ".join(sys.argv)


def head(title: str, result: dict[str, Any]) -> list[str]:
    """Returns the first lines of a page: its title, the command, and the machine."""
    of = result["environment"]
    return [
        f"# {title}",
        "",
        f"`{result['command']}`, {of['date']}, {of['cores']} cores of {of['cpu']}, jax "
        f"{of['jax']}, Python {of['python']}.",
        "",
    ]


def save(name: str, result: dict[str, Any], page: str, folder: Path) -> Path:
    """Prints a page, writes it and the figures, and returns where a picture of them belongs."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{name}_{machine(result['environment'])}"
    Path(f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    Path(f"{stem}.md").write_text(page)
    print(page)
    return Path(f"{stem}.png")

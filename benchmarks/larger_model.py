"""A model that one process has no memory for: examples/15_larger_than_one_process.py, three ways.

    python benchmarks/larger_model.py [--mib 500]

In one process, without and with a limit on its memory, and in four processes under the same limit:
what each says, its loss, and the peak of each process's memory.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from environment import environment
from shared import command, head, save

SCRIPT = Path(__file__).parents[1] / "examples" / "15_larger_than_one_process.py"


def run_measured(arguments: list[str]) -> tuple[int, str, int]:
    """Runs a command; returns its exit code, what it said and its own peak in MiB."""
    with tempfile.TemporaryFile("w+") as said:
        started = subprocess.Popen(arguments, stdout=said, stderr=subprocess.STDOUT)
        watchdog = threading.Timer(600, started.kill)
        watchdog.start()
        _, status, usage = os.wait4(started.pid, 0)
        watchdog.cancel()
        started.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        return started.returncode, said.read(), usage.ru_maxrss // 1024


def run(processes: int, mib: int | None) -> dict[str, Any]:
    """Runs the example, and returns what came of it."""
    started = [sys.executable]
    if processes > 1:
        started += ["-m", "jaxcoll", "run", "-n", str(processes)]
    started += [str(SCRIPT), *(["--mib", str(mib)] if mib else [])]
    code, said, most = run_measured(started)
    loss = re.search(r"loss ([\d.]+)", said)
    wrong = re.findall(r"(?:RESOURCE_EXHAUSTED|MemoryError|bad_alloc|Out of memory).*", said)
    return {
        "processes": processes,
        "limit MiB": mib,
        "exit code": code,
        "loss": float(loss[1]) if loss and code == 0 else None,
        # A process that fails says nothing of its own.
        "peak MiB": sorted(map(int, re.findall(r"peak (\d+) MiB", said))) or [most],
        "error": wrong[-1][:120] if wrong and code else None,
    }


def markdown(result: dict[str, Any]) -> str:
    """Returns the page of results."""
    lines = [
        *head("A model larger than the memory of one process", result),
        "Ten layers of 2048 x 2048 in float32 and AdamW, three steps, fully sharded over the "
        "processes. The limit is RLIMIT_DATA: what a process has when JAX has started, and so many "
        "MiB more. The peak is that of the resident memory; of a run that fails, until then.",
        "",
        "| processes | limit | loss | peak of each process, MiB | error |",
        "|--:|---|---|---|---|",
    ]
    for row in result["rows"]:
        loss = "-" if row["loss"] is None else row["loss"]  # of a run that fails
        peaks = ", ".join(map(str, row["peak MiB"]))
        lines.append(
            f"| {row['processes']} | {row['limit MiB'] or 'none'} | {loss} | {peaks} | "
            f"{row['error'] or ''} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=500, help="beside JAX itself, for each process")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    of = environment()
    rows = [run(1, None), run(1, chosen.mib), run(4, chosen.mib)]
    result = {"command": command(), "environment": of, "rows": rows}
    save("larger-model", result, markdown(result), chosen.out)
    free, limited, sharded = rows
    if limited["exit code"] == 0 or sharded["loss"] is None or sharded["loss"] != free["loss"]:
        sys.exit("one process had memory enough, or four had other losses")


if __name__ == "__main__":
    main()

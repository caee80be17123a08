"""A model that one process has no memory for: examples/15_larger_than_one_process.py, three ways.

    python benchmarks/larger_model.py [--mib 500]

In one process, without and with a limit on its memory, and in four processes under the same limit:
what each says, its loss, and the peak of each process's memory.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from environment import environment
from shared import command, head, save

SCRIPT = Path(__file__).parents[1] / "examples" / "15_larger_than_one_process.py"


def run(processes: int, mib: int | None) -> dict[str, Any]:
    """Runs the example, and returns what came of it."""
    started = [sys.executable]
    if processes > 1:
        started += ["-m", "jaxcoll", "run", "-n", str(processes)]
    started += [str(SCRIPT), *(["--mib", str(mib)] if mib else [])]
    done = subprocess.run(started, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    loss = re.search(r"loss ([\d.]+)", said)
    wrong = re.findall(r"(?:RESOURCE_EXHAUSTED|MemoryError|bad_alloc|Out of memory).*", said)
    return {
        "processes": processes,
        "limit MiB": mib,
        "exit code": done.returncode,
        "loss": float(loss[1]) if loss and done.returncode == 0 else None,
        "peak MiB": sorted(map(int, re.findall(r"peak (\d+) MiB", said))),
        "error": wrong[-1][:120] if wrong and done.returncode else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=500, help="beside JAX itself, for each process")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    of = environment()
    rows = [run(1, None), run(1, chosen.mib), run(4, chosen.mib)]
    result = {"command": command(), "environment": of, "rows": rows}
    lines = [
        *head("A model larger than the memory of one process", result),
        "Ten layers of 2048 x 2048 in float32 and AdamW, three steps, fully sharded over the "
        "processes. The limit is RLIMIT_DATA: what a process has when JAX has started, and so many "
        "MiB more. The peak is that of the resident memory.",
        "",
        "| processes | limit | loss | peak of each process, MiB | error |",
        "|--:|---|---|---|---|",
        *(
            f"| {row['processes']} | {row['limit MiB'] or 'none'} | {row['loss']} | "
            f"{', '.join(map(str, row['peak MiB']))} | {row['error'] or ''} |"
            for row in rows
        ),
    ]
    save("larger-model", result, "\n".join(lines) + "\n", chosen.out)
    free, limited, sharded = rows
    if limited["exit code"] == 0 or sharded["loss"] is None or sharded["loss"] != free["loss"]:
        sys.exit("one process had memory enough, or four had other losses")


if __name__ == "__main__":
    main()

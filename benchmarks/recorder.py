"""What it costs a call to be recorded in the black box; the program is recorder.cc.

python benchmarks/recorder.py

It fails where a call costs 200 ns or more on warm entries.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from environment import environment
from shared import command, head, save

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "build" / "release" / "recorder_cost"
RUNS = 5
LIMIT_NS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    folder = parser.parse_args().out
    for step in (["cmake", "--preset", "release"], ["cmake", "--build", "--preset", "release"]):
        subprocess.run(step, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows: dict[str, list[float]] = {}
    for _ in range(RUNS):
        said = subprocess.run([PROGRAM], check=True, capture_output=True, text=True).stdout
        for row in map(json.loads, said.splitlines()):
            rows.setdefault(row["entries"], []).append(row["ns"])
    result = {"command": command(), "environment": environment(), "ns": rows}
    lines = [
        *head("What it costs to record a call", result),
        f"A call of one device, of {RUNS} runs of the program the least and the most. *Warm*: one "
        "call after the other. *Cold*: 64 MiB of other memory have gone through the caches before "
        "so many calls; nothing of what a call needs is in them then, not even its instructions.",
        "",
        "| entries | ns |",
        "|---|--:|",
        *(f"| {name} | {min(ns):.0f} to {max(ns):.0f} |" for name, ns in rows.items()),
    ]
    save("recorder", result, "\n".join(lines) + "\n", folder)
    if (warm := statistics.median(rows["warm"])) >= LIMIT_NS:
        sys.exit(f"a call costs {warm:.0f} ns on warm entries: expected less than {LIMIT_NS}")


if __name__ == "__main__":
    main()

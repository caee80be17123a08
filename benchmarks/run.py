"""Measures jaxcoll against jax.lax in one process, and writes tables, data and a plot.

    python benchmarks/run.py [--devices 2,4,8] [--rounds 15] [--quick]

Each device count runs in a process of its own. Results go to benchmarks/results/.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SUITES = ("collectives", "mixed", "gradient_tree")
HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="2,4,8", help="device counts, comma-separated")
    parser.add_argument(
        "--rounds", type=int, default=200, help="alternating rounds per measurement, at most"
    )
    parser.add_argument("--quick", action="store_true", help="three sizes and few rounds")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for results")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure_here(arguments.child, arguments.rounds, arguments.quick)))
        return
    results = merge([child(int(n), arguments) for n in arguments.devices.split(",")])
    results["command"] = "python benchmarks/run.py" + "".join(f" {a}" for a in sys.argv[1:])
    write(results, arguments.out, "quick" if arguments.quick else "one_process")
    if wrong := sum(row.get("wrong", 0) for suite in SUITES for row in results[suite]):
        sys.exit(f"{wrong} wrong elements")


def measure_here(num_devices: int, rounds: int, quick: bool) -> dict[str, Any]:
    import jaxcoll

    jaxcoll.simulate_cpu_devices(num_devices)
    jaxcoll.accelerate_lax(False)  # whatever the environment says: lax is what is compared with
    import collectives
    import gradient_tree
    import mixed
    from environment import environment

    sizes = (256, 64 << 10, 1 << 20) if quick else collectives.SIZES
    rounds = min(rounds, 5) if quick else rounds
    head = environment()
    return {
        "environment": head,
        "collectives": collectives.run(num_devices, rounds, sizes),
        "mixed": mixed.run(num_devices, rounds),
        "gradient_tree": gradient_tree.run(num_devices, rounds),
    }


def child(num_devices: int, arguments: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    command = [sys.executable, __file__, "--child", str(num_devices)]
    command += ["--rounds", str(arguments.rounds), *(["--quick"] if arguments.quick else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(f"{num_devices} devices: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"environment": parts[0]["environment"]}
    for suite in SUITES:
        merged[suite] = [row for part in parts for row in part[suite]]
    return merged


def write(results: dict[str, Any], folder: Path, theme: str) -> None:
    import report
    from environment import machine

    stem = folder / f"{theme}_{machine(results['environment'])}"
    folder.mkdir(parents=True, exist_ok=True)
    text = report.markdown(results)
    print(text)
    Path(f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    Path(f"{stem}.md").write_text(text)
    report.plot(results, Path(f"{stem}.png"))
    print(f"written: {stem}.json, .md, .png")


if __name__ == "__main__":
    main()

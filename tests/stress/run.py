"""The long form of the stress test: scenarios in processes of their own until time is up.

    python tests/stress/run.py --minutes 30
    python tests/stress/run.py --minutes 5 --devices 8 --seed 100 mixed random_programs

Every process gets another seed and a hard limit; one that goes over it is killed. Prints a line for
each process, and everything that a process printed if it failed. The exit code is 1 if any did.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

TESTS = pathlib.Path(__file__).parents[1]
SCENARIOS = (sys.executable, "-m", "stress.scenarios")
DEVICES = (2, 3, 4, 8)

# What `simulate_cpu_devices` sets: each process decides for itself.
_NOT_INHERITED = ("PJRT_NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAXCOLL_BACKEND")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a process of scenarios went.

    Attributes:
        exit_code: None: it was killed.
        output: stdout and stderr together.
    """

    exit_code: int | None
    output: str

    def problem(self, name: str) -> str | None:
        """Says what went wrong with a scenario, or None."""
        lines = self.output.splitlines()
        if any(line.startswith(f"ok    {name} ") for line in lines):
            return None
        for line in lines:
            if line.startswith(f"FAIL  {name} "):
                return f"{line}\n\n{self.output}"
        if any(line.startswith(f"start {name} ") for line in lines):
            return f"{name} hangs or ended the process ({self.exit_code}):\n{self.output}"
        return f"{name} was not reached ({self.exit_code}):\n{self.output}"


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
    path = (str(TESTS), *environment.get("PYTHONPATH", "").split(os.pathsep))
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def run_scenarios(
    names: Sequence[str],
    *,
    devices: int,
    seed: int,
    rounds: int,
    limit_s: float,
    hard_limit_s: float,
) -> Outcome:
    """Runs scenarios in a process; kills it after `hard_limit_s`."""
    arguments = (
        *("--devices", str(devices), "--seed", str(seed)),
        *("--rounds", str(rounds), "--limit", str(limit_s)),
    )
    process = subprocess.Popen(
        [*SCENARIOS, *arguments, *names],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=hard_limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return Outcome(None, output)
    return Outcome(process.returncode, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="scenario", help="all, without any")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--seed", type=int, default=1, help="of the first process")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one scenario")
    args = parser.parse_args()
    listed = subprocess.run(
        [*SCENARIOS, "--list"], env=_environment(), capture_output=True, text=True, check=True
    )
    names = args.names or listed.stdout.split()
    end = time.monotonic() + args.minutes * 60
    passed: collections.Counter[str] = collections.Counter()
    failed: collections.Counter[str] = collections.Counter()
    seed = args.seed
    while time.monotonic() < end:
        for name in names:
            for devices in args.devices:
                if time.monotonic() > end:
                    break
                start = time.monotonic()
                outcome = run_scenarios(
                    [name],
                    devices=devices,
                    seed=seed,
                    rounds=args.rounds,
                    limit_s=args.limit,
                    hard_limit_s=args.limit + 30,
                )
                problem = outcome.problem(name)
                (failed if problem else passed)[name] += 1
                took = f"{time.monotonic() - start:.0f} s"
                what = f"{name} --devices {devices} --seed {seed} --rounds {args.rounds}"
                print(f"{'FAIL' if problem else 'ok  '} {what}: {took}", flush=True)
                if problem:
                    print(problem, flush=True)
        seed += 1
    print(f"\n{'scenario':20} passed failed")
    for name in names:
        print(f"{name:20} {passed[name]:6} {failed[name]:6}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

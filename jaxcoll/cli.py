"""The command `jaxcoll`."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from jaxcoll._errors import NativeUnavailableError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="jaxcoll", description="Collectives for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="what this installation has, and what is off and why")
    info.set_defaults(run=_info)

    bench = commands.add_parser(
        "bench",
        help="every op against jax.lax on this machine",
        description="Measures native calls against jax.lax, alternating, each in a chain of calls "
        "in one program. Ends with the sizes from which on lax is the faster path for a copy, and "
        'stores them for backend="auto".',
    )
    bench.add_argument("ops", nargs="*", metavar="OP", help="all_reduce, ...; all without any")
    bench.add_argument(
        "--sizes",
        default="256:16M",
        help="bytes of a rank: one size, or the first and the last, each 4 times the one before; "
        "K, M, G (default: %(default)s)",
    )
    bench.add_argument("--devices", type=int, default=8, help="simulated (default: %(default)s)")
    bench.add_argument("--rounds", type=int, default=15, help="of each size (default: %(default)s)")
    bench.add_argument("--against", choices=["lax"], default="lax", help="what to compare with")
    bench.add_argument("--no-store", action="store_true", help="leave what auto knows as it is")
    bench.set_defaults(run=_bench)

    run = commands.add_parser(
        "run",
        allow_abbrev=False,
        usage="jaxcoll run -n N [OPTION...] (SCRIPT | -m MODULE) [ARGUMENT...]",
        help="a script in several processes",
        description="Runs a Python script in several processes, which are one job to JAX. The "
        "first one that fails ends the job.",
    )
    run.add_argument("-n", type=int, required=True, help="processes on this host")
    run.add_argument("-m", action="store_true", dest="module", help="SCRIPT is a module's name")
    run.add_argument(
        "--devices-per-process",
        type=int,
        metavar="K",
        help="CPU devices of each, whatever the script simulates (default: what it does, else 1)",
    )
    run.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="R",
        help="how often to start all again after a failure, though not after one at the start",
    )
    run.add_argument("--hosts", type=int, metavar="N", help="run on each of N hosts")
    run.add_argument("--host-id", type=int, metavar="I", help="which host this is: 0 to N - 1")
    run.add_argument("--coordinator", metavar="HOST:PORT", help="a free port of host 0")
    run.add_argument(
        "--accelerate",
        action="store_true",
        help="programs that know nothing of jaxcoll run on its engine, too",
    )
    run.add_argument(
        "--no-bind", action="store_false", dest="bind", help="leave the ranks on all CPUs"
    )
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    run.set_defaults(run=_run)

    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen)
    except ValueError as error:
        parser.error(str(error))
    except NativeUnavailableError as error:
        print(f"jaxcoll: {error}", file=sys.stderr)
        return 1


def _info(_: argparse.Namespace) -> int:
    from jaxcoll._info import info

    print(info())
    return 0


def _run(chosen: argparse.Namespace) -> int:
    if sys.platform != "linux":
        raise ValueError(f"run: expected Linux, got {sys.platform}.")
    from jaxcoll import _launcher

    given: dict[str, Any] = {**vars(chosen), "program": [chosen.script, *chosen.arguments]}
    names = [field.name for field in dataclasses.fields(_launcher.Options)]
    return _launcher.launch(_launcher.Options(**{name: given[name] for name in names}))


def _bench(chosen: argparse.Namespace) -> int:
    from jaxcoll import _bench, _crossovers, _native
    from jaxcoll._accelerate import accelerate_lax
    from jaxcoll._errors import one_of
    from jaxcoll._processes import simulate_cpu_devices

    sizes = _bench.sizes_of(chosen.sizes)
    for op in chosen.ops:
        if op not in _bench.known():
            raise ValueError(one_of("bench", "OP", op, _bench.known()))
    if chosen.devices < 2:
        raise ValueError(f"--devices: expected at least 2, got {chosen.devices}.")
    if chosen.rounds < 1:
        raise ValueError(f"--rounds: expected at least 1, got {chosen.rounds}.")
    simulate_cpu_devices(chosen.devices)
    accelerate_lax(False)  # whatever the environment says: lax is what is compared with
    print(f"{chosen.devices} devices, f32; times of one call in a chain in us, rates in GB/s")
    if reason := _native.missing_reason():
        print(f"no native calls, jax.lax alone: {reason}")
    print(_bench.head(), flush=True)
    rows = []
    for row in _bench.run(chosen.ops or _bench.known(), sizes, chosen.rounds):
        print(_bench.text(row), flush=True)
        rows.append(row)
    if wrong := sum(row.wrong for row in rows):
        print(f"{wrong} wrong elements", file=sys.stderr)
        return 1
    found = {} if reason else _bench.crossovers(rows)
    for op, size in found.items():
        if size is not None:
            print(f"{op} on {chosen.devices} ranks: lax is faster from {size} bytes on")
    if not reason and not any(found.values()):
        print("at no two neighbouring sizes of a copy is lax more than 5% faster")
    if chosen.no_store or not found:
        print("not stored for auto")
    else:
        try:
            file = _crossovers.write(found, chosen.devices, max(row.bytes for row in rows))
        except (OSError, RuntimeError) as error:
            print(f"not stored for auto: {error}; set JAXCOLL_CROSSOVERS", file=sys.stderr)
            return 1
        print(f"stored for auto: {file}")
    return 0

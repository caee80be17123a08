"""The command `jaxcoll`."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
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
        "in one program; collective matmuls, of square blocks, as one native call and as a "
        "collective and a matmul. Ends with the sizes from which on lax is the faster path for a "
        "copy, and up to which a collective matmul is best one call, and stores them for "
        'backend="auto". Matmuls between processes: jaxcoll run -n 2 -m jaxcoll bench '
        "all_gather_matmul.",
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
    run.add_argument(
        "--trace", metavar="FILE", help="a timeline of all native collectives, for Perfetto"
    )
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    run.set_defaults(run=_run)

    doctor = commands.add_parser(
        "doctor",
        help="why a job does not go on, or is slow, from its dumps",
        description="Reads the dumps of a job's processes (on errors, on SIGUSR2, or by "
        "jaxcoll.dump) and says what they show. Exit status: 0 nothing is wrong, 3 a process is "
        "gone, 4 ranks made different calls, 5 a rank is behind, 6 some are slow, "
        "7 calls have failed, and the dumps do not show why.",
    )
    doctor.add_argument("dumps", nargs="+", metavar="DUMP", help="folders, or files of processes")
    doctor.set_defaults(run=_doctor)

    top = commands.add_parser(
        "top",
        help="what the devices of a running job do",
        description="A live table: of each device the call that it is in and for how long, calls "
        "and bytes per second, and the share of the time that it is in calls.",
    )
    top.add_argument("target", metavar="PID|JOB", help="a process, `jaxcoll run`, or JAXCOLL_JOB")
    top.add_argument("--seconds", type=float, default=1.0, help="between looks (%(default)s)")
    top.add_argument("--times", type=int, help="print so many tables, and end")
    top.set_defaults(run=_top)

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


def _doctor(chosen: argparse.Namespace) -> int:
    from jaxcoll.diagnosis import doctor

    text, status = doctor.report(chosen.dumps)
    print(text)
    return status


def _top(chosen: argparse.Namespace) -> int:
    from jaxcoll.diagnosis import top

    if not chosen.seconds > 0:
        raise ValueError(f"--seconds: expected a positive number, got {chosen.seconds}.")
    try:
        top.follow(chosen.target, chosen.seconds, chosen.times)
    except KeyboardInterrupt:
        return 130
    return 0


def _run(chosen: argparse.Namespace) -> int:
    if sys.platform != "linux":
        raise ValueError(f"run: expected Linux, got {sys.platform}.")
    from jaxcoll import _launcher

    given: dict[str, Any] = {**vars(chosen), "program": [chosen.script, *chosen.arguments]}
    names = [field.name for field in dataclasses.fields(_launcher.Options)]
    return _launcher.launch(_launcher.Options(**{name: given[name] for name in names}))


def _bench(chosen: argparse.Namespace) -> int:
    from jaxcoll import _bench, _bench_matmul, _native
    from jaxcoll._accelerate import accelerate_lax
    from jaxcoll._errors import one_of
    from jaxcoll._processes import is_one_of_several, simulate_cpu_devices

    sizes = _bench.sizes_of(chosen.sizes)
    known = (*_bench.known(), *_bench_matmul.OPS)
    for op in chosen.ops:
        if op not in known:
            raise ValueError(one_of("bench", "OP", op, known))
    if chosen.rounds < 1:
        raise ValueError(f"--rounds: expected at least 1, got {chosen.rounds}.")
    ops = chosen.ops or known
    collectives = [op for op in ops if op in _bench.known()]
    matmuls = [op for op in ops if op in _bench_matmul.OPS]
    if is_one_of_several():
        if collectives:
            raise ValueError(
                "bench: OP: between processes it measures collective matmuls alone: "
                f"{', '.join(_bench_matmul.OPS)}. Others: make bench-processes, in a clone."
            )
    elif chosen.devices < 2:
        raise ValueError(f"--devices: expected at least 2, got {chosen.devices}.")
    else:
        simulate_cpu_devices(chosen.devices)
    accelerate_lax(False)  # whatever the environment says: lax is what is compared with
    reason = _native.missing_reason()
    wrong = _bench_collectives(chosen, collectives, sizes, reason) if collectives else 0
    if matmuls and reason is None:
        reason = _native.matmul_problem()
    if matmuls and reason is not None:
        print(f"collective matmuls are not measured: {reason}")
    elif matmuls:
        wrong = _bench_matmuls(chosen, matmuls, sizes) or wrong
    return wrong


def _bench_collectives(
    chosen: argparse.Namespace, ops: list[str], sizes: list[int], reason: str | None
) -> int:
    from jaxcoll import _bench, _crossovers

    print(f"{chosen.devices} devices, f32; times of one call in a chain in us, rates in GB/s")
    if reason:
        print(f"no native calls, jax.lax alone: {reason}")
    print(_bench.head(), flush=True)
    rows = []
    for row in _bench.run(ops, sizes, chosen.rounds):
        print(_bench.text(row), flush=True)
        rows.append(row)
    found = {} if reason else _bench.crossovers(rows)
    for op, size in found.items():
        if size is not None:
            print(f"{op} on {chosen.devices} ranks: lax is faster from {size} bytes on")
    if not reason and not any(found.values()):
        print("at no two neighbouring sizes of a copy is lax more than 5% faster")
    largest = max(row.bytes for row in rows)
    return _end(rows, chosen, found, lambda: _crossovers.write(found, chosen.devices, largest))


def _bench_matmuls(chosen: argparse.Namespace, ops: list[str], sizes: list[int]) -> int:
    import jax

    from jaxcoll import _bench_matmul, _crossovers

    is_first = jax.process_index() == 0
    ranks, within = jax.device_count(), _bench_matmul.ranks_are_in()
    if is_first:
        print(f"{ranks} ranks in {within}, f32, blocks of side x side; times of a program in us")
        print(_bench_matmul.head(), flush=True)
    rows = []
    for row in _bench_matmul.run(ops, sizes, chosen.rounds):
        rows.append(row)
        if is_first:
            print(_bench_matmul.text(row), flush=True)
    if not is_first:
        return 1 if any(row.wrong for row in rows) else 0
    found = _bench_matmul.crossovers(rows)
    for op, one_call in found.items():
        most = one_call.to_products
        print(f"{op} on {ranks} ranks: one call up to {most:.3g} multiplications")
    largest = max(row.products for row in rows)
    return _end(
        rows, chosen, found, lambda: _crossovers.write_matmuls(found, ranks, within, largest)
    )


def _end(
    rows: Sequence[Any], chosen: argparse.Namespace, found: Any, write: Callable[[], Any]
) -> int:
    """Stores what was found; returns the exit status."""
    if wrong := sum(row.wrong for row in rows):
        print(f"{wrong} wrong elements", file=sys.stderr)
        return 1
    if chosen.no_store or not found:
        print("not stored for auto")
        return 0
    try:
        print(f"stored for auto: {write()}")
    except (OSError, RuntimeError) as error:
        print(f"not stored for auto: {error}; set JAXCOLL_CROSSOVERS", file=sys.stderr)
        return 1
    return 0

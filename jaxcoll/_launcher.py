"""`jaxcoll run`: the launcher of one host's part of a job, and of JAX's coordination service."""

import contextlib
import dataclasses
import itertools
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxcoll import _coordination, _mpi_library
from jaxcoll._addresses import reserved, split_address
from jaxcoll._environment import ACCELERATE, TRACE, needed_environment, num_cpus
from jaxcoll._errors import MARK
from jaxcoll._job import Job, Outcome, Rank, Signals

# For what the ranks of other hosts have seen.
_TRACE_S = 10.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What `jaxcoll run` was asked for; the names are those of its options."""

    n: int
    program: Sequence[str]
    module: bool = False
    devices_per_process: int | None = None
    max_restarts: int = 0
    hosts: int | None = None
    host_id: int | None = None
    coordinator: str | None = None
    accelerate: bool = False
    bind: bool = True
    trace: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what makes no sense."""
        for name, least in (("n", 1), ("devices_per_process", 1), ("max_restarts", 0)):
            if (value := getattr(self, name)) is not None:
                _at_least(least, name, value)
        together = (self.hosts, self.host_id, self.coordinator)
        if None in together and together != (None, None, None):
            raise ValueError("--hosts, --host-id and --coordinator: expected all three or none.")
        if self.hosts is not None and self.host_id is not None and self.coordinator is not None:
            _at_least(1, "hosts", self.hosts)
            if not 0 <= self.host_id < self.hosts:
                raise ValueError(
                    f"--host-id: expected 0 to {self.hosts - 1} for {self.hosts} hosts, got "
                    f"{self.host_id}."
                )
            split_address(self.coordinator)
            if self.hosts > 1 and self.max_restarts:
                raise ValueError(
                    "--max-restarts: expected 0 with several hosts, got "
                    f"{self.max_restarts}: a launcher can't restart another host's part."
                )
        if self.trace is not None and not os.path.isdir(os.path.dirname(self.trace) or "."):
            raise ValueError(f"--trace: no such folder: {os.path.dirname(self.trace)!r}.")
        if self.trace is not None and os.path.isdir(self.trace):
            raise ValueError(
                f"--trace: expected a file, got {self.trace!r}, which is a folder. Name a file in "
                f"it, such as {os.path.join(self.trace, 'timeline.json')!r}."
            )
        if not self.module and not os.path.exists(self.program[0]):
            raise ValueError(f"script: no such file: {self.program[0]!r}.")


def launch(options: Options) -> int:
    """Runs the job, again after a failure if that is asked for, and returns its exit code."""
    if problem := _coordination.problem():
        _say(problem)
        return 1
    cpus = blocks(sorted(os.sched_getaffinity(0)), options.n) if options.bind else None
    if cpus is not None:
        first = options.n * (options.host_id or 0)
        _say(", ".join(f"rank {first + i} on {_cpus_text(c)}" for i, c in enumerate(cpus)))
    with Signals() as signals:
        for restart in itertools.count():
            outcome = _once(options, restart, cpus, signals)
            if outcome.text is not None:
                _say(outcome.text)
            if not outcome.may_restart or restart == options.max_restarts:
                return outcome.code
            _say(f"restart {restart + 1} of {options.max_restarts}")
    raise AssertionError


def _once(
    options: Options, restart: int, cpus: Sequence[Sequence[int]] | None, signals: Signals
) -> Outcome:
    hosts, host_id = options.hosts or 1, options.host_id or 0
    with contextlib.ExitStack() as stack:
        address = options.coordinator
        if host_id == 0:
            address = stack.enter_context(_service(address, hosts * options.n))
        assert address is not None
        own_cpus = len(cpus[0]) if cpus is not None else num_cpus()
        shared = {**os.environ, **_environment(options, restart, address, own_cpus)}
        ranks = [
            Rank(
                number,
                _command(options),
                {**shared, "JAXCOLL_PROCESS_ID": str(number)},
                frozenset(cpus[i]) if cpus is not None else None,
            )
            for i, number in enumerate(range(host_id * options.n, (host_id + 1) * options.n))
        ]
        # Unbuffered: a rank's line is seen when it is written.
        out = stack.enter_context(open(sys.stdout.fileno(), "wb", 0, closefd=False))
        err = stack.enter_context(open(sys.stderr.fileno(), "wb", 0, closefd=False))
        try:
            outcome = Job(ranks, out, err, mark=MARK.encode()).run(signals)
        except OSError as error:
            return Outcome(1, f"a rank could not be started: {error}", False)
        if options.trace is not None and host_id == 0:
            _finish_trace(Path(options.trace).absolute(), shared["JAXCOLL_JOB"], options)
        return outcome


def _finish_trace(path: Path, job: str, options: Options) -> None:
    from jaxcoll.diagnosis import trace

    hosts = options.hosts or 1
    parts = trace.Parts(path, job).read(hosts * options.n, _TRACE_S if hosts > 1 else 0.0)
    if parts:
        trace.finish(parts, path)


def _environment(options: Options, restart: int, address: str, cpus: int) -> dict[str, str]:
    """Returns what all ranks, of so many CPUs each, have besides the launcher's environment."""
    hosts = options.hosts or 1
    accelerate = {ACCELERATE: "1", **_mpi_environment()} if options.accelerate else {}
    devices = options.devices_per_process
    chosen = {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAXCOLL_DEVICES_PER_PROCESS": str(devices),
    }
    return {
        **_around_proxies(address),
        **needed_environment(devices or 1, cpus, os.environ),
        **(chosen if devices else {}),
        **accelerate,
        **({TRACE: os.path.abspath(options.trace)} if options.trace else {}),
        "JAX_PLATFORMS": "cpu",
        "JAXCOLL_COORDINATOR": address,
        "JAXCOLL_JOB": secrets.token_hex(8),
        "JAXCOLL_NUM_HOSTS": str(hosts),
        "JAXCOLL_NUM_PROCESSES": str(hosts * options.n),
        "JAXCOLL_RESTART": str(restart),
        "PYTHONUNBUFFERED": "1",
    }


def _mpi_environment() -> dict[str, str]:
    """Returns what has jaxlib load our library; nothing where it could not, and would end."""
    library = _mpi_library.path()
    with contextlib.suppress(OSError):
        if library and not os.environ.get(_mpi_library.VARIABLE):
            return {} if _mpi_library.missing_names(library) else {_mpi_library.VARIABLE: library}
    return {}


def _command(options: Options) -> list[str]:
    # Without the current folder, whose modules could hide those of Python or JAX from a script that
    # is elsewhere; but for a jaxcoll that is not installed, and found there.
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    safe = [] if home == os.getcwd() else ["-P"]
    module = ["-m"] if options.module else []
    return [sys.executable, *safe, "-m", "jaxcoll._launched", *module, *options.program]


# ---- JAX's coordination service ------------------------------------------------------------------


@contextlib.contextmanager
def _service(address: str | None, num_processes: int) -> Iterator[str]:
    """Runs the service, at a free port of this host without an address; yields its address."""
    with reserved(address) as free:
        with _quiet():  # XLA warns of what is wanted here: that a death does not end the others
            service = _coordination.start(free, num_processes)
        try:
            yield free
        finally:
            service.shutdown()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what native code writes to the standard error."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _around_proxies(address: str) -> dict[str, str]:
    """Returns what keeps gRPC from asking a proxy for the way to the service."""
    kept = next(
        (
            os.environ[name]
            for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY")
            if name in os.environ
        ),
        "",
    )
    return {"no_grpc_proxy": ",".join(filter(None, [kept, split_address(address)[0]]))}


# ---- CPUs ----------------------------------------------------------------------------------------


def blocks(cpus: Sequence[int], ranks: int) -> list[list[int]]:
    """Divides CPUs among ranks: neighbours together, or one for each if there are fewer."""
    count = len(cpus)
    if count < ranks:
        return [[cpus[i % count]] for i in range(ranks)]
    return [list(cpus[i * count // ranks : (i + 1) * count // ranks]) for i in range(ranks)]


def _cpus_text(cpus: Sequence[int]) -> str:
    """Returns "CPU 3", or "CPUs 0-3,8"."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    text = ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)
    return f"CPU {text}" if len(cpus) == 1 else f"CPUs {text}"


def _at_least(least: int, option: str, value: int) -> None:
    if value < least:
        dashes = "-" if len(option) == 1 else "--"
        raise ValueError(
            f"{dashes}{option.replace('_', '-')}: expected at least {least}, got {value}."
        )


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"jaxcoll: {text}", file=sys.stderr, flush=True)

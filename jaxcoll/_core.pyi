"""The native engine of jaxcoll. Private: use jaxcoll's own functions."""

from collections.abc import Sequence


def targets() -> dict[str, dict[str, object]]:
    """
    Custom-call targets by name: the stages that jax.ffi.register_ffi_target takes.
    """

def types() -> dict[str, dict[str, object]]:
    """State types by name, as jax.ffi.register_ffi_type takes them."""

def kernel_sets() -> list[str]:
    """Instruction sets that this machine can run; the last one is in use."""

def describe_site(site: int, text: str) -> None:
    """Sets the text that errors show for a site id."""

def set_timeout(seconds: float | None) -> None:
    """How long a rank may wait for the others; None waits for ever."""

def segment_bytes(num_seats: int, num_lanes: int, window_bytes: int) -> int:
    """How much memory a segment of these measures takes."""

def format_segment(memory: int, num_seats: int, num_lanes: int, window_bytes: int, nonce: int) -> None:
    """
    Makes the empty file behind a descriptor the shared memory of a job's processes on this host. RuntimeError: there is not as much.
    """

def join(memory: int, nonce: int, processes: Sequence[int], process: int) -> None:
    """
    Joins the segment behind a file descriptor as `process`, one of `processes`.
    """

def job_failure() -> str | None:
    """Why calls between processes fail until all attach anew, or None."""

def probe_peers() -> bool:
    """
    Whether this process may read the memory of the others, when all have joined.
    """

def start(reads_peers: bool) -> None:
    """
    Begins to use the segment that was joined. With `reads_peers`, the same on all processes, large copies are read from where they lie.
    """

def use_blas(sgemm: int, dgemm: int, set_num_threads: int, num_threads: int) -> None:
    """
    The addresses of a BLAS's functions; the last two are 0 where it has one thread.
    """

def leave() -> None:
    """Tells the other processes that this one is about to exit."""

def connect_mpi(path: str) -> str:
    """
    Connects libjaxcoll_mpi.so with the engine; returns why that failed, or ''.
    """

def expect_communicators(devices: Sequence[Sequence[int]], processes: Sequence[Sequence[int]], is_of_job: bool) -> int:
    """
    The groups of which XLA will ask for communicators now, by the ids of their devices and by their processes; returns how many it asked for since the last call.
    """

def describe_mpi(devices: Sequence[int], kind: int, count: int, origin: str) -> None:
    """Says, for errors, what a group's calls of a kind and size are for."""

def reset_mpi() -> None:
    """Lets XLA's calls begin anew after one has failed; none is under way."""

def num_calls() -> int:
    """
    Native calls begun so far, over all devices; without those of XLA's own collectives.
    """

def num_mpi_calls() -> int:
    """Calls that XLA's own collectives have begun so far, over all devices."""

def records() -> list[tuple[int, int, int, int, int, tuple[int, ...]]]:
    """
    Recorded calls: (device, sequence, site, run, iteration, (arrived, opened, met, moved, resumed)), times in ns of the monotonic clock, 0 where not reached.
    """

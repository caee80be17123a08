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

def describe_site(site: int, text: str, json: str) -> None:
    """
    Sets the text that errors show for a site id, and the same for programs.
    """

def set_timeout(seconds: float | None) -> None:
    """How long a rank may wait for the others; None waits for ever."""

def set_compile_timeout(seconds: float | None) -> None:
    """How long a rank may wait for one that compiles; None waits for ever."""

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

def copy_costs() -> list[float]:
    """
    What copies between processes take, in nanoseconds for each KiB: into the own window, out of another one's, out of another one's memory; of operands of 1, 4 and 16 MiB. All processes call it at once, when they have joined.
    """

def start(may_read: bool, copy_costs: Sequence[float]) -> None:
    """
    Begins to use the segment that was joined. Whether processes may read each other's memory, and what that costs: the same on all processes.
    """

def use_blas(sgemm: int, dgemm: int, set_num_threads: int, num_threads: int) -> None:
    """
    The addresses of a BLAS's functions; the last two are 0 where it has one thread.
    """

def is_calling() -> bool:
    """Whether a program that runs in Python's main thread stands in a call."""

def note_reset(resets: bool) -> None:
    """Tells the other processes whether this one waits for them in reset()."""

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

def recorder() -> list[int]:
    """
    The addresses of the recorder's functions, for the engine for GPUs; see csrc/host/recorder_door.h.
    """

def black_box() -> memoryview:
    """What this process tells about itself; see csrc/host/black_box.h."""

def black_box_file() -> int:
    """The descriptor of that memory, or -1 where it has none."""

def set_process(process: int, num_processes: int) -> None:
    """Notes in the black box which process of the job this one is."""

def observe(process: int, memory: int) -> bool:
    """
    Maps the black box of another process of the segment that was joined, behind a descriptor; returns whether it is one.
    """

def question() -> int:
    """How often somebody has asked what this process does."""

def tell(phase: int, stack: str, callbacks: int, question: int) -> None:
    """
    Notes what the main thread does now, and how many others are in a callback, and answers that question so.
    """

def pause(seconds: float) -> None:
    """
    Has the others wait for this process for so long from now; 0: as usual.
    """

def set_dump_folder(path: str) -> None:
    """The folder that errors name, where dumps are; '' for none."""

def dumps_asked() -> int:
    """How often somebody wanted a dump of this process."""

def dump_on_signal() -> None:
    """
    Counts SIGUSR2 among those, unless the program does something else then.
    """

def frames() -> dict[int, list[tuple[str, int, str, int, int, int]]]:
    """
    What each thread of Python does, the innermost first: file, line, function; and of the expression that is evaluated its column, end line and end column, -1 if not known.
    """

def is_busy() -> bool:
    """
    Whether another thread of this process runs, or would if it got its turn.
    """

def is_anyone_excused() -> bool:
    """
    Whether another process of this host compiles, or has said that it pauses.
    """

def absent(processes: Sequence[int], group: int, site: int, execution: int) -> str:
    """
    Which ranks of other processes of this host have not made a call on their GPUs, and what they do, as errors say it; by the process of each rank.
    """

def await_failure(seconds: float) -> bool:
    """
    Waits until a call has failed, whose error is held back for a look, or for so long. For the thread that looks; whether it is to go on.
    """

def note_look(failures: int) -> None:
    """Lets errors go: a look is over that began after so many failures."""

def stop_looks() -> None:
    """Ends the wait of the thread that looks."""

def end_watch(has_failed: bool, failures: int) -> None:
    """
    Has this process end with exit code 1 if work has failed, or more than so often.
    """

def note_callback_error(text: str) -> None:
    """
    Tells that a callback of the user's has raised; errors of calls that wait have the text.
    """

def num_failures() -> int:
    """Runs of programs that failed so far in native calls."""

def failures(known: int) -> list[str]:
    """Why those of them beyond the first `known` failed, of the latest."""

"""Jobs on GPUs: one process with all of them, or several that share one; also what a rank needs.

Used by `gpu.py` and by tests/gpu. Whoever starts a job does not start JAX, and so holds no memory
of a GPU. On the platform "cpu" the same jobs run on simulated devices, to be tried without one.
"""

import contextlib
import functools as ft
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Where a process of a job learns the address, how many there are, and which it is.
_WORLD = "JAXCOLL_GPU_JOB"
# The first NCCL whose communicators may have several ranks on one GPU.
SHARING_NCCL = (2, 30)
# Streaming multiprocessors that a communicator's kernels may take where ranks share a GPU: all of
# these must have room at once.
_SHARED_CTAS = "8"
_ASK_S = 120
# Of a process whose fellow has failed, to say why it failed, too.
_GRACE_S = 10.0


class Gpus(NamedTuple):
    """What is here: how many, of what kind, versions of libraries; and why there are none."""

    count: int
    kind: str = ""
    versions: dict[str, str] | None = None
    problem: str = ""

    def sharing_problem(self) -> str | None:
        """Says why several ranks can't share a GPU, or None."""
        found = (self.versions or {}).get("NCCL", "0")
        if tuple(map(int, found.split("."))) >= SHARING_NCCL:
            return None
        least = ".".join(map(str, SHARING_NCCL))
        return f"NCCL {found} does not put several ranks on one GPU; {least} does"


_QUESTION = """
import json, jax, jaxcoll
info, devices = jaxcoll.info(), jax.devices()
print(json.dumps([len(devices), devices[0].device_kind, info.versions, info.off.get("GPU", "")]))
"""


_MPS = "nvidia-cuda-mps-control"
_MPS_S = 20


class Mps(NamedTuple):
    """CUDA's multi-process service: the variables its processes need, or why there is none."""

    needed: dict[str, str]
    problem: str = ""


@contextlib.contextmanager
def mps() -> Iterator[Mps]:
    """Runs CUDA's MPS meanwhile: under it the kernels of processes that share a GPU run at once.

    One of its own, which changes nothing of the GPU. Without it such processes take turns.
    """
    if shutil.which(_MPS) is None:
        yield Mps({}, f"there is no {_MPS}")
        return
    # The service may still write there when it was told to end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        needed = {f"CUDA_MPS_{what}_DIRECTORY": folder for what in ("PIPE", "LOG")}
        options: dict[str, Any] = {"env": {**os.environ, **needed}, "timeout": _MPS_S, "text": True}
        options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        started = subprocess.run([_MPS, "-d"], **options)
        if started.returncode:
            yield Mps({}, f"{_MPS}: {started.stderr.strip()}")
            return
        try:
            yield Mps(needed, ask("cuda", **needed).problem)
        finally:
            # One that does not end in time waits for a process that is stuck: nothing is lost.
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([_MPS], input="quit\n", **options)


@ft.cache
def find() -> Gpus:
    """Returns what GPUs there are."""
    if shutil.which("nvidia-smi") is None:
        return Gpus(0, problem="there is no NVIDIA driver")
    return ask("cuda")


def ask(platform: str, **more: str) -> Gpus:
    """Asks a process of its own, with these variables, what devices of a platform there are."""
    needed = environment(platform, **more)
    done = subprocess.run(
        [sys.executable, "-c", _QUESTION], env=needed, capture_output=True,
        text=True, timeout=_ASK_S,
    )  # fmt: skip
    if done.returncode:
        return Gpus(0, problem=f"JAX has no GPUs: {(done.stderr.strip() or '?').splitlines()[-1]}")
    count, kind, versions, problem = json.loads(done.stdout.splitlines()[-1])
    return Gpus(0 if problem else count, kind, versions, problem)


def environment(
    platform: str, *, devices: int = 1, sharing: int = 0, **more: str
) -> dict[str, str]:
    """Returns what a process of a job needs.

    Args:
        platform: "cuda" or "cpu".
        devices: how many it has, on CPU.
        sharing: how many processes share one GPU; 0: this has all of them.
        more: further variables.
    """
    needed = {"JAX_PLATFORMS": platform, "JAXCOLL_DUMP_DIR": "none"}
    if platform == "cpu":
        from jaxcoll._environment import needed_environment, num_cpus

        needed |= {"JAX_NUM_CPU_DEVICES": str(devices)}
        needed |= needed_environment(devices, num_cpus(), os.environ)
    if platform == "cuda" and sharing:
        needed |= {
            "CUDA_VISIBLE_DEVICES": first_visible(),
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_MAX_CTAS": os.environ.get("NCCL_MAX_CTAS", _SHARED_CTAS),
        }
        # What is left is for NCCL's buffers, and for those that are not of JAX.
        needed["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.6 / sharing:.2f}"
    return {**os.environ, **needed, **more}


def first_visible() -> str:
    """Returns the GPU to share, as CUDA_VISIBLE_DEVICES names it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


class Said(NamedTuple):
    """What a process has written, and its exit status; None: it was ended at the limit."""

    text: str
    status: int | None


def run(
    command: Sequence[object],
    processes: int,
    environment: dict[str, str],
    limit_s: float,
    *,
    end_together: bool = True,
) -> list[Said]:
    """Runs a Python script in so many processes, which find each other with `join`.

    `end_together`: soon after one has failed, the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"localhost:{_free_port()}"
        files = [Path(folder, str(i)) for i in range(processes)]
        started = []
        for i, file in enumerate(files):
            world = {_WORLD: f"{address} {processes} {i}"} if processes > 1 else {}
            with file.open("w") as output:  # a pipe that nobody reads would stop it
                started.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, command)], env=environment | world,
                        stdout=output, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        try:
            _await(started, limit_s, end_together)
        finally:
            statuses = [process.poll() for process in started]
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()
        texts = [file.read_text(errors="replace") for file in files]
        return [Said(*pair) for pair in zip(texts, statuses, strict=True)]


def _await(processes: Sequence[subprocess.Popen[Any]], limit_s: float, together: bool) -> None:
    until = time.monotonic() + limit_s
    is_short = False
    while time.monotonic() < until:
        statuses = [process.poll() for process in processes]
        if None not in statuses:
            return
        if together and not is_short and any(statuses):
            until, is_short = min(until, time.monotonic() + _GRACE_S), True
        time.sleep(0.05)


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def join() -> None:
    """Makes this process the one of the job that it was started as; before JAX starts."""
    where = os.environ.get(_WORLD)
    if where is None:
        return
    import jax

    import jaxcoll

    address, count, index = where.split()
    jax.distributed.initialize(address, int(count), int(index), local_device_ids=[0])
    jaxcoll.initialize()


class Together:
    """What the processes of a job agree on, without a collective of anyone's."""

    def __init__(self, wait_s: float = 60.0) -> None:
        from jaxcoll import _compat

        self.index, self.count = _compat.process_id_and_count()
        self._client = _compat.distributed_client() if self.count > 1 else None
        self._wait_ms = int(1000 * wait_s)
        self._number = 0

    def all(self, value: Any) -> list[Any]:
        """Returns the values of all, in their order. Everyone calls it."""
        if self._client is None:
            return [value]
        self._number += 1
        key = f"jaxcoll/gpu-job/{self._number}"
        self._client.key_value_set(f"{key}/{self.index}", json.dumps(value))
        return [
            json.loads(self._client.blocking_key_value_get(f"{key}/{i}", self._wait_ms))
            for i in range(self.count)
        ]

    def first(self, value: Any) -> Any:
        """Returns the value of process 0."""
        return self.all(value)[0]


def reason_of(said: Sequence[Said]) -> str:
    """Returns the line in which a job says why it has failed; nothing where it has not."""
    reasons = []
    for text, status in said:
        if status == 0:
            continue
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*:", line)]
        why = (errors or lines or ["it has said nothing"])[-1][:300]
        how = "ended at its limit" if status is None else f"status {status}"
        reasons.append((not errors, status is None, f"{how}: {why}"))
    return min(reasons)[-1] if reasons else ""

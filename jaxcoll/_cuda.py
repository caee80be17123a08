"""The engine for NVIDIA GPUs: finding it, its libraries and the other processes.

`libjaxcoll_cuda.so` is a library of its own, which is opened where JAX has a plugin for CUDA, and
nowhere else. CUDA's runtime, NCCL and cuBLASLt are those of JAX's own packages.
"""

import atexit
import ctypes
import functools as ft
import hashlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxcoll import _compat
from jaxcoll._config import config, logger
from jaxcoll._host import has_ended, host

_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# Of each library: the package that holds it in its folder `lib`, and its name there; in the order
# in which JAX looks.
_FILES = {
    "13": {
        "runtime": ("nvidia.cu13", "libcudart.so.13"),
        "nccl": ("nvidia.nccl", "libnccl.so.2"),
        "blas": ("nvidia.cu13", "libcublasLt.so.13"),
    },
    "12": {
        "runtime": ("nvidia.cuda_runtime", "libcudart.so.12"),
        "nccl": ("nvidia.nccl", "libnccl.so.2"),
        "blas": ("nvidia.cublas", "libcublasLt.so.12"),
    },
}
# On one H100 collective matmuls and most sums from 256 KiB on are behind XLA's (docs/gpu.md,
# "Measured"), and on several GPUs this engine has never run: "auto" leaves GPUs to jax.lax.
IS_FASTER = False
_TEXT_BYTES = 4096
_DAY_S = 86_400
_PATIENCE_S = 2.0

# As csrc/cuda/engine.h, Callbacks.
_EXCHANGE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t, ctypes.c_int64, ctypes.c_int64),
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
)
_SITE_TEXT = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
_IS_ANYONE_EXCUSED = ctypes.CFUNCTYPE(ctypes.c_int)
_GONE = ctypes.CFUNCTYPE(
    None,
    *(ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t, ctypes.c_int64),
    *(ctypes.c_void_p, ctypes.c_size_t),
)
_ABSENT = ctypes.CFUNCTYPE(
    None,
    *(ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t),
    *(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    *(ctypes.c_void_p, ctypes.c_size_t),
)
_TELL = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t, ctypes.c_int64, ctypes.c_char_p
)
_SAY = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class Target(NamedTuple):
    """A custom-call target: addresses of its stages."""

    name: str
    instantiate: int
    initialize: int
    execute: int


# ---- Finding -------------------------------------------------------------------------------------


def is_likely() -> bool:
    """Tells whether programs for CUDA may come. Imports nothing."""
    chosen = (jax.config.jax_platforms or "cuda").split(",")
    return (
        not {"cuda", "gpu"}.isdisjoint(chosen)
        and _plugin() is not None
        and library_path() is not None
    )


@ft.cache
def library_path() -> str | None:
    """Returns the library's path, or None where jaxcoll was installed without it."""
    extension = importlib.util.find_spec("jaxcoll._core")  # beside which it was installed
    if extension is None or extension.origin is None:
        return None
    found = Path(extension.origin).with_name("libjaxcoll_cuda.so")
    return str(found) if found.exists() else None


@ft.cache
def _plugin() -> str | None:
    return next((name for name in _PLUGINS if importlib.util.find_spec(name)), None)


def library_paths(plugin: str) -> dict[str, list[str]]:
    """Returns where to look for each library: JAX's package, then the system's folders."""
    found = {}
    for library, (package, name) in _FILES[plugin.removeprefix("jax_cuda")[:2]].items():
        try:
            spec = importlib.util.find_spec(package)
        except ImportError:  # there is no `nvidia` at all
            spec = None
        folders = list(spec.submodule_search_locations or ()) if spec else []
        found[library] = [*(str(Path(folder) / "lib" / name) for folder in folders), name]
    found["driver"] = ["libcuda.so.1"]
    return found


def prepare_environment() -> None:
    """Has NCCL order our communicators and XLA's on each GPU as the host calls them.

    Without it two collectives of different communicators can wait for each other. NCCL reads the
    variable when it first runs, so this must come before; a value of the user's stays.
    """
    if is_likely():
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


@ft.cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """Returns the library with its own libraries opened, or None and the reason."""
    path = library_path()
    if path is None:
        return None, "jaxcoll was installed without its engine for GPUs"
    plugin = _plugin()
    if plugin is None:
        return None, "JAX has no plugin for CUDA (pip install 'jax[cuda13]')"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return None, f"the engine for GPUs can't be loaded ({error})"
    return _opened(library, library_paths(plugin))


def _opened(
    library: ctypes.CDLL, paths: dict[str, list[str]]
) -> tuple[ctypes.CDLL | None, str | None]:
    _declare(library)
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    lines = ["\n".join(paths[name]).encode() for name in ("runtime", "driver", "nccl", "blas")]
    if library.jaxcoll_cuda_open(*lines, text, len(text)):
        return None, text.value.decode(errors="replace")
    library.jaxcoll_cuda_set_traps(os.environ.get("JAXCOLL_CUDA_TRAP", "1") != "0")
    library.jaxcoll_cuda_set_peers(os.environ.get("JAXCOLL_CUDA_PEERS", "1") != "0")
    library.jaxcoll_cuda_set_host(int.from_bytes(hashlib.sha256(host().encode()).digest()[:8]))
    library.jaxcoll_cuda_set_callbacks(
        _exchange, _site_text, _is_anyone_excused, _gone, _absent, _tell, _report, _notice
    )
    if _generation is not None:
        library.jaxcoll_cuda_set_generation(_generation)
    config._on_change("timeout_s", ft.partial(_set_limit, library.jaxcoll_cuda_set_timeout))
    config._on_change(
        "compile_timeout_s", ft.partial(_set_limit, library.jaxcoll_cuda_set_compile_timeout)
    )
    atexit.register(library.jaxcoll_cuda_stop)
    return library, None


def _declare(library: ctypes.CDLL) -> None:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    text = ctypes.c_char_p
    addresses = ctypes.POINTER(pointer)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "open": (ctypes.c_int, [text, text, text, text, text, size]),
        "versions": (None, [ctypes.POINTER(ctypes.c_int)]),
        "blas_problem": (None, [text, size]),
        "set_devices": (
            None,
            [ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int32), size],
        ),
        "set_callbacks": (
            None,
            [_EXCHANGE, _SITE_TEXT, _IS_ANYONE_EXCUSED, _GONE, _ABSENT, _TELL, _SAY, _SAY],
        ),
        "set_recorder": (None, [pointer] * 4),
        "set_timeout": (None, [ctypes.c_int64]),
        "set_compile_timeout": (None, [ctypes.c_int64]),
        "set_traps": (None, [ctypes.c_int]),
        "set_peers": (None, [ctypes.c_int]),
        "set_host": (None, [ctypes.c_uint64]),
        "ipc_problem": (None, [text, size]),
        "peer_problem": (None, [ctypes.POINTER(ctypes.c_int64), size, text, size]),
        "reset": (None, []),
        "set_generation": (None, [ctypes.c_int64]),
        "stop": (None, []),
        "num_calls": (ctypes.c_uint64, []),
        "target": (text, [size, addresses, addresses, addresses]),
        "type": (None, [addresses, addresses]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"jaxcoll_cuda_{name}")
        function.restype, function.argtypes = result, arguments


def _set_limit(setter: Callable[[int], None], seconds: float | None) -> None:
    setter(-1 if seconds is None else int(seconds * 1e9))


# ---- What is there -------------------------------------------------------------------------------


def versions(library: ctypes.CDLL) -> dict[str, str]:
    """Returns what was found, as people write it."""
    four = (ctypes.c_int * 4)()
    library.jaxcoll_cuda_versions(four)
    runtime, driver, nccl, blas = four
    found = {
        "CUDA": f"{runtime // 1000}.{runtime % 1000 // 10}",
        "driver for CUDA": f"{driver // 1000}.{driver % 1000 // 10}",
        "NCCL": f"{nccl // 10000}.{nccl % 10000 // 100}.{nccl % 100}",
    }
    if blas:
        found["cuBLASLt"] = f"{blas // 10000}.{blas % 10000 // 100}.{blas % 100}"
    return found


def fingerprint() -> str:
    """Returns what two processes must share to decide alike."""
    if not is_likely():
        return "none"
    library, _ = load()
    if library is None:
        return "off"
    order = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    return f"NCCL {versions(library)['NCCL']}, launch order {order}"


def matmul_problem(library: ctypes.CDLL) -> str | None:
    """Says why matrices can't be multiplied, or None."""
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    library.jaxcoll_cuda_blas_problem(text, len(text))
    return f"cuBLASLt can't be used ({text.value.decode()})" if text.value else None


def peer_problem(library: ctypes.CDLL, devices: Sequence[int]) -> str | None:
    """Says why small sums of these devices, by rank, don't go over peer memory, or None.

    Of a group in several processes that is not connected yet: as far as this process knows.
    """
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    ids = (ctypes.c_int64 * len(devices))(*devices)
    library.jaxcoll_cuda_peer_problem(ids, len(devices), text, len(text))
    return text.value.decode() or None


def ipc_problem(library: ctypes.CDLL) -> str | None:
    """Says why GPUs can't read the memory of another process, or None."""
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    library.jaxcoll_cuda_ipc_problem(text, len(text))
    return text.value.decode() or None


def targets(library: ctypes.CDLL) -> Iterator[Target]:
    """Yields the custom-call targets."""
    stages = [ctypes.c_void_p() for _ in range(3)]
    for i in range(1 << 16):
        name = library.jaxcoll_cuda_target(i, *map(ctypes.byref, stages))
        if name is None:
            return
        yield Target(name.decode(), *(stage.value or 0 for stage in stages))


def state_type(library: ctypes.CDLL) -> tuple[int, int]:
    """Returns the addresses of the id and of the functions of a call site's state."""
    type_id, type_info = ctypes.c_void_p(), ctypes.c_void_p()
    library.jaxcoll_cuda_type(ctypes.byref(type_id), ctypes.byref(type_info))
    return type_id.value or 0, type_info.value or 0


def set_devices(library: ctypes.CDLL, devices: Sequence[Any]) -> None:
    """Tells the engine which global ids the GPUs of this process have.

    Raises:
        ValueError: several of the devices are one GPU: XLA tells a call which GPU it is on, and so
            the engine could not tell them apart.
    """
    count = len(devices)
    numbers = [device.local_hardware_id for device in devices]
    if len(set(numbers)) < count:
        raise ValueError(f"several devices of JAX are one GPU: CUDA's numbers are {numbers}")
    ids = (ctypes.c_int64 * count)(*(device.id for device in devices))
    library.jaxcoll_cuda_set_devices(ids, (ctypes.c_int32 * count)(*numbers), count)


def record(library: ctypes.CDLL, functions: Sequence[int]) -> None:
    """Has calls stand in the flight recorder of the extension, as `_core.recorder` returns it."""
    library.jaxcoll_cuda_set_recorder(*functions)


def num_calls() -> int:
    """Returns how many calls were put on streams, without loading anything for it."""
    library = load()[0] if load.cache_info().currsize else None
    return 0 if library is None else library.jaxcoll_cuda_num_calls()


_generation: int | None = None  # what set_generation said last
_BETWEEN = -1


def reset(*, alone: bool) -> None:
    """Ends all communicators; the next programs make new ones.

    Unless the process is alone, programs are refused until `set_generation` says that all have
    come.
    """
    if not alone:
        set_generation(_BETWEEN)
    library = load()[0] if load.cache_info().currsize else None
    if library is not None:
        library.jaxcoll_cuda_reset()


def set_generation(generation: int) -> None:
    """Sets the number of this time, which all processes of the job have come to; < 0: not yet."""
    global _generation
    _generation = generation
    library = load()[0] if load.cache_info().currsize else None
    if library is not None:
        library.jaxcoll_cuda_set_generation(generation)


# ---- What the engine asks for --------------------------------------------------------------------

_sites: dict[int, str] = {}
_failures: list[str] = []


def describe_site(site: int, text: str) -> None:
    """Sets the text that errors show for a call site."""
    _sites[site] = text


def failures() -> list[str]:
    """Returns why groups have failed, in order."""
    return list(_failures)


def failure_behind(num_known: int) -> str | None:
    """Returns what failed beyond the first `num_known`, for an error of XLA's that may follow.

    XLA can notice what was aborted a moment before we are told.
    """
    if not load.cache_info().currsize or load()[0] is None:
        return None
    until = time.monotonic() + _PATIENCE_S
    while len(_failures) <= num_known and time.monotonic() < until:
        time.sleep(0.01)
    return next(iter(_failures[num_known:]), None)


def _write(text: str, to: int, size: int) -> None:
    data = text.encode()[: size - 1] + b"\0"
    ctypes.memmove(to, data, len(data))


@_SITE_TEXT
def _site_text(site: int, to: int, size: int) -> None:
    _write(_sites.get(site, ""), to, size)


# Who tells of the other processes of this host, see `ask`.
_excuses: list[Callable[[], bool]] = []
_absentees: list[Callable[[list[int], int, int, int], str]] = []


def ask(
    is_anyone_excused: Callable[[], bool], absent: Callable[[list[int], int, int, int], str]
) -> None:
    """Has the engine ask, when a rank does not come, who has a reason, and who it is.

    Both are the extension's (`_core.pyi`).
    """
    _excuses.append(is_anyone_excused)
    _absentees.append(absent)


@_IS_ANYONE_EXCUSED
def _is_anyone_excused() -> int:
    try:
        return int(any(excuse() for excuse in _excuses))
    except Exception:  # none may leave a function that C calls
        logger.exception("jaxcoll: whether anyone is excused")
        return 0


# The processes of this host, by number; and those of the devices in groups that have connected.
_pids: dict[int, int] = {}
_process_of: dict[int, int] = {}


def know(pids: Mapping[int, int]) -> None:
    """Has those who wait for one of these processes notice that it has ended."""
    _pids.clear()
    _pids.update(pids)


def gone(devices: Sequence[int], generation: int) -> str:
    """Returns which ranks will not come, as errors name them, or nothing.

    Of processes that have ended, or in which the group has failed; in lines of their own, why.

    Args:
        devices: global ids, in rank order, of a group that has connected.
        generation: of its communicators.
    """
    ranks: dict[int, list[int]] = {}
    for rank, device in enumerate(devices):
        if device in _process_of:
            ranks.setdefault(_process_of[device], []).append(rank)
    me, _ = _compat.process_id_and_count()
    failures = _failures_of(devices, generation)
    names, lines = [], []
    for process in sorted(set(ranks) - {me}):
        pid = _pids.get(process)
        listed = ", ".join(map(str, ranks[process]))
        here = "" if pid is None else f", pid {pid}"
        if pid is not None and has_ended(pid):
            names.append(f"rank {listed} (process {process}{here}, gone)")
        elif process in failures:
            names.append(f"rank {listed} (process {process}{here}, failed)")
            lines += [f"  rank {rank}: {failures[process]}" for rank in ranks[process]]
    return "\n".join([", ".join(names), *lines])


def _key(devices: Sequence[int], generation: int) -> str:
    """Returns what the keys of a group begin with."""
    group = hashlib.sha256(repr(list(devices)).encode()).hexdigest()[:16]
    return f"jaxcoll/cuda/{generation}/{group}"


# In which processes a group has failed, and why, in a line each: by the group's key.
_told: dict[str, dict[int, str]] = {}
_asking: set[str] = set()


def _failures_of(devices: Sequence[int], generation: int) -> dict[int, str]:
    """Returns in which processes a group has failed, as far as is known, and asks once more.

    The service may take its time, for which the engine, whose limits it would hold up, must not
    wait: what comes of it is there the next time.
    """
    key = _key(devices, generation)

    def ask() -> None:
        try:
            client = _compat.distributed_client()
            said = client.key_value_dir_get(f"{key}/failed/") if client is not None else []
            lines = {int(name.rpartition("/")[2]): text.partition("\n")[0] for name, text in said}
            _told.setdefault(key, {}).update(lines)
        except jax.errors.JaxRuntimeError as error:
            logger.debug("jaxcoll: whether the group has failed elsewhere: %s", error)
        finally:
            _asking.discard(key)

    if key not in _asking:
        _asking.add(key)
        threading.Thread(target=ask, name="jaxcoll-ask", daemon=True).start()
    return _told.get(key, {})


@_GONE
def _gone(devices: Any, count: int, generation: int, to: int, size: int) -> None:
    try:
        _write(gone([devices[i] for i in range(count)], generation), to, size)
    except Exception:  # none may leave a function that C calls
        logger.exception("jaxcoll: whether anyone is gone")


@_ABSENT
def _absent(
    devices: Any, count: int, group: int, site: int, execution: int, to: int, size: int
) -> None:
    try:
        processes = [_process_of.get(devices[i], -1) for i in range(count)]
        said = (absent(processes, group, site, execution) for absent in _absentees)
        _write(next((text for text in said if text), ""), to, size)
    except Exception:  # none may leave a function that C calls
        logger.exception("jaxcoll: who has not come")


@_TELL
def _tell(devices: Any, count: int, generation: int, text: bytes) -> None:
    def tell(key: str, text: str) -> None:
        try:
            if (client := _compat.distributed_client()) is not None:
                client.key_value_set(key, text)
        except jax.errors.JaxRuntimeError as error:
            logger.debug("jaxcoll: that the group has failed: %s", error)

    try:
        me, _ = _compat.process_id_and_count()
        key = f"{_key([devices[i] for i in range(count)], generation)}/failed/{me}"
        said = key, text.decode(errors="replace")
        threading.Thread(target=tell, args=said, name="jaxcoll-tell", daemon=True).start()
    except Exception:  # none may leave a function that C calls
        logger.exception("jaxcoll: that a group has failed")


@_SAY
def _notice(text: bytes) -> None:
    logger.warning("jaxcoll: %s", text.decode(errors="replace"))


@_SAY
def _report(text: bytes) -> None:
    _failures.append(text.decode(errors="replace"))
    logger.error(
        "jaxcoll: a collective on GPUs has failed, and what it was to compute is lost: %s",
        _failures[-1],
    )


@_EXCHANGE
def _exchange(
    devices: Any,
    count: int,
    generation: int,
    number: int,
    rows: int,
    row_bytes: int,
    text: int,
    size: int,
) -> int:
    try:
        data = bytearray(ctypes.string_at(rows, count * row_bytes))
        parts = [memoryview(data)[i * row_bytes : (i + 1) * row_bytes] for i in range(count)]
        problem = exchange([devices[i] for i in range(count)], generation, number, parts)
        ctypes.memmove(rows, bytes(data), len(data))
    except BaseException as error:  # none may leave a function that C calls
        problem = f"{type(error).__name__}: {error}"
    _write(problem or "", text, size)
    return 1 if problem else 0


_GAVE_UP = "gave up: "
_ROUNDS = 16  # as csrc/cuda/rounds.h has it: kMost
_LOOK_S = 0.5  # how often to look whether who is waited for is still there
# What the end of a probe takes that its limit has ended.
_PROBE_S = 5.0


def exchange(
    devices: Sequence[int], generation: int, number: int, rows: Sequence[memoryview]
) -> str | None:
    """Makes a round of the processes of a group (csrc/cuda/rounds.h); says why it failed.

    Each says what stands in the rows of its devices, and gets what the others say, when all have
    come. Who gives up in a round says so in the next one, so that those who come later do not wait
    for it.

    Args:
        devices: global ids, in rank order.
        generation: of the communicators, see `set_generation`.
        number: of the round; those that belong together from a multiple of 16 on.
        rows: of one size, for each device; filled in where it is another process's.
    """
    client = _compat.distributed_client()
    if client is None:
        return "the group is in several processes, and this one is alone"
    process_of = {device.id: device.process_index for device in jax.devices("cuda")}
    if missing := [device for device in devices if device not in process_of]:
        return f"JAX has no devices {missing}"
    _process_of.update(process_of)
    me, _ = _compat.process_id_and_count()
    rows_of: dict[int, list[memoryview]] = {}
    for device, row in zip(devices, rows, strict=True):
        rows_of.setdefault(process_of[device], []).append(row)
    key = _key(devices, generation)
    client.key_value_set(f"{key}/{number}/{me}", b"".join(rows_of[me]).hex())
    said, problem = _ask(
        client, f"{key}/{number}/%d", sorted(set(rows_of) - {me}), number, _limit_s(number)
    )
    if problem:
        client.key_value_set(f"{key}/{number + 1}/{me}", _GAVE_UP + problem)
        return problem
    for process, text in said.items():
        data = bytes.fromhex(text)
        for i, row in enumerate(rows_of[process]):
            row[:] = data[i * len(row) : (i + 1) * len(row)]
    return None


def _said_by(process: int, client: Any, key: str, until: float) -> str:
    """Returns what a process says under `key`.

    Raises:
        JaxRuntimeError: it has not come in time.
        RuntimeError: it has ended.
    """
    pid = _pids.get(process)
    while True:
        left_s = until - time.monotonic()
        ends = pid is not None and has_ended(pid)  # what it has said before is there
        try:
            return client.blocking_key_value_get(key, max(1, int(1000 * min(left_s, _LOOK_S))))
        except jax.errors.JaxRuntimeError as error:
            if ends:
                raise RuntimeError(f"process {process} (pid {pid}) has ended") from None
            if left_s <= _LOOK_S or "DEADLINE_EXCEEDED" not in str(error):
                raise


def _limit_s(number: int) -> float:
    """Returns how long a process waits for the others in a round."""
    limits = [config.timeout_s]
    if number % _ROUNDS == 0:  # they may still compile the program
        limits.append(config.compile_timeout_s)
    elif number % _ROUNDS > 1 and config.timeout_s is not None:  # or wait so long for a probe
        limits.append(config.timeout_s + _PROBE_S)
    return max(_DAY_S if limit is None else limit for limit in limits)


def _ask(
    client: Any, key: str, processes: Sequence[int], number: int, limit_s: float
) -> tuple[dict[int, str], str | None]:
    """Returns what processes say under `key`, and who does not or has given up."""
    said: dict[int, str] = {}
    until = time.monotonic() + limit_s
    for process in processes:
        try:
            said[process] = _said_by(process, client, key % process, until)
        except jax.errors.JaxRuntimeError as error:
            what = "communicators" if number < _ROUNDS else "windows"
            call = "collective" if number < _ROUNDS else "collective matmul"
            has_not = (
                f"has not gone on to make its {what}"
                if number % _ROUNDS
                else f"has not begun a program with a {call} over them"
            )
            why = "" if "DEADLINE_EXCEEDED" in str(error) else f" ({error})"
            return said, f"process {process} {has_not} within {limit_s:g} s{why}"
        except RuntimeError as error:
            return said, str(error)
        if said[process].startswith(_GAVE_UP):
            return said, f"process {process} {said[process]}"
    return said, None

"""NCCL and copies of CUDA's, called with nothing of JAX's between: what our calls stand beside.

The libraries are those that jaxcoll has found, JAX's own. Every process has the ranks of its GPUs.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from jaxcoll import _cuda

_ID_BYTES = 128
_NON_BLOCKING = 1  # a stream that does not wait for the null stream
_DEVICE_TO_DEVICE = 3
_SUM = 0
# ncclDataType_t, and bytes of each.
_TYPES = {"uint8": (1, 1), "float32": (7, 4), "bfloat16": (9, 2)}


class _Id(ctypes.Structure):  # ncclUniqueId: passed by value
    _fields_ = (("bytes", ctypes.c_char * _ID_BYTES),)


class RawError(RuntimeError):
    """A function of CUDA's or NCCL's has failed."""


def open_libraries(paths: dict[str, list[str]]) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Returns CUDA's runtime and NCCL, the first of each that can be opened."""
    return _opened(paths["runtime"]), _opened(paths["nccl"])


def of_jax() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Returns those that JAX uses.

    Raises:
        RawError: there is no plugin for CUDA, or a library is missing.
    """
    plugin = _cuda._plugin()
    if plugin is None:
        raise RawError("JAX has no plugin for CUDA")
    return open_libraries(_cuda.library_paths(plugin))


def _opened(paths: Sequence[str]) -> ctypes.CDLL:
    problems = []
    for path in paths:
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            problems.append(str(error))
    raise RawError("; ".join(problems))


class Ranks:
    """The ranks of this process in one communicator, each with a stream and two buffers.

    Args:
        libraries: of `open_libraries`.
        ordinals: CUDA's numbers of this process's GPUs.
        first: the rank of the first of them; the others follow.
        size: how many ranks there are in all.
        share_id: gives all processes the bytes of the one with rank 0.
        most: bytes of each buffer.
    """

    def __init__(
        self,
        libraries: tuple[ctypes.CDLL, ctypes.CDLL],
        ordinals: Sequence[int],
        first: int,
        size: int,
        share_id: Callable[[bytes], bytes],
        most: int,
    ) -> None:
        self.size, self.most = size, most
        self._runtime, self._nccl = libraries
        self._nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _Id, ctypes.c_int]
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        own = _Id()
        if first == 0:
            self._of_nccl("ncclGetUniqueId", ctypes.byref(own))
        shared = _Id.from_buffer_copy(share_id(bytes(own)))
        self._seats: list[tuple[int, Any, Any, Any, Any]] = []
        for ordinal in ordinals:
            self._of_cuda("cudaSetDevice", ordinal)
            stream, source, target = (ctypes.c_void_p() for _ in range(3))
            self._of_cuda("cudaStreamCreateWithFlags", ctypes.byref(stream), _NON_BLOCKING)
            for buffer in (source, target):
                self._of_cuda("cudaMalloc", ctypes.byref(buffer), ctypes.c_size_t(most))
                self._of_cuda("cudaMemset", buffer, 0, ctypes.c_size_t(most))
            self._seats.append((ordinal, ctypes.c_void_p(), stream, source, target))
        self._of_nccl("ncclGroupStart")
        for i, (ordinal, comm, *_) in enumerate(self._seats):
            self._of_cuda("cudaSetDevice", ordinal)
            self._of_nccl("ncclCommInitRank", ctypes.byref(comm), size, shared, first + i)
        self._of_nccl("ncclGroupEnd")

    def all_reduce(self, counts: Sequence[int], dtype: str, times: int) -> None:
        """Sums leaves of so many elements in place, in one group of calls; so often, awaited."""
        number, width = _TYPES[dtype]

        def call(comm: Any, stream: Any, _: Any, target: Any) -> None:
            at = 0
            for count in counts:
                place = ctypes.c_void_p(target.value + at)
                self._of_nccl(
                    "ncclAllReduce", place, place, ctypes.c_size_t(count), number, _SUM, comm,
                    stream,
                )  # fmt: skip
                at += count * width

        self._run(call, times, sum(counts) * width)

    def all_gather(self, size: int, times: int) -> None:
        """Gathers so many bytes of each rank."""
        number, _ = _TYPES["uint8"]

        def call(comm: Any, stream: Any, source: Any, target: Any) -> None:
            count = ctypes.c_size_t(size)
            self._of_nccl("ncclAllGather", source, target, count, number, comm, stream)

        self._run(call, times, size * self.size)

    def reduce_scatter(self, count: int, dtype: str, times: int) -> None:
        """Sums, and leaves each rank so many elements of the result."""
        number, width = _TYPES[dtype]

        def call(comm: Any, stream: Any, source: Any, target: Any) -> None:
            self._of_nccl(
                "ncclReduceScatter", source, target, ctypes.c_size_t(count), number, _SUM, comm,
                stream,
            )  # fmt: skip

        self._run(call, times, count * width * self.size)

    def copy(self, size: int, times: int) -> None:
        """Copies so many bytes on each GPU."""

        def call(_: Any, stream: Any, source: Any, target: Any) -> None:
            count = ctypes.c_size_t(size)
            self._of_cuda("cudaMemcpyAsync", target, source, count, _DEVICE_TO_DEVICE, stream)

        self._run(call, times, size)

    def read(self, seat: int, size: int) -> bytes:
        """Returns the first bytes of a local rank's result."""
        to = ctypes.create_string_buffer(size)
        device_to_host = 2
        target = self._seats[seat][-1]
        self._of_cuda("cudaMemcpy", to, target, ctypes.c_size_t(size), device_to_host)
        return to.raw

    def fill(self, seat: int, data: bytes) -> None:
        """Puts bytes into both buffers of a local rank."""
        host_to_device = 1
        for buffer in self._seats[seat][-2:]:
            self._of_cuda("cudaMemcpy", buffer, data, ctypes.c_size_t(len(data)), host_to_device)

    def _run(self, call: Callable[..., None], times: int, need: int) -> None:
        if need > self.most:
            raise RawError(f"the buffers have {self.most} bytes, {need} are needed")
        for _ in range(times):
            self._of_nccl("ncclGroupStart")
            for ordinal, *seat in self._seats:
                self._of_cuda("cudaSetDevice", ordinal)
                call(*seat)
            self._of_nccl("ncclGroupEnd")
        for _, _, stream, *_ in self._seats:
            self._of_cuda("cudaStreamSynchronize", stream)

    def _of_cuda(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._runtime, name)(*arguments):
            text = self._runtime.cudaGetErrorString(error).decode()
            raise RawError(f"{name}: {text}")

    def _of_nccl(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._nccl, name)(*arguments):
            text = self._nccl.ncclGetErrorString(error).decode()
            raise RawError(f"{name}: {text}")

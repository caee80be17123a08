"""Finding the engine for GPUs, and the exchange between processes, without either."""

import threading
from typing import Any

import jax
import pytest

import jaxcoll
from jaxcoll import _compat, _cuda


class Store:
    """A key-value store as that of JAX's coordination service."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, limit_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, limit_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self._values[key]


class Device:
    def __init__(self, number: int) -> None:
        self.id = number
        self.process_index = number // 2


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what runs the exchange of a group in some processes, each a thread."""
    store, here = Store(), threading.local()
    monkeypatch.setattr(_compat, "distributed_client", lambda: store)
    monkeypatch.setattr(_compat, "process_id_and_count", lambda: (here.process, 3))
    monkeypatch.setattr(jax, "devices", lambda platform: [Device(i) for i in range(6)])

    def run(group: list[int], processes: list[int], generation: int = 0) -> dict[int, Any]:
        """Makes two rounds; returns what each process has then, or why it failed."""
        found: dict[int, Any] = {}

        def of(process: int) -> None:
            here.process = process
            for number in range(2):
                rows = [bytearray(4) for _ in group]
                for device, row in zip(group, rows, strict=True):
                    if Device(device).process_index == process:
                        row[:] = f"{number} {device:2}".encode()
                problem = _cuda.exchange(group, generation, number, list(map(memoryview, rows)))
                found[process] = problem or [bytes(row).decode() for row in rows]
                if problem:
                    return

        threads = [threading.Thread(target=of, args=(process,)) for process in processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return run


def test_all_processes_of_a_group_get_what_all_say(exchange: Any):
    assert exchange([4, 0, 2], [0, 1, 2]) == {i: ["1  4", "1  0", "1  2"] for i in range(3)}
    assert exchange([0, 1, 2], [0, 1]) == {i: ["1  0", "1  1", "1  2"] for i in range(2)}
    assert exchange([0, 1, 2], [0, 1], generation=1) == {
        i: ["1  0", "1  1", "1  2"] for i in (0, 1)
    }


def test_a_process_that_does_not_come_is_named(exchange: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxcoll.config, "timeout_s", 0.1)
    monkeypatch.setattr(jaxcoll.config, "compile_timeout_s", 0.2)
    found = exchange([0, 2, 4], [0, 2])
    text = "process 1 has not begun a program with a collective over them within 0.2 s"
    assert all(text in said for said in found.values())


def test_one_that_comes_too_late_learns_why(exchange: Any, monkeypatch: pytest.MonkeyPatch):
    """And does not wait inside NCCL for those that have given up."""
    monkeypatch.setattr(jaxcoll.config, "timeout_s", 0.1)
    monkeypatch.setattr(jaxcoll.config, "compile_timeout_s", 0.1)
    exchange([0, 2, 4], [0, 2])
    (said,) = exchange([0, 2, 4], [1]).values()
    assert said.startswith("process 0 gave up: process 1 has not begun a program")


def test_one_that_ends_between_is_named(exchange: Any, monkeypatch: pytest.MonkeyPatch):
    """Soon: nobody compiles any more."""
    monkeypatch.setattr(jaxcoll.config, "timeout_s", 0.2)

    class Ending(Store):
        def key_value_set(self, key: str, value: str) -> None:
            if not key.endswith("/1/1"):
                super().key_value_set(key, value)

    store = Ending()
    monkeypatch.setattr(_compat, "distributed_client", lambda: store)
    found = exchange([0, 2], [0, 1])
    assert found[0].startswith("process 1 has not gone on to make its communicators within 0.2 s")
    assert found[1] == ["1  0", "1  2"]


def test_devices_that_jax_does_not_know(exchange: Any):
    assert "JAX has no devices [9]" in exchange([0, 9], [0])[0]


def test_where_libraries_are_looked_for():
    paths = _cuda.library_paths("jax_cuda13_plugin")
    assert paths["runtime"][-1] == "libcudart.so.13"
    assert paths["nccl"][-1] == "libnccl.so.2"
    assert _cuda.library_paths("jax_cuda12_plugin")["blas"][-1] == "libcublasLt.so.12"


def test_the_library_of_a_package_comes_first(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "nvidia" / "nccl" / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    paths = _cuda.library_paths("jax_cuda13_plugin")["nccl"]
    assert str(tmp_path / "nvidia/nccl/lib/libnccl.so.2") in paths[:-1]


class Chip(Device):
    def __init__(self, number: int, hardware: int) -> None:
        super().__init__(number)
        self.local_hardware_id = hardware


def test_devices_are_known_by_the_numbers_of_cuda():
    """Which are not JAX's where a process has a part of the GPUs."""
    told: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def jaxcoll_cuda_set_devices(ids: Any, ordinals: Any, count: int) -> None:
            told.extend((ids[i], ordinals[i]) for i in range(count))

    library: Any = Library()
    _cuda.set_devices(library, [Chip(4, 3), Chip(5, 1)])
    assert told == [(4, 3), (5, 1)]
    with pytest.raises(ValueError, match=r"several devices of JAX are one GPU: .* \[0, 0\]"):
        _cuda.set_devices(library, [Chip(0, 0), Chip(1, 0)])


def test_info_says_why_it_is_off():
    if _cuda.is_likely():
        pytest.skip("there is a plugin for CUDA")
    assert "programs for GPUs run on jax.lax" in jaxcoll.info().off["GPU"]


def test_an_error_of_xla_waits_for_its_cause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_cuda, "_failures", ["an old one"])
    monkeypatch.setattr(_cuda, "load", _Loaded())
    late = threading.Timer(0.1, lambda: _cuda._failures.append("rank 1 did not come"))
    late.start()
    with pytest.raises(jaxcoll.CollectiveError, match="rank 1 did not come"), jaxcoll.watch():
        raise jax.errors.JaxRuntimeError("CUDA_ERROR_LAUNCH_FAILED")
    late.join()


class _Loaded:
    """As `_cuda.load` after it has found the engine."""

    currsize = 1

    def cache_info(self) -> "_Loaded":
        return self

    def __call__(self) -> tuple[object, None]:
        return object(), None

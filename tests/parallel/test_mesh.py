"""`make_mesh` and `DeviceMeshManager`."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxcoll import DeviceMeshManager, _engine, make_mesh


def test_sizes_and_names():
    mesh = make_mesh({"data": 2, "tensor": 4})
    assert dict(mesh.shape) == {"data": 2, "tensor": 4}
    assert list(mesh.devices.flat) == jax.devices()
    assert mesh.axis_types == (AxisType.Auto,) * 2


def test_one_size_is_inferred():
    assert dict(make_mesh({"data": -1, "tensor": 2}).shape) == {"data": 4, "tensor": 2}
    assert dict(make_mesh([("a", 1), ("b", -1)], devices=jax.devices()[:3]).shape) == {
        "a": 1,
        "b": 3,
    }


def test_devices_may_be_left_out():
    mesh = make_mesh({"data": 3}, allow_unused=True)
    assert list(mesh.devices) == jax.devices()[:3]


def test_axis_types():
    assert make_mesh({"a": 8}, axis_types=AxisType.Explicit).axis_types == (AxisType.Explicit,)
    types = (AxisType.Auto, AxisType.Explicit)
    assert make_mesh({"a": 2, "b": 4}, axis_types=types).axis_types == types


@dataclasses.dataclass(frozen=True)
class Device:
    """One of a platform, or of a process, that is not here."""

    id: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


def ids(mesh: Any) -> list[Any]:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aabb", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("abab", [[0, 1, 4, 5], [2, 3, 6, 7]]),  # processes that were dealt out to hosts
        ("abba", [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("abac", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("", [[0, 1, 2, 3], [4, 5, 6, 7]]),  # nobody knows
    ],
)
def test_host_by_host(hosts: str, expected: Any, monkeypatch: pytest.MonkeyPatch):
    """Of four processes with two devices each: the last axis stays on a host."""
    devices = [Device(i, process_index=i // 2) for i in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(_engine, "knows_hosts", lambda: bool(hosts))
    monkeypatch.setattr(_engine, "host_of", lambda process: hosts[process])
    assert ids(make_mesh({"data": 2, "tensor": -1})) == expected
    # Devices that are given keep their order.
    assert ids(make_mesh({"data": 8}, devices=devices)) == list(range(8))


def test_neighbors_of_a_platform():
    """JAX knows in which order the chips of a tray are a ring."""
    devices = [
        Device(i, 0, "tpu", "TPU v3", (i // 2 % 2, i // 4, 0), core_on_chip=i % 2) for i in range(8)
    ]
    assert ids(make_mesh({"data": -1}, devices=devices)) == [0, 1, 2, 3, 6, 7, 4, 5]


@pytest.mark.parametrize(
    ("axes", "keywords", "text"),
    [
        ({"a": 16}, {}, "a mesh of 16 = 16 devices, but there are 8.*simulate_cpu_devices(16)"),
        ({"a": 2, "b": 3}, {}, "a mesh of 2x3 = 6 devices leaves 2 of 8 unused.*devices()[:6]"),
        ({"a": -1, "b": -1}, {}, 'only one size can be -1, not those of "a", "b"'),
        ({"a": -1, "b": 3}, {}, '"a" is -1, but the other axes need 3 devices'),
        ({"a": 0}, {}, '"a": expected a size of at least 1, or -1'),
        ({"a": 2.0}, {}, "expected names with whole numbers, got 'a': 2.0"),
        ([("a", 2), ("a", 4)], {}, '"a" stands twice'),
        ({}, {}, "expected at least one axis"),
        ({"a": 8}, {"axis_types": (AxisType.Auto,) * 2}, "one for each of the 1 axes, got 2"),
    ],
)
def test_errors(axes: Any, keywords: Any, text: str):
    with pytest.raises(ValueError, match=r"^make_mesh: ") as error:
        make_mesh(axes, **keywords)
    pattern = ".*".join(map(re.escape, text.split(".*")))
    assert re.search(pattern, str(error.value)), error.value


# ---- The manager ---------------------------------------------------------------------------------


def test_the_manager_knows_its_devices():
    assert DeviceMeshManager().devices == jax.devices()
    manager = DeviceMeshManager(jax.devices()[2:5])
    assert manager.num_devices == 3
    manager.devices.clear()  # a copy
    assert manager.devices == jax.devices()[2:5]


@pytest.mark.parametrize("shape", [{"data": 2, "model": 1}, [("data", 2), ("model", 1)]])
def test_the_manager_takes_the_first_devices(shape: Any):
    mesh = DeviceMeshManager().create_device_mesh(shape)
    assert dict(mesh.shape) == {"data": 2, "model": 1}
    assert list(mesh.devices.flat) == jax.devices()[:2]
    mesh = DeviceMeshManager().create_device_mesh(shape, devices=jax.devices()[4:])
    assert list(mesh.devices.flat) == jax.devices()[4:6]


def test_the_managers_meshes():
    manager = DeviceMeshManager()
    assert dict(manager.create_data_parallel_mesh().shape) == {"data": 8}
    assert dict(manager.create_data_parallel_mesh(4, axis_name="batch").shape) == {"batch": 4}
    assert dict(manager.create_model_parallel_mesh().shape) == {"model": 8}
    assert dict(manager.create_model_parallel_mesh(2, "tensor").shape) == {"tensor": 2}
    assert dict(manager.create_hybrid_mesh().shape) == {"data": 1, "model": 1}
    mesh = manager.create_hybrid_mesh(2, 3, data_axis="rows", model_axis="columns")
    assert manager.get_mesh_info(mesh) == {
        "total_devices": 6,
        "axes": {"rows": 2, "columns": 3},
    }


def test_the_manager_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="a mesh of 4x4 = 16 devices, but there are 8"):
        DeviceMeshManager().create_hybrid_mesh(4, 4)
    with pytest.raises(ValueError, match="but there are 2"):
        DeviceMeshManager(jax.devices()[:2]).create_data_parallel_mesh(3)
    with pytest.raises(ValueError, match='"x" stands twice'):
        DeviceMeshManager().create_hybrid_mesh(2, 2, "x", "x")

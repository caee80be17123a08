"""Every block of Artifex's page on device meshes, in its order."""

# The page imports from `artifex.generative_models.training.distributed`.
from typing import Any

import jax
import numpy as np
import pytest

from jaxcoll import DeviceMeshManager


def test_basic_usage():
    # Create manager (uses all available devices)
    manager = DeviceMeshManager()
    assert f"Available devices: {manager.num_devices}" == "Available devices: 8"

    # Create a data-parallel mesh using all devices
    mesh = manager.create_data_parallel_mesh()

    assert dict(mesh.shape) == {"data": 8}
    assert list(mesh.devices) == manager.devices == jax.devices()


def test_data_parallelism():
    # Create mesh for data parallelism with 4 devices
    manager = DeviceMeshManager()
    mesh = manager.create_data_parallel_mesh(num_devices=4, axis_name="batch")

    # Use the mesh with JAX sharding
    from jax.sharding import NamedSharding, PartitionSpec

    # Shard data along batch dimension
    data_sharding = NamedSharding(mesh, PartitionSpec("batch"))

    x = np.arange(24.0).reshape(8, 3)
    placed = jax.device_put(x, data_sharding)
    assert [shard.data.shape for shard in placed.addressable_shards] == [(2, 3)] * 4
    np.testing.assert_array_equal(placed, x)


def test_model_parallelism():
    from jax.sharding import NamedSharding, PartitionSpec

    # Create mesh for model parallelism
    manager = DeviceMeshManager()
    mesh = manager.create_model_parallel_mesh(num_devices=2, axis_name="model")

    # Shard model parameters
    param_sharding = NamedSharding(mesh, PartitionSpec(None, "model"))

    w = np.arange(24.0).reshape(4, 6)
    placed = jax.device_put(w, param_sharding)
    assert [shard.data.shape for shard in placed.addressable_shards] == [(4, 3)] * 2
    np.testing.assert_array_equal(placed, w)


def test_hybrid_parallelism():
    manager = DeviceMeshManager()
    # Create 2D mesh: 2 devices for data, 2 for model (total 4 devices)
    mesh = manager.create_hybrid_mesh(
        data_parallel_size=2,
        model_parallel_size=2,
        data_axis="data",
        model_axis="model",
    )

    # Get mesh info
    info = manager.get_mesh_info(mesh)
    assert f"Total devices: {info['total_devices']}" == "Total devices: 4"
    assert f"Axes: {info['axes']}" == "Axes: {'data': 2, 'model': 2}"

    assert mesh.devices.shape == (2, 2)
    assert list(mesh.devices.flat) == jax.devices()[:4]


def test_dict_or_list_specification():
    manager = DeviceMeshManager()

    # Using dict specification
    mesh_dict = manager.create_device_mesh({"data": 2, "model": 1})

    # Using list of tuples specification
    mesh_list = manager.create_device_mesh([("data", 2), ("model", 1)])

    assert mesh_dict == mesh_list
    assert mesh_dict.axis_names == ("data", "model")
    assert mesh_dict.devices.shape == (2, 1)


# ---- What the page says beside its blocks --------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_devices_of_its_own(count: int):
    manager = DeviceMeshManager(jax.devices()[-count:])
    assert manager.num_devices == count
    assert manager.devices == jax.devices()[-count:]
    manager.devices.clear()
    assert manager.num_devices == count
    for make in (manager.create_data_parallel_mesh, manager.create_model_parallel_mesh):
        assert list(make().devices) == jax.devices()[-count:]
    assert dict(manager.create_model_parallel_mesh().shape) == {"model": count}
    assert dict(manager.create_hybrid_mesh().shape) == {"data": 1, "model": 1}
    chosen = jax.devices()[:1]
    assert list(manager.create_device_mesh({"a": 1}, devices=chosen).devices) == chosen


@pytest.mark.parametrize("shape", [{"data": 16}, [("data", 3), ("model", 3)]])
def test_more_devices_than_there_are(shape: Any):
    with pytest.raises(ValueError, match=r"make_mesh: axes: a mesh of .* but there are 8"):
        DeviceMeshManager().create_device_mesh(shape)

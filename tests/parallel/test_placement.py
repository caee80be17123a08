"""`DevicePlacement`: on one device, on all, in parts, ahead of time."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcoll
from jaxcoll import DevicePlacement

TREE = {"x": np.arange(8.0).reshape(8, 1), "n": np.float32(3)}


def test_one_device():
    last = jax.devices()[-1]
    for placed in (
        DevicePlacement().place_on_device(TREE, last),
        DevicePlacement(default_device=last).place_on_device(TREE),
    ):
        assert {device for leaf in jax.tree.leaves(placed) for device in leaf.devices()} == {last}
        np.testing.assert_array_equal(placed["x"], TREE["x"])
    assert DevicePlacement().place_on_device(1.0).devices() == {jax.devices()[0]}


def test_a_sharding():
    mesh = jaxcoll.make_mesh({"data": 8})
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    placed = DevicePlacement().distribute_batch({"x": TREE["x"]}, sharding)
    assert placed["x"].sharding == sharding
    with pytest.raises(ValueError, match=r"distribute_batch: \['n'\]: .* replicate the leaf"):
        DevicePlacement().distribute_batch(TREE, sharding)
    single = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    assert DevicePlacement().distribute_batch(TREE, single)["n"].devices() == {jax.devices()[3]}


def test_replicas():
    everywhere = DevicePlacement().replicate_across_devices(TREE)
    some = DevicePlacement().replicate_across_devices(TREE, jax.devices()[2:4])
    for tree, devices in ((everywhere, jax.devices()), (some, jax.devices()[2:4])):
        for leaf in jax.tree.leaves(tree):
            assert leaf.devices() == set(devices)
            assert leaf.sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("batch_axis", "spec"),
    [(0, jax.P("data")), (1, jax.P(None, "data")), (-1, jax.P(None, "data"))],
)
def test_one_dimension(batch_axis: int, spec: Any):
    mesh = jaxcoll.make_mesh({"data": 4, "model": 2})
    tree = {"x": np.ones((4, 8)), "n": 1.0, "y": jnp.ones((8, 4), int)}
    placed = DevicePlacement().shard_batch_dim(tree, mesh, batch_axis)
    assert placed["x"].sharding.spec == placed["y"].sharding.spec == spec
    assert placed["n"].sharding.is_fully_replicated
    assert placed["y"].dtype == tree["y"].dtype


def test_dimensions_that_cannot_be_split():
    mesh = jaxcoll.make_mesh({"data": 8})
    place = DevicePlacement().shard_batch_dim
    with pytest.raises(ValueError, match=r"\['x'\]: dimension 0 of shape \(6,\) can't be split"):
        place({"x": np.ones(6)}, mesh)
    with pytest.raises(ValueError, match=r"\['x'\] of shape \(8,\) has no dimension 1"):
        place({"x": np.ones(8)}, mesh, batch_axis=1)
    with pytest.raises(ValueError, match="mesh_axis: 'model' is not an axis of the mesh"):
        place({"x": np.ones(8)}, mesh, mesh_axis="model")


@pytest.mark.product(buffer_size=(1, 2, 5), count=(0, 1, 4))
def test_prefetching(buffer_size: int, count: int):
    made = 0

    def numbers() -> Iterator[Any]:
        nonlocal made
        for i in range(count):
            made += 1
            yield {"x": np.full(3, i)}

    device = jax.devices()[1]
    seen = 0
    for tree in DevicePlacement().prefetch_to_device(numbers(), device, buffer_size):
        assert tree["x"].devices() == {device}
        assert tree["x"][0] == seen
        seen += 1
        assert made <= seen - 1 + buffer_size  # never more than the buffer ahead
    assert seen == count


def test_prefetching_in_parts():
    sharding = jax.NamedSharding(jaxcoll.make_mesh({"data": 8}), jax.P("data"))
    (tree,) = DevicePlacement().prefetch_to_device([{"x": np.ones(8)}], sharding)
    assert tree["x"].sharding == sharding
    with pytest.raises(ValueError, match="buffer_size: expected at least 1, got 0"):
        DevicePlacement().prefetch_to_device([], buffer_size=0)


def test_device_info():
    info = DevicePlacement().get_device_info()
    assert (info["num_devices"], info["platform"], info["process_count"]) == (8, "cpu", 1)
    assert info["devices"] == [str(device) for device in jax.devices()]

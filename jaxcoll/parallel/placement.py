"""Placement of data on devices, outside of mapped functions."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxcoll.mesh import check_mesh_axis
from jaxcoll.parallel.shares import compare, place


class DevicePlacement:
    """Puts trees of arrays on one device, on all, or in parts on each.

    The batch sizes for kinds of hardware that Artifex recommends have no source, and are left out.

    Source: the API of `artifex.generative_models.training.distributed.device_placement`.
    """

    def __init__(self, default_device: Any = None) -> None:
        """Takes the device that is meant where none is named; JAX's default without."""
        self.default_device = default_device

    def place_on_device(self, data: Any, device: Any = None) -> Any:
        """Returns the tree on one device: `device`, else the default one."""
        return jax.device_put(data, SingleDeviceSharding(self._device(device)))

    def distribute_batch(self, data: Any, sharding: Sharding) -> Any:
        """Returns the tree spread over the devices of a sharding.

        Between processes each gives its share, as in `DataParallel.shard_batch`.

        Raises:
            ValueError: a leaf can't be split so, or the processes' leaves do not fit together; the
                text names it.
        """
        return place("distribute_batch", data, sharding)

    def replicate_across_devices(self, data: Any, devices: Sequence[Any] | None = None) -> Any:
        """Returns the tree with a copy of every leaf, scalars too, on each device.

        Args:
            data: a tree of arrays. The devices' processes all give the same one, and compare it.
            devices: which; those of all processes without.

        Raises:
            ValueError: the processes' leaves differ, their values included; the text names one.
        """
        chosen = np.array(jax.devices() if devices is None else devices)
        sharding = NamedSharding(Mesh(chosen, ("devices",)), P())
        call = "replicate_across_devices"
        return place(call, data, sharding, is_global=True, with_contents=True)

    def shard_batch_dim(
        self, data: Any, mesh: Mesh, batch_axis: int = 0, mesh_axis: str = "data"
    ) -> Any:
        """Returns the tree with one dimension of every leaf split over a mesh axis.

        Between processes each gives its share, as in `DataParallel.shard_batch`, and all the same
        scalars.

        Args:
            data: a tree of arrays; scalars are replicated.
            mesh: where to.
            batch_axis: the dimension; from the end where it is negative.
            mesh_axis: the axis.

        Raises:
            ValueError: the mesh has no such axis, it does not divide a leaf's dimension, or the
                processes' leaves do not fit together.
        """
        call = "shard_batch_dim"
        check_mesh_axis(call, "mesh_axis", mesh, mesh_axis)

        def layout(name: str, leaf: Any) -> Sharding:
            ndim = np.ndim(leaf)
            if not ndim:
                return NamedSharding(mesh, P())
            if not -ndim <= batch_axis < ndim:
                raise ValueError(
                    f"{call}: batch_axis: {name} of shape {np.shape(leaf)} has no dimension "
                    f"{batch_axis}."
                )
            return NamedSharding(mesh, P(*[None] * (batch_axis % ndim), mesh_axis))

        said = {"batch_axis": str(batch_axis)}
        return place(call, data, NamedSharding(mesh, P(mesh_axis)), layout=layout, said=said)

    def prefetch_to_device(
        self, data_iterator: Iterable[Any], device: Any = None, buffer_size: int = 2
    ) -> Iterator[Any]:
        """Yields the iterator's trees from a device, with up to `buffer_size` on their way there.

        With two or more, transfers run while the caller computes. Nothing is read ahead beyond the
        buffer.

        Args:
            data_iterator: of trees of arrays; with a sharding between processes, of each process's
                shares, as in `DataParallel.shard_batch`.
            device: a device or a sharding; the default device without.
            buffer_size: trees on the device that are not yielded yet, 1 or more.

        Raises:
            ValueError: `buffer_size` is below 1. While it is iterated: a leaf can't be split so,
                the processes' leaves do not fit together, or one's iterator ends before another's.
        """
        if buffer_size < 1:
            raise ValueError(
                f"prefetch_to_device: buffer_size: expected at least 1, got {buffer_size}."
            )
        target = device if isinstance(device, Sharding) else self._device(device)
        return _prefetch(iter(data_iterator), target, buffer_size)

    def get_device_info(self) -> dict[str, Any]:
        """Returns what devices there are.

        Returns:
            `num_devices` and `num_local_devices`; `platform` and `device_kind` of the first;
            `devices`, all of them as text; `default_device`; `process_index`, `process_count`.
        """
        devices = jax.devices()
        return {
            "num_devices": len(devices),
            "num_local_devices": jax.local_device_count(),
            "platform": devices[0].platform,
            "device_kind": devices[0].device_kind,
            "devices": [str(device) for device in devices],
            "default_device": str(self._device(None)),
            "process_index": jax.process_index(),
            "process_count": jax.process_count(),
        }

    def _device(self, device: Any) -> Any:
        if device is not None:
            return device
        if self.default_device is not None:
            return self.default_device
        chosen = jax.config.jax_default_device
        return chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]


def _prefetch(trees: Iterator[Any], target: Any, buffer_size: int) -> Iterator[Any]:
    placed = _placed(trees, target)
    buffer = collections.deque(itertools.islice(placed, buffer_size))
    while buffer:
        yield buffer.popleft()
        # Only now: what was yielded no longer counts.
        buffer.extend(itertools.islice(placed, 1))


def _placed(trees: Iterator[Any], target: Any) -> Iterator[Any]:
    if not isinstance(target, Sharding):
        for tree in trees:
            yield jax.device_put(tree, target)
        return
    call = "prefetch_to_device"
    for tree in trees:
        yield place(call, tree, target, said={"the iterator": "a next tree"})
    if not target.is_fully_addressable:
        # Else the processes that have more would wait for this one.
        compare(call, [], target, is_global=False, said={"the iterator": "ended"})

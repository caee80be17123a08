"""Device meshes: grids of devices whose dimensions have names."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jaxcoll import _engine
from jaxcoll._errors import did_you_mean, listed

MeshShape = Mapping[str, int] | Iterable[tuple[str, int]]


def make_mesh(
    axes: MeshShape,
    *,
    devices: Sequence[Any] | None = None,
    axis_types: AxisType | Sequence[AxisType] | None = None,
    allow_unused: bool = False,
) -> Mesh:
    """Returns a mesh with named axes.

    Args:
        axes: the size of each axis by name, the slowest first: `{"data": -1, "tensor": 2}`. One
            size may be -1: as large as the devices allow.
        devices: which; all of the job without, host by host, so that the last axes stay on a host.
            Their order is that of the mesh, except where the platform knows a better one for its
            topology, as JAX does for TPUs.
        axis_types: one for all axes, or one for each; `AxisType.Auto` without.
        allow_unused: leave the last devices out where there are more than the mesh needs.

    Returns:
        A `jax.sharding.Mesh`.

    Raises:
        ValueError: a name that stands twice, a size that makes no sense, two sizes of -1, more
            devices than there are, or fewer without `allow_unused`.

    Example:
        >>> mesh = jaxcoll.make_mesh({"data": -1, "tensor": 2})
    """
    call = "make_mesh"
    pairs = _pairs(call, axes)
    devices = _by_host(jax.devices()) if devices is None else list(devices)
    sizes = _sizes(call, pairs, len(devices))
    needed = math.prod(sizes.values())
    shape = "x".join(map(str, sizes.values()))
    if needed > len(devices):
        raise ValueError(
            f"{call}: axes: a mesh of {shape} = {needed} devices, but there are {len(devices)}. "
            f"For simulated ones, call jaxcoll.simulate_cpu_devices({needed}) before JAX starts."
        )
    if needed < len(devices) and not allow_unused:
        raise ValueError(
            f"{call}: axes: a mesh of {shape} = {needed} devices leaves {len(devices) - needed} of "
            f"{len(devices)} unused. Make an axis larger (or -1), or say which are used, as with "
            f"devices=jax.devices()[:{needed}]."
        )
    if axis_types is None:
        axis_types = AxisType.Auto
    types = (axis_types,) * len(sizes) if isinstance(axis_types, AxisType) else tuple(axis_types)
    if len(types) != len(sizes):
        raise ValueError(
            f"{call}: axis_types: expected one, or one for each of the {len(sizes)} axes, got "
            f"{len(types)}."
        )
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices[:needed]
    )


def _by_host(devices: Sequence[Any]) -> list[Any]:
    """Returns devices in their order, but those of a host together."""
    if not _engine.knows_hosts():
        return list(devices)
    hosts: dict[str, list[Any]] = {}
    for device in devices:
        hosts.setdefault(_engine.host_of(device.process_index), []).append(device)
    return [device for of_host in hosts.values() for device in of_host]


def _pairs(call: str, axes: Any) -> list[tuple[str, int]]:
    """Returns names and sizes; NumPy's whole numbers count."""
    pairs = axes.items() if isinstance(axes, Mapping) else axes
    try:
        return [(name, _whole(size)) for name, size in pairs]
    except (TypeError, ValueError):
        raise ValueError(
            f'{call}: axes: expected a dict such as {{"data": 4, "model": 2}}, or a list of such '
            f"pairs, got {axes!r}."
        ) from None


def _whole(size: Any) -> Any:
    return (
        size if isinstance(size, bool) or not hasattr(size, "__index__") else operator.index(size)
    )


def _sizes(call: str, pairs: Sequence[tuple[str, int]], num_devices: int) -> dict[str, int]:
    """Returns checked sizes, with -1 replaced."""
    if not pairs:
        raise ValueError(f'{call}: axes: expected at least one axis, as in {{"data": -1}}.')
    sizes: dict[str, int] = {}
    for name, size in pairs:
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int):
            raise ValueError(
                f"{call}: axes: expected names with whole numbers, got {name!r}: {size!r}."
            )
        if name in sizes:
            raise ValueError(f'{call}: axes: "{name}" stands twice.')
        if size < 1 and size != -1:
            raise ValueError(
                f'{call}: axes: "{name}": expected a size of at least 1, or -1 for what is left, '
                f"got {size}."
            )
        sizes[name] = size
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(
            f"{call}: axes: only one size can be -1, not those of {listed(open_axes)}."
        )
    for name in open_axes:
        others = math.prod(size for size in sizes.values() if size != -1)
        if num_devices % others or num_devices < others:
            raise ValueError(
                f'{call}: axes: "{name}" is -1, but the other axes need {others} devices, which '
                f"does not divide the {num_devices} that there are."
            )
        sizes[name] = num_devices // others
    return sizes


def check_mesh_axis(call: str, argument: str, mesh: Mesh, axis: Any) -> None:
    """Raises ValueError where `axis` is not an axis of the mesh."""
    if axis not in mesh.axis_names:
        names = [str(name) for name in mesh.axis_names]
        raise ValueError(
            f"{call}: {argument}: {axis!r} is not an axis of the mesh, which has {listed(names)}."
            f"{did_you_mean(str(axis), names)} Pass one of these, or a mesh that has it."
        )


def check_auto(call: str, mesh: Mesh) -> None:
    """Raises ValueError where the mesh's axes are not Auto, as JAX's own `make_mesh` makes them."""
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        kinds = ", ".join(kind.name for kind in mesh.axis_types)
        raise ValueError(
            f"{call}: mesh: expected Auto axes, got {kinds}. Make it with jaxcoll.make_mesh, or "
            "with axis_types=(AxisType.Auto,) * number of axes."
        )


class DeviceMeshManager:
    """Makes meshes of a set of devices, as documented by Artifex.

    `jaxcoll.make_mesh` is the shorter way; what this class adds is that a mesh may leave devices
    unused. All its meshes have Auto axes and take the first devices.

    Source: the API of `artifex.generative_models.training.distributed.mesh`.
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        """Takes the devices to use; all of `jax.devices()` without."""
        self._devices = list(jax.devices() if devices is None else devices)

    @property
    def num_devices(self) -> int:
        """How many devices there are to use."""
        return len(self._devices)

    @property
    def devices(self) -> list[Any]:
        """The devices, as a list of its own."""
        return list(self._devices)

    def create_device_mesh(
        self, mesh_shape: MeshShape, devices: Sequence[Any] | None = None
    ) -> Mesh:
        """Returns a mesh.

        Args:
            mesh_shape: `{"data": 2, "model": 1}` or `[("data", 2), ("model", 1)]`. A size may be
                -1.
            devices: instead of the manager's.

        Raises:
            ValueError: it needs more devices than there are, or a size makes no sense.
        """
        chosen = self._devices if devices is None else devices
        return make_mesh(mesh_shape, devices=chosen, allow_unused=True)

    def create_data_parallel_mesh(
        self, num_devices: int | None = None, axis_name: str = "data"
    ) -> Mesh:
        """Returns a mesh of one axis over `num_devices`, or all, for data parallelism."""
        return self.create_device_mesh({axis_name: self._count(num_devices)})

    def create_model_parallel_mesh(
        self, num_devices: int | None = None, axis_name: str = "model"
    ) -> Mesh:
        """Returns a mesh of one axis over `num_devices`, or all, for model parallelism."""
        return self.create_device_mesh({axis_name: self._count(num_devices)})

    def create_hybrid_mesh(
        self,
        data_parallel_size: int = 1,
        model_parallel_size: int = 1,
        data_axis: str = "data",
        model_axis: str = "model",
    ) -> Mesh:
        """Returns a mesh of two axes, for data and for model parallelism.

        Raises:
            ValueError: it needs more devices than there are, or the axes have one name.
        """
        return self.create_device_mesh(
            [(data_axis, data_parallel_size), (model_axis, model_parallel_size)]
        )

    def get_mesh_info(self, mesh: Mesh) -> dict[str, Any]:
        """Returns `{"total_devices": 4, "axes": {"data": 2, "model": 2}}` of a mesh."""
        return {"total_devices": mesh.size, "axes": dict(mesh.shape)}

    def _count(self, num_devices: int | None) -> int:
        return self.num_devices if num_devices is None else num_devices

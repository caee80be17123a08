"""How a mesh and the arrays on it lie on devices, as a text and as a picture."""

import html
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxcoll import _engine
from jaxcoll._sharding import leaf_name

_COLORS = ("#9ecae1", "#fdd0a2", "#c7e9c0", "#dadaeb", "#fcbba1", "#d9d9d9", "#fee391", "#c6dbef")
_WIDE, _HIGH, _GAP = 108, 30, 10


def describe(tree: Any) -> str:
    """Returns a table: which device is where on a mesh, or how each array of a tree lies.

    Args:
        tree: a `jax.sharding.Mesh`, or a tree of arrays such as a `TrainState`; shapes with
            shardings will do.

    Returns:
        Lines of text. Of arrays: shape, dtype, spec, a device's part of it, and bytes on a device.

    Example:
        >>> print(jaxcoll.describe(state.params))
    """
    return _of_mesh(tree) if isinstance(tree, Mesh) else _of_arrays(tree)


def draw(tree: Any, path: str | Path) -> None:
    """Draws what `describe` says, as an SVG file.

    Args:
        tree: as there. Of an array the two largest dimensions are drawn, and which devices hold
            each part; devices of a process have a color of their own.
        path: of the file, which should end in `.svg`.
    """
    rows = _mesh_picture(tree) if isinstance(tree, Mesh) else _array_pictures(tree)
    high = max((y for _, y, *_ in rows), default=0) + _HIGH + _GAP
    wide = max((x + max(w, 7 * len(text)) for x, _, w, *_, text in rows), default=0) + _GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high:.0f}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for x, y, w, h, color, text in rows:
        if color:
            lines.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{color}" '
                'stroke="#444"/>'
            )
        at = x + (w / 2 if color else 0)
        anchor = "middle" if color else "start"
        lines.append(
            f'<text x="{at:.1f}" y="{y + h / 2 + 4:.1f}" text-anchor="{anchor}">'
            f"{html.escape(text)}</text>"
        )
    Path(path).write_text("\n".join([*lines, "</svg>"]) + "\n")


# ---- Texts ---------------------------------------------------------------------------------------


def _of_mesh(mesh: Mesh) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    *outer, last = mesh.axis_names
    head = ["", *(f"{last} {i}" for i in range(mesh.shape[last]))]
    rows = [
        [_place(outer, at), *map(_device_name, mesh.devices[at])]
        for at in np.ndindex(*mesh.devices.shape[:-1])
    ]
    return "\n".join([f"mesh of {mesh.size} devices: {axes}", *_table([head, *rows])])


def _place(axes: Sequence[str], at: Sequence[int]) -> str:
    return ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=True))


def _device_name(device: Any) -> str:
    name = f"{device.platform}:{device.id}"
    if jax.process_count() > 1:
        name += f" process {device.process_index}"
    if host := _host_of(device.process_index):
        name += f" on {host}"
    return name


def _host_of(process: int) -> str | None:
    """Returns the name of a process's host, in one word where that tells which; None of one."""
    if not _engine.knows_hosts():
        return None
    hosts = [_engine.host_of(i) for i in range(jax.process_count())]
    if len(set(hosts)) == 1:
        return None
    names = [host.partition(" ")[0] for host in hosts]
    return names[process] if len(set(names)) == len(set(hosts)) else hosts[process]


def _of_arrays(tree: Any) -> str:
    head = ["", "shape", "dtype", "spec", "on a device", "bytes there"]
    rows, total = [], 0
    for path, leaf in _arrays(tree):
        part = leaf.sharding.shard_shape(leaf.shape)
        there = math.prod(part) * leaf.dtype.itemsize
        total += there
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else "one device"
        of = [str(leaf.shape), str(leaf.dtype), str(spec), str(part), f"{there:,}"]
        rows.append([path, *of])
    rows.append(["all", "", "", "", "", f"{total:,}"])
    return "\n".join(_table([head, *rows]))


def _arrays(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if getattr(leaf, "sharding", None) is not None:
            yield leaf_name(path), leaf


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


# ---- Pictures: x, y, width, height, color or none, text ------------------------------------------

_Box = tuple[float, float, float, float, str, str]


def _color(devices: Sequence[Any]) -> str:
    return _COLORS[min(device.process_index for device in devices) % len(_COLORS)]


def _mesh_picture(mesh: Mesh) -> list[_Box]:
    *outer, last = mesh.axis_names
    left = _GAP + 8 * max(len(_place(outer, at)) for at in np.ndindex(*mesh.devices.shape[:-1]))
    boxes: list[_Box] = [
        (left + i * _WIDE, 0, _WIDE, _HIGH, "", f"{last} {i}") for i in range(mesh.shape[last])
    ]
    for row, at in enumerate(np.ndindex(*mesh.devices.shape[:-1])):
        y = (row + 1) * _HIGH
        boxes.append((_GAP, y, 0, _HIGH, "", _place(outer, at)))
        for column, device in enumerate(mesh.devices[at]):
            boxes.append(
                (left + column * _WIDE, y, _WIDE, _HIGH, _color([device]), _device_name(device))
            )
    return boxes


def _array_pictures(tree: Any) -> list[_Box]:
    boxes: list[_Box] = []
    y = float(_GAP)
    for path, leaf in _arrays(tree):
        spec = getattr(leaf.sharding, "spec", "")
        boxes.append((_GAP, y, 0, _HIGH / 2, "", f"{path}  {leaf.shape}  {spec}"))
        y += _HIGH / 2 + 4
        boxes += _parts(leaf, y)
        y += 2 * _HIGH + _GAP
    return boxes


def _parts(leaf: Any, y: float) -> list[_Box]:
    """Returns the parts of an array, along its two largest dimensions."""
    shape = leaf.shape
    drawn = sorted(np.argsort(shape, kind="stable")[-2:])
    holders: dict[Any, list[Any]] = {}
    for device, index in leaf.sharding.devices_indices_map(shape).items():
        bounds = tuple(index[d].indices(shape[d])[:2] for d in drawn)
        holders.setdefault(bounds, []).append(device)
    boxes = []
    for bounds, devices in holders.items():
        spans = [
            (low / shape[d], high / shape[d])
            for (low, high), d in zip(bounds, drawn, strict=True)
            if shape[d]
        ]
        (top, bottom), (left, right) = [(0.0, 1.0)] * (2 - len(spans)) + spans
        wide, high = 4 * _WIDE, 2 * _HIGH
        ids = ", ".join(str(device.id) for device in devices)
        boxes.append(
            (
                *(_GAP + left * wide, y + top * high),
                *((right - left) * wide, (bottom - top) * high),
                *(_color(devices), ids),
            )
        )
    return boxes

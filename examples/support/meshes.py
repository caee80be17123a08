"""A mesh from the command line."""

import math
from collections.abc import Mapping

AXES = ("pipe", "data", "fsdp", "tensor")


def parse(text: str) -> dict[str, int]:
    """Read `"data=2,tensor=2"`: the sizes of the axes that there are.

    Where none of `data` and `fsdp` is there, `data` is what is left, -1.

    Raises:
        SystemExit: It is something else.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or not size.removeprefix("-").isdigit():
            raise SystemExit(
                f"--mesh: expected axes of {', '.join(AXES)} with their sizes, such as "
                f"data=2,tensor=2, got {text!r}"
            )
        sizes[name] = int(size)
    return sizes if {"data", "fsdp"} & set(sizes) else {**sizes, "data": -1}


def num_devices(sizes: dict[str, int], given: int) -> int:
    """Return how many devices a mesh needs; `given` where one of its sizes depends on it."""
    return given if -1 in sizes.values() else math.prod(sizes.values())


def check_windows(parts: int, windows: Mapping[str, int]) -> None:
    """Refuse numbers of windows, by their options, that can't be split into equal `parts`.

    Raises:
        SystemExit: One of them can't.
    """
    for option, count in windows.items():
        if count % parts:
            raise SystemExit(
                f"{option}: {count} windows can't be split evenly over {parts} devices, those "
                f"along data and fsdp of --mesh. Use a multiple of {parts}, or another --mesh"
            )

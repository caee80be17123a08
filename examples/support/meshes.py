"""A mesh from the command line."""

import math

AXES = ("data", "tensor")


def parse(text: str) -> dict[str, int]:
    """Read `"data=2,tensor=2"`: the sizes of both axes, the slowest first.

    Without `tensor` it is 1, without `data` that is what is left, -1.

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
    return {**sizes, "data": sizes.get("data", -1), "tensor": sizes.get("tensor", 1)}


def num_devices(sizes: dict[str, int], given: int) -> int:
    """Return how many devices a mesh needs; `given` where one of its sizes depends on it."""
    return given if -1 in sizes.values() else math.prod(sizes.values())

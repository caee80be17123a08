"""Transformations for Optax; loaded on first use."""

from typing import TYPE_CHECKING, Any

from jaxcoll._lazy import load

if TYPE_CHECKING:
    from jaxcoll.parallel.synchronize import SynchronizeState as SynchronizeState
    from jaxcoll.parallel.synchronize import synchronize as synchronize

__all__ = ["SynchronizeState", "synchronize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load(f"{__name__}.{name}", "jaxcoll.parallel.synchronize", name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

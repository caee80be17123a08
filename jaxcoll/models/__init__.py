"""Example models, loaded on first use so that importing `jaxcoll` needs no Flax."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxcoll.models.transformer import TransformerLM as TransformerLM

_MODULES = {"TransformerLM": "jaxcoll.models.transformer"}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        # Only a missing Flax has this remedy; any other missing module is reported as itself.
        if (error.name or "").partition(".")[0] != "flax":
            raise
        raise ModuleNotFoundError(
            f"{__name__}.{name} needs Flax, which is not installed: pip install 'jaxcoll[flax]'",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])

"""Example models, loaded on first use so that importing `jaxcoll` needs no Flax."""

from typing import TYPE_CHECKING, Any

from jaxcoll._lazy import load

if TYPE_CHECKING:
    from jaxcoll.models.classifiers import PPClassifier as PPClassifier
    from jaxcoll.models.classifiers import SimpleClassifier as SimpleClassifier
    from jaxcoll.models.classifiers import TPClassifier as TPClassifier
    from jaxcoll.models.transformer import TransformerLM as TransformerLM

_MODULES = {
    "PPClassifier": "jaxcoll.models.classifiers",
    "SimpleClassifier": "jaxcoll.models.classifiers",
    "TPClassifier": "jaxcoll.models.classifiers",
    "TransformerLM": "jaxcoll.models.transformer",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load(f"{__name__}.{name}", _MODULES[name], name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])

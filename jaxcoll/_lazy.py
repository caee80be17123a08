"""Names that load their module on first use, and say which extra they lack."""

import importlib
import itertools
import os
import sys
from typing import Any

# Distribution that users may lack -> the extra of ours that brings it.
_EXTRAS = {"flax": "flax", "optax": "flax", "orbax": "orbax"}


def is_launcher() -> bool:
    """Tells whether this process is the command `jaxcoll run`, by either of its names."""
    words = [os.path.basename(word) for word in sys.orig_argv]
    return ("jaxcoll", "run") in itertools.pairwise(words)


def load(public: str, module: str, name: str) -> Any:
    """Returns `name` of a module, which is public as `public`.

    Raises:
        ModuleNotFoundError: it needs a package that is not installed; the text has the remedy.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise ModuleNotFoundError(
            f"{public} needs {package}, which is not installed: "
            f"pip install 'jaxcoll[{_EXTRAS[package]}]'",
            name=error.name,
        ) from error

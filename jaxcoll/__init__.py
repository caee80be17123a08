"""Fast, deterministic collectives for JAX, with errors instead of hangs."""

import importlib
from typing import TYPE_CHECKING, Any

# Not lazily: it adds the backend to JAX's trace context, and every function that was traced before
# would be traced and compiled again.
import jaxcoll._config

if TYPE_CHECKING:
    from jaxcoll import models as models
    from jaxcoll._accelerate import accelerate_lax as accelerate_lax
    from jaxcoll._config import config as config
    from jaxcoll._config import using as using
    from jaxcoll._errors import CollectiveError as CollectiveError
    from jaxcoll._errors import NativeUnavailableError as NativeUnavailableError
    from jaxcoll._explain import Report as Report
    from jaxcoll._explain import explain as explain
    from jaxcoll._info import Info as Info
    from jaxcoll._info import info as info
    from jaxcoll._processes import simulate_cpu_devices as simulate_cpu_devices
    from jaxcoll.collectives.all_gather import all_gather as all_gather
    from jaxcoll.collectives.all_reduce import all_reduce as all_reduce
    from jaxcoll.collectives.all_to_all import all_to_all as all_to_all
    from jaxcoll.collectives.broadcast import broadcast as broadcast
    from jaxcoll.collectives.ppermute import ppermute as ppermute
    from jaxcoll.collectives.reduce_scatter import reduce_scatter as reduce_scatter

# Public name -> module; loaded on first use, so that `import jaxcoll` costs next to nothing.
_HOMES = {
    "CollectiveError": "jaxcoll._errors",
    "Info": "jaxcoll._info",
    "NativeUnavailableError": "jaxcoll._errors",
    "Report": "jaxcoll._explain",
    "accelerate_lax": "jaxcoll._accelerate",
    "all_gather": "jaxcoll.collectives.all_gather",
    "all_reduce": "jaxcoll.collectives.all_reduce",
    "all_to_all": "jaxcoll.collectives.all_to_all",
    "broadcast": "jaxcoll.collectives.broadcast",
    "config": "jaxcoll._config",
    "explain": "jaxcoll._explain",
    "info": "jaxcoll._info",
    "ppermute": "jaxcoll.collectives.ppermute",
    "reduce_scatter": "jaxcoll.collectives.reduce_scatter",
    "simulate_cpu_devices": "jaxcoll._processes",
    "using": "jaxcoll._config",
}

__all__ = [*_HOMES, "__version__", "models"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name == "models":
        value = importlib.import_module("jaxcoll.models")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("jaxcoll")
    else:
        raise AttributeError(f"module 'jaxcoll' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if jaxcoll._config.accelerates_lax():  # by the environment
    importlib.import_module("jaxcoll._accelerate")

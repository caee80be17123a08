"""`accelerate_lax`: the switch that makes lax's own collectives native."""

from contextlib import AbstractContextManager
from typing import Any

import jaxcoll._lax_rules  # noqa: F401  (puts the rules in place that look at the switch)
from jaxcoll import _native
from jaxcoll._config import accelerate_context


class _Acceleration:
    """What `accelerate_lax` returns: the switch, on since the call, as a context manager."""

    latest: "_Acceleration | None" = None

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._before = accelerate_context.get_global()
        self._locals: list[AbstractContextManager[Any]] = []
        accelerate_context.set_global(enabled)
        _Acceleration.latest = self

    def __enter__(self) -> None:
        if _Acceleration.latest is self:  # nobody has called since
            accelerate_context.set_global(self._before)
            _Acceleration.latest = None
        local = accelerate_context(self._enabled)
        local.__enter__()
        self._locals.append(local)

    def __exit__(self, *exception: Any) -> None:
        self._locals.pop().__exit__(*exception)


def accelerate_lax(enabled: bool = True) -> AbstractContextManager[None]:
    """Makes lax's own collectives native, in your code and in every library.

    `jax.lax.psum`, `pmean`, `pmax`, `pmin`, `all_gather`, `psum_scatter`, `all_to_all` and
    `ppermute` then lower as the functions of this package do: natively where that is supported,
    unless the backend is `"lax"`. Their types, gradients and everything else stay lax's own.
    Functions that are compiled already are traced again, once.

    As a call, it counts from then on in all threads, until `accelerate_lax(False)`. As a context
    manager, it counts inside the `with` block, in this thread. `JAXCOLL_ACCELERATE_LAX=1` in the
    environment is a call at `import jaxcoll`.

    Args:
        enabled: False switches it off.

    Raises:
        TypeError: `enabled` is not a bool.

    Example:
        >>> jaxcoll.accelerate_lax()
        >>> state = train_step(state, batch)  # a program that knows jax.lax alone
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"accelerate_lax: enabled: expected a bool, got {enabled!r}.")
    if enabled:
        _native.missing_reason()  # logs it, once
    return _Acceleration(enabled)

"""Settings: `jaxcoll.config`, `jaxcoll.using`, and the environment variables behind them.

The backend is part of JAX's trace context, so a switch also takes effect on functions that are
already compiled: they are traced again for the new setting, and found in the cache for the old one.
"""

import functools as ft
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import jax

from jaxcoll._errors import one_of
from jaxcoll._limits import DEFAULT_COMPILE_TIMEOUT_S, checked_timeout, timeout_from
from jaxcoll._types import BACKENDS, Backend

logger = logging.getLogger("jaxcoll")


def checked_backend(call: str, argument: str, value: object) -> Backend:
    """Returns `value` as a Backend, or raises ValueError."""
    if value not in BACKENDS:
        raise ValueError(one_of(call, argument, value, BACKENDS))
    return cast(Backend, value)


def backend_from(environment: Mapping[str, str]) -> Backend:
    """Returns the backend that the environment asks for; "auto" where it is silent."""
    value = environment.get("JAXCOLL_BACKEND", "").strip()
    return checked_backend("environment", "JAXCOLL_BACKEND", value) if value else "auto"


def accelerates_from(environment: Mapping[str, str]) -> bool:
    """Tells whether the environment switches `accelerate_lax` on."""
    value = environment.get("JAXCOLL_ACCELERATE_LAX", "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(one_of("environment", "JAXCOLL_ACCELERATE_LAX", value, ("0", "1")))
    return value == "1"


# Local value: `using`. Global value: `config.backend`. None: the environment's.
_backend_context = jax.make_user_context(default_value=None)

# Local value: `with accelerate_lax()`. Global value: `accelerate_lax()`. None: the environment's.
accelerate_context = jax.make_user_context(default_value=None)

# Part of the context, so that what is compiled already is looked at again.
_strict_context = jax.make_user_context(default_value=False)

# Another value for each `freshly_traced()`.
_fresh_context = jax.make_user_context(default_value=0)
_fresh_values = itertools.count(1)


class Config:
    """The process's settings. One instance, `jaxcoll.config`; safe to use from several threads.

    Attributes:
        backend: `"auto"`, `"native"` or `"lax"`; what `backend=None` means where no
            `jaxcoll.using` is active. Initially `JAXCOLL_BACKEND`, else `"auto"`.
        timeout_s: how long a rank waits for the others, in seconds; None waits for ever. Takes
            effect at once, also on waits in progress. Initially `JAXCOLL_TIMEOUT_S`, else 300.
        compile_timeout_s: how long one that traces, lowers or compiles a program is waited for
            beyond that, in seconds; None: for ever. Initially `JAXCOLL_COMPILE_TIMEOUT_S`, else
            3600.
        reduction_order: `"layout"` or `"rank"`. On one host both add the ranks in their order, on
            any layout of processes and devices; over several hosts the ranks of a host come first
            either way. Initially `"layout"`.
        strict: turns warnings about likely mistakes into errors, also in functions that are
            compiled already. Initially False.
    """

    # A misspelt setting is an AttributeError.
    __slots__ = (
        "_accelerates_lax",
        "_compile_timeout_s",
        "_initial_backend",
        "_listeners",
        "_reduction_order",
        "_timeout_s",
    )

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Reads the initial values. Raises ValueError for a value that makes no sense."""
        self._initial_backend = backend_from(environment)
        self._timeout_s = timeout_from(environment)
        self._compile_timeout_s = timeout_from(
            environment, "JAXCOLL_COMPILE_TIMEOUT_S", DEFAULT_COMPILE_TIMEOUT_S
        )
        self._listeners: dict[str, list[Callable[[float | None], None]]] = {}
        self._accelerates_lax = accelerates_from(environment)
        self._reduction_order = "layout"

    @property
    def backend(self) -> Backend:
        return cast(Backend, _backend_context.get_global() or self._initial_backend)

    @backend.setter
    def backend(self, value: Backend) -> None:
        _backend_context.set_global(checked_backend("jaxcoll.config", "backend", value))

    @property
    def timeout_s(self) -> float | None:
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float | None) -> None:
        self._timeout_s = checked_timeout("jaxcoll.config", "timeout_s", value)
        self._tell("timeout_s")

    @property
    def compile_timeout_s(self) -> float | None:
        return self._compile_timeout_s

    @compile_timeout_s.setter
    def compile_timeout_s(self, value: float | None) -> None:
        self._compile_timeout_s = checked_timeout("jaxcoll.config", "compile_timeout_s", value)
        self._tell("compile_timeout_s")

    @property
    def reduction_order(self) -> str:
        return self._reduction_order

    @reduction_order.setter
    def reduction_order(self, value: str) -> None:
        known = ("layout", "rank")
        if value not in known:
            raise ValueError(one_of("jaxcoll.config", "reduction_order", value, known))
        self._reduction_order = value

    @property
    def strict(self) -> bool:
        return bool(_strict_context.get_global())

    @strict.setter
    def strict(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"jaxcoll.config: strict: expected a bool, got {value!r}.")
        _strict_context.set_global(value)

    def _on_change(self, name: str, listener: Callable[[float | None], None]) -> None:
        """Calls `listener` with the limit of that name now and at every change."""
        self._listeners.setdefault(name, []).append(listener)
        listener(getattr(self, name))

    def _tell(self, name: str) -> None:
        for listener in self._listeners.get(name, ()):
            listener(getattr(self, name))

    def __repr__(self) -> str:
        return (
            f"jaxcoll.config(backend={self.backend!r}, timeout_s={self.timeout_s!r}, "
            f"strict={self.strict!r})"
        )


config = Config(os.environ)


@contextmanager
def using(*, backend: Backend) -> Iterator[None]:
    """Sets the backend of this thread's collectives for the duration of a `with` block.

    It goes before `config.backend` and after a collective's own `backend=`. Functions that are
    compiled already are traced again inside, once for each backend.

    Args:
        backend: `"auto"` (native where it is supported and not known to be slower, else lax),
            `"native"` (an error where native can't serve) or `"lax"`.

    Raises:
        ValueError: another value.

    Example:
        >>> with jaxcoll.using(backend="lax"):
        ...     state = train_step(state, batch)
    """
    with _backend_context(checked_backend("jaxcoll.using", "backend", backend)):
        yield


def accelerates_lax() -> bool:
    """Tells whether lax's own collectives are to be native where this is traced."""
    value = accelerate_context.value
    if value is None:
        value = accelerate_context.get_global()
    return bool(config._accelerates_lax if value is None else value)


@contextmanager
def freshly_traced() -> Iterator[None]:
    """Has JAX trace and lower anew what is traced inside, whatever it remembers."""
    with _fresh_context(next(_fresh_values)):
        yield


class _Fork:
    """Whether this process is the child of one that used native calls."""

    is_child = False

    @classmethod
    def in_child(cls) -> None:
        """Has everything traced again, where the collectives can refuse."""
        cls.is_child = True
        _fresh_context.set_global(next(_fresh_values))


@ft.cache
def watch_forks() -> None:
    """Notices from now on that the process is forked."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_Fork.in_child)


def refuse_after_fork(call: str) -> None:
    """Raises RuntimeError in the child of a process that used collectives."""
    if _Fork.is_child:
        raise RuntimeError(
            f"{call}: this process was forked from one that had used jaxcoll and JAX, whose "
            "threads did not come along: every computation would hang. Start processes with "
            'multiprocessing.get_context("spawn"), or fork before JAX starts.'
        )


def resolve_backend(call: str, backend: Backend | None) -> Backend:
    """Returns the backend of one call: its argument, else `using`, else `config`."""
    if backend is not None:
        return checked_backend(call, "backend", backend)
    return cast(Backend, _backend_context.value or config.backend)

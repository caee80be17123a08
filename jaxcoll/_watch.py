"""`watch`: steps that don't finish, whichever path they take; and `allow_pause`."""

import collections
import contextlib
import functools as ft
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import jax

from jaxcoll import _compat, _native
from jaxcoll._config import config, logger
from jaxcoll._errors import CollectiveError
from jaxcoll._explain import explain
from jaxcoll.diagnosis import black_box, dumps, watcher
from jaxcoll.diagnosis.errors import collective_text, note_seen
from jaxcoll.diagnosis.stacks import Stacks

_LOOK_S = 0.1
# In which the errors of the native path come first.
_GRACE_S = 3.0
# How often a process tells the others how far it is, through JAX's coordination service.
_TELL_S = 2.0


_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def watch() -> contextlib.AbstractContextManager[None]: ...
@overload
def watch(fn: _F) -> _F: ...


def watch(fn: Callable[..., Any] | None = None) -> Any:
    """Has hangs reported and errors of collectives raised as `CollectiveError`.

    Around a block, or around a step function. Errors of the native path come from its own
    deadlines. For all else (jax.lax, several hosts, GPUs) a thread looks at what is watched: a
    block that does not end, or a step whose results are not there, 3 s after `config.timeout_s` is
    reported once, at level ERROR of the logger `jaxcoll`: the collectives of the program (as
    `explain` lists them), what this process does in Python, and in a job of several processes which
    of them have begun fewer steps, and what these do. Then a dump is written. A report ends
    nothing: XLA can't be interrupted. Time in which JAX compiles does not count, nor does that of
    `allow_pause`.

    Args:
        fn: a step function, jitted or not. Without one this is a context manager.

    Returns:
        The function, which returns at once, as before; results are awaited by the thread, which
        holds the latest ones until they are there. Or a context manager.

    Raises:
        CollectiveError: on the way out of the block or the function, in the place of JAX's error.

    Example:
        >>> step = jaxcoll.watch(train_step)
        >>> with jaxcoll.watch():
        ...     metrics = jax.block_until_ready(evaluate(state))
    """
    if fn is None:
        return _block()
    if not callable(fn):
        raise TypeError(f"watch(fn): expected a function, got {fn!r}.")
    watched = _Steps(fn)

    @ft.wraps(fn)
    def step(*args: Any, **kwargs: Any) -> Any:
        with _as_collective_error():
            return watched.call(*args, **kwargs)

    return step


@contextlib.contextmanager
def allow_pause(seconds: float) -> Iterator[None]:
    """Has the other processes wait for this one up to `seconds` more than `config.timeout_s`.

    For what only one rank does, such as a restore or an evaluation: the others, which wait in their
    next collective meanwhile, don't raise. Their own limit begins anew when the block ends or the
    seconds are over. A process that dies or calls another collective is an error all the same.

    Args:
        seconds: a positive number.

    Raises:
        ValueError: it is not.

    Example:
        >>> if jax.process_index() == 0:
        ...     with jaxcoll.allow_pause(3600):
        ...         evaluate(state)
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"allow_pause(seconds): expected a positive number, got {seconds!r}.")
    core = _native.core()
    _Pause.until = time.monotonic() + seconds
    if core is not None:
        watcher.start()
        core.pause(float(seconds))
    try:
        yield
    finally:
        _Pause.until = 0.0
        if core is not None:
            core.pause(0.0)


class _Pause:
    until = 0.0


@contextlib.contextmanager
def _as_collective_error() -> Iterator[None]:
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:  # a ValueError where JAX learns of it at once
        text = collective_text(error)
        if text is None:
            raise
        note_seen(text)
        raise CollectiveError(text) from error


@contextlib.contextmanager
def _block() -> Iterator[None]:
    watched = _Watched("the watched block", lambda: "")
    _Thread.get().add(watched)
    try:
        with _as_collective_error():
            yield
    finally:
        watched.is_done = True


class _Watched:
    """Something that is to end."""

    def __init__(self, name: str, listing: Callable[[], str]) -> None:
        self.name = name
        self.listing = listing
        self.waited_s = 0.0
        self.is_done = False
        self.is_reported = False

    def look(self) -> None:
        """Notes whether it has ended."""


class _Step(_Watched):
    def __init__(self, name: str, listing: Callable[[], str], results: Any) -> None:
        super().__init__(name, listing)
        self._results = [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]

    def look(self) -> None:
        # A result that was donated to the next step says nothing; the next step does.
        left = [x for x in self._results if not x.is_deleted()]
        with contextlib.suppress(RuntimeError):  # deleted meanwhile, or failed: not stuck
            left = [x for x in left if not x.is_ready()]
            self.is_done = not left
            return
        self.is_done = True


class _Steps:
    """The calls of a step function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._name = getattr(fn, "__name__", "step")
        self._count = 0

    def call(self, *args: Any, **kwargs: Any) -> Any:
        thread = _Thread.get()
        self._count += 1
        thread.begun[self._name] = self._count
        shapes = jax.tree.map(_shape, (args, kwargs))
        name = f"step {self._count} of {self._name}"
        listing = ft.partial(self._listing, *shapes)
        calling = _Watched(name, listing)
        thread.add(calling)
        try:
            results = self._fn(*args, **kwargs)
        finally:
            calling.is_done = True
        thread.add(_Step(name, listing, results))
        return results

    def _listing(self, args: Any, kwargs: Any) -> str:
        try:
            return str(explain(self._fn, *args, **kwargs))
        except Exception as error:  # a report without the list is better than none
            return f"its collectives can't be listed: {error}"


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


class _Thread(threading.Thread):
    """Looks at all that is watched in this process."""

    def __init__(self) -> None:
        super().__init__(name="jaxcoll-watch", daemon=True)
        self.begun: dict[str, int] = {}  # calls, by the name of the step function
        self._watched: collections.deque[_Watched] = collections.deque()
        self._stacks = Stacks()
        self._told_at = 0.0
        self._told = ""

    @staticmethod
    @ft.cache
    def get() -> "_Thread":
        thread = _Thread()
        thread.start()
        return thread

    def add(self, watched: _Watched) -> None:
        self._watched.append(watched)

    def run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            phase, stack = self._stacks.look()
            if phase == black_box.COMPILING or now < _Pause.until:
                before = now
            self._look(now - before, stack)
            self._tell(now, phase, stack)
            before = now

    def _look(self, passed_s: float, stack: str) -> None:
        while self._watched:
            first = self._watched[0]
            if not first.is_done:
                first.look()
            if not first.is_done:
                break
            self._watched.popleft()
        for watched in list(self._watched)[:1]:  # the others follow it
            watched.waited_s += passed_s
            limit_s = config.timeout_s
            is_late = limit_s is not None and watched.waited_s >= limit_s + _GRACE_S
            if is_late and not watched.is_reported:
                watched.is_reported = True
                self._report(watched, stack)

    def _report(self, watched: _Watched, stack: str) -> None:
        lines = [
            f"jaxcoll: {watched.name} has not ended within {watched.waited_s:.1f} s "
            f"(the limit is {config.timeout_s} s)",
            watched.listing(),
            "this process:",
            stack,
            *self._behind(),
        ]
        with contextlib.suppress(RuntimeError, OSError):
            lines.append(f"dumped to {dumps.dump()}")
        logger.error("%s", "\n".join(line for line in lines if line))

    # ---- The other processes ---------------------------------------------------------------------

    def _tell(self, now: float, phase: int, stack: str) -> None:
        """Tells the others how far this process is, when that changes and not often."""
        if now - self._told_at < _TELL_S or not jax.distributed.is_initialized():
            return
        card = json.dumps({"begun": self.begun, "phase": black_box.PHASES[phase], "stack": stack})
        self._told_at = now
        if card != self._told:
            self._told = card
            me, _ = _compat.process_id_and_count()
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone
                _compat.distributed_client().key_value_set(
                    f"jaxcoll/watch/{me}", card, allow_overwrite=True
                )

    def _behind(self) -> list[str]:
        """Says which processes have begun fewer steps than this one, and what they do."""
        if not jax.distributed.is_initialized():
            return []
        me, count = _compat.process_id_and_count()
        client = _compat.distributed_client()
        cards: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            for key, card in client.key_value_dir_get("jaxcoll/watch/"):
                cards[int(key.rpartition("/")[2])] = json.loads(card)
        lines = []
        for process in range(count):
            card = cards.get(process)
            if process == me:
                continue
            if card is None:
                lines.append(f"process {process} has not begun to watch a step")
                continue
            for name, begun in self.begun.items():
                other = card["begun"].get(name, 0)
                if other < begun:
                    lines.append(
                        f"process {process} has begun {other} calls of {name}, this one {begun}; "
                        f"it is {card['phase']}:\n{card['stack']}"
                    )
        return lines

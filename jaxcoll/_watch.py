"""`watch`: steps that don't finish, whichever path they take; and `allow_pause`."""

import atexit
import collections
import contextlib
import functools as ft
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import jax

from jaxcoll import _compat, _cuda, _decisions, _native
from jaxcoll._config import config, logger, resolve_backend, using
from jaxcoll._errors import CollectiveError
from jaxcoll._explain import explain
from jaxcoll._processes import xla_limit_s
from jaxcoll._steps import await_steps
from jaxcoll._types import Backend
from jaxcoll.diagnosis import black_box, dumps, stacks, standstill, watcher
from jaxcoll.diagnosis.errors import collective_text, note_seen

_LOOK_S = 0.1
# In which the errors of the native path come first.
_GRACE_S = 3.0
# How often a process tells the others how far it is, through JAX's coordination service.
_TELL_S = 2.0
# A process that has said that it is excused says so again meanwhile.
_STALE_S = 3 * _TELL_S
_JOIN_S = 5.0


_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def watch() -> contextlib.AbstractContextManager[None]: ...
@overload
def watch(fn: _F) -> _F: ...


def watch(fn: Callable[..., Any] | None = None) -> Any:
    """Has hangs reported and errors of collectives raised as `CollectiveError`.

    Around a block, or around a step function. Errors of the native path come from its own
    deadlines. For all else (jax.lax, several hosts, GPUs) a thread looks at what is watched: a
    block in which its thread stands still, or a step whose results are not there, 3 s after
    `config.timeout_s` is reported once, at level ERROR of the logger `jaxcoll`: the collectives of
    the program (as `explain` lists them for a jitted step; else those that were lowered last), what
    this process does in Python, and in a job of several processes which of them have begun fewer
    steps, and what these do. Then a dump is written. A report ends nothing: XLA can't be
    interrupted. XLA itself ends a process whose CPU devices wait for one another in a collective of
    its own, after 60 s where nothing has set another limit (see `simulate_cpu_devices`): what waits
    for results for half of that, while nothing in the process computes or a thread is in one
    callback, is reported then. Time in which JAX compiles does not count, nor does that of
    `allow_pause`, of this process or, where that is known, of others: on one host, or where they
    watch too.

    Args:
        fn: a step function, jitted or not. Without one this is a context manager.

    Returns:
        The function, which returns at once, as before; the thread holds a small result of each step
        until it is there. Or a context manager.

    Raises:
        CollectiveError: on the way out of the block or the function, in the place of JAX's error.
            A step returns before its program has run: what fails later JAX raises where the results
            are awaited, as a `JaxRuntimeError` (`error_info` reads it), unless that is in a block
            that is watched.

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
    end = time.monotonic() + min(float(seconds), _MOST_PAUSE_S)
    watcher.start()
    if jax.distributed.is_initialized():
        _Thread.get()  # tells the processes that watch
    _pauses.append(end)
    _tell_pause()
    try:
        yield
    finally:
        _pauses.remove(end)
        _tell_pause()


# When those that are in effect end.
_pauses: list[float] = []
_MOST_PAUSE_S = 1e8


def _tell_pause() -> None:
    core = _native.core()
    if core is not None:
        core.pause(max([0.0, *_pauses]) - time.monotonic() if _pauses else 0.0)


@contextlib.contextmanager
def _as_collective_error() -> Iterator[None]:
    num_known = len(_cuda.failures())
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:  # a ValueError where JAX learns of it at once
        text = collective_text(error, in_context=False)
        # What failed on a GPU makes XLA fail without saying why.
        text = text or _cuda.failure_behind(num_known)
        if text is None:
            raise
        note_seen(text)
        raise CollectiveError(text) from error
    if failures := _cuda.failures()[num_known:]:
        note_seen(failures[0])
        raise CollectiveError(failures[0])


@contextlib.contextmanager
def _block() -> Iterator[None]:
    watcher.start()
    watched = _Block()
    _Thread.get().add(watched)
    try:
        with _as_collective_error():
            yield
    finally:
        watched.is_done = True


class _Watched:
    """Something that is to end."""

    def __init__(self, name: str, listing: Callable[[], str], is_jaxs: bool = False) -> None:
        self.name = name
        self.listing = listing
        self.thread = threading.get_ident()
        self.waited_s = 0.0
        self.is_done = False
        self.is_reported = False
        self._is_jaxs = is_jaxs

    def look(self) -> None:
        """Notes whether it has ended, or goes on."""

    def waits_for_results(self) -> bool:
        """Tells whether what it waits for runs in JAX, not in Python code of its own."""
        seen = stacks.look(self.thread)
        return self._is_jaxs or seen.callbacks > 0 or seen.phase == black_box.AWAITING


class _Block(_Watched):
    """A block, whose thread may stand still."""

    def __init__(self) -> None:
        super().__init__("the watched block", _decisions.latest)
        self._clock = _clock_of_this_thread()
        self._spent_s = 0.0

    def look(self) -> None:
        if self._clock is None:
            return
        try:
            spent_s = time.clock_gettime(self._clock)
        except OSError:  # the thread is no more
            self.is_done = True
            return
        if spent_s - self._spent_s > _MOVES_S:
            self.waited_s = 0.0
        self._spent_s = spent_s


# What a thread computes at least between two looks that has not stood still.
_MOVES_S = 1e-4


def _clock_of_this_thread() -> int | None:
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.pthread_getcpuclockid(threading.get_ident())


class _Step(_Watched):
    """A step whose results are not there yet."""

    def __init__(self, name: str, listing: Callable[[], str], results: Any) -> None:
        super().__init__(name, listing, is_jaxs=True)
        arrays = [x for x in jax.tree.leaves(results) if _is_array(x)]
        small = [x for x in arrays if x.nbytes <= _SMALL]
        # All results of a program are there at once. Large ones are not to live longer for this.
        self._results = small or sorted(arrays, key=lambda x: x.nbytes)[:1]

    def look(self) -> None:
        # A result that was donated to the next step says nothing; the next step does.
        left = [x for x in self._results if not x.is_deleted()]
        with contextlib.suppress(RuntimeError):  # deleted meanwhile, or failed: not stuck
            left = [x for x in left if not x.is_ready()]
            self.is_done = not left
            return
        self.is_done = True


_SMALL = 1024  # bytes
_MOST_SHOWN = 8  # processes of which a report has the stacks


# How many step functions of a name there are.
_names: collections.Counter[str] = collections.Counter()


class _Steps:
    """The calls of a step function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        name = getattr(fn, "__name__", "step")
        _names[name] += 1
        # The processes of a job watch the same functions in the same order.
        self._name = name if _names[name] == 1 else f"{name} ({_names[name]})"
        self._count = 0

    def call(self, *args: Any, **kwargs: Any) -> Any:
        watcher.start()
        thread = _Thread.get()
        self._count += 1
        thread.begun[self._name] = self._count
        shapes = jax.tree.map(_shape, (args, kwargs))
        backend = resolve_backend("watch", None)
        name = f"step {self._count} of {self._name}"
        listing = ft.partial(self._listing, backend, *shapes)
        calling = _Watched(name, listing, is_jaxs=_is_jitted(self._fn))
        thread.add(calling)
        try:
            results = self._fn(*args, **kwargs)
        finally:
            calling.is_done = True
        thread.add(_Step(name, listing, results))
        return results

    def _listing(self, backend: Backend, args: Any, kwargs: Any) -> str:
        if not _is_jitted(self._fn):  # to look into it would be to run it once more
            return _decisions.latest()
        try:
            with using(backend=backend):
                return str(explain(self._fn, *args, **kwargs))
        except Exception as error:  # a report without the list is better than none
            return f"its collectives can't be listed: {error}\n{_decisions.latest()}"


def _is_jitted(fn: Callable[..., Any]) -> bool:
    return hasattr(fn, "trace")


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _shape(leaf: Any) -> Any:
    if _is_array(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


def _why_late(watched: _Watched, still_s: float) -> str | None:
    """Returns why to report it, in a process that has stood still for so long, or None."""
    limit_s = config.timeout_s
    if limit_s is not None and watched.waited_s >= limit_s + _GRACE_S:
        return f"the limit is {limit_s} s"
    waited_s = min(watched.waited_s, still_s)
    if waited_s < standstill.SHORT_S or not watched.waits_for_results():
        return None
    if waited_s < standstill.limit_before_xlas_s():
        return None
    return (
        "nothing in this process computes, or a callback does not end; if it stands in a "
        f"collective of XLA's own, XLA ends it {xla_limit_s()} s after its first device came there"
    )


class _Thread(threading.Thread):
    """Looks at all that is watched in this process."""

    def __init__(self) -> None:
        super().__init__(name="jaxcoll-watch", daemon=True)
        self.begun: dict[str, int] = {}  # calls, by the name of the step function
        self._ends = threading.Event()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._watched: list[_Watched] = []
        self._still = standstill.Stillness()
        self._told_at = 0.0
        self._told = ""
        self._beats: dict[int, tuple[int, float]] = {}  # of others: the last, and since when

    @staticmethod
    @ft.cache
    def get() -> "_Thread":
        thread = _Thread()
        thread.start()
        # After JAX has started, so before it ends.
        atexit.register(thread.end)
        return thread

    def end(self) -> None:
        """Ends it, when all steps have ended, of which it may have something to say.

        One that came back from JAX when the interpreter has ended would abort the process. After an
        interrupt the end of the diagnosis awaits the steps, for a moment.
        """
        if os.getpid() == self._pid:  # no forked child, in which it does not run
            try:
                if not watcher.is_interrupted():
                    await_steps()
            finally:  # interrupted again, say
                self._ends.set()
                self.join(_JOIN_S)

    def add(self, watched: _Watched) -> None:
        with self._lock:
            self._watched.append(watched)

    def run(self) -> None:
        before = time.monotonic()
        while not self._ends.wait(_LOOK_S):
            now = time.monotonic()
            seen = stacks.look()
            is_excused = seen.phase == black_box.COMPILING or now < max([0.0, *_pauses])
            core = _native.core()
            if is_excused or (core is not None and core.is_anyone_excused()):
                before = now
            try:
                self._look(now, now - before, seen)
                self._tell(now, seen, is_excused)
            except Exception:  # the next look may succeed
                logger.warning("jaxcoll: a look at what is watched failed", exc_info=True)
            before = now

    def _look(self, now: float, passed_s: float, seen: stacks.Look) -> None:
        with self._lock:
            watched = list(self._watched)
        for each in watched:
            if not each.is_done:
                each.look()
        with self._lock:
            self._watched = [each for each in self._watched if not each.is_done]
        waiting = [each for each in watched if not each.is_done]
        steps = [each for each in waiting if isinstance(each, _Step)]
        waiting = [each for each in waiting if each not in steps[1:]]  # those before it end first
        for each in waiting:
            each.waited_s += passed_s
        longest_s = max([0.0, *(each.waited_s for each in waiting)])
        if longest_s < standstill.SHORT_S or passed_s > standstill.LATE_S:
            self._still.begin(now - min(longest_s, standstill.SHORT_S))
            still_s = 0.0
        else:
            still_s = self._still.look(now, seen)
        for each in waiting:
            if each.is_reported or (why := _why_late(each, still_s)) is None:
                continue
            if each.is_done:  # meanwhile
                continue
            cards = self._cards()
            if self._is_anyone_excused(now, cards):
                each.waited_s -= _TELL_S  # asks again then
                continue
            each.is_reported = True
            self._report(each, why, cards)

    def _report(self, watched: _Watched, why: str, cards: dict[int, dict[str, Any]]) -> None:
        late = f"jaxcoll: {watched.name} has not ended within {watched.waited_s:.1f} s"
        lines = [f"{late} ({why})", "this process:", stacks.look(watched.thread).stack]
        lines += self._others(cards)
        with contextlib.suppress(RuntimeError, OSError):
            lines.append(f"dumped to {dumps.of_report(lines[0])}")
        logger.error("%s", "\n".join(line for line in lines if line))
        # To trace a step can take longer than XLA waits.
        if not self._ends.is_set() and (listing := watched.listing()):
            logger.error("jaxcoll: the collectives of %s:\n%s", watched.name, listing)

    # ---- The other processes ---------------------------------------------------------------------

    def _tell(self, now: float, seen: stacks.Look, is_excused: bool) -> None:
        """Tells the others how far this process is, when that changes and not often."""
        if now - self._told_at < _TELL_S or not jax.distributed.is_initialized():
            return
        about = {"begun": self.begun, "phase": black_box.PHASES[seen.phase], "stack": seen.stack}
        # Who says no more that it is excused has stopped, or died.
        beat = int(now / _TELL_S) if is_excused else 0
        card = json.dumps({**about, "is_excused": is_excused, "beat": beat})
        self._told_at = now
        if card != self._told:
            self._told = card
            me, _ = _compat.process_id_and_count()
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone
                _compat.distributed_client().key_value_set(
                    f"jaxcoll/watch/{me}", card, allow_overwrite=True
                )

    def _cards(self) -> dict[int, dict[str, Any]]:
        """Returns what other processes have told, by process."""
        if not jax.distributed.is_initialized():
            return {}
        me, _ = _compat.process_id_and_count()
        cards: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            for key, card in _compat.distributed_client().key_value_dir_get("jaxcoll/watch/"):
                cards[int(key.rpartition("/")[2])] = json.loads(card)
        cards.pop(me, None)
        return cards

    def _is_anyone_excused(self, now: float, cards: dict[int, dict[str, Any]]) -> bool:
        """Tells whether another process has a reason not to come, of which it still tells."""
        found = False
        for process, card in cards.items():
            beat, since = self._beats.get(process, (None, now))
            since = since if card["beat"] == beat else now
            self._beats[process] = card["beat"], since
            found |= card["is_excused"] and now - since < _STALE_S
        return found

    def _others(self, cards: dict[int, dict[str, Any]]) -> list[str]:
        """Says which processes have begun fewer steps than this one, if any, and what they do.

        Where none has, what all do.
        """
        me, count = _compat.process_id_and_count()
        silent = {
            process: dumps.state_of(box.about()["pid"]) for process, box in dumps.silent().items()
        }
        unknown, behind, rest = [], [], []
        for process in (each for each in range(count) if each != me):
            card = cards.get(process)
            if card is None:
                unknown.append(f"process {process} has not begun to watch a step")
                continue
            state = silent.get(process)
            phase = card["phase"] if state is None else f"{state}; it was {card['phase']}"
            doing = f"it is {phase}:\n{card['stack']}"
            late = [
                f"process {process} has begun {other} calls of {name}, this one {begun}; {doing}"
                for name, begun in self.begun.items()
                if (other := card["begun"].get(name, 0)) < begun
            ]
            behind += late
            rest.append(f"process {process}: {doing}")
        return unknown + (behind or rest[:_MOST_SHOWN])

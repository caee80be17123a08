"""A main thread that waits for results which nothing of this process computes.

Of calls that the engine waits in, the engine says more. What is left are XLA's own collectives on
CPU: those of programs on `jax.lax`, and those that the compiler inserts, say to read one element of
an array that another device failed to make. XLA ends the process after a limit of its own.
"""

import contextlib
import math
import os
import threading
import time

import jax

from jaxcoll import _decisions, _native
from jaxcoll._config import config
from jaxcoll._processes import xla_limit_s
from jaxcoll.diagnosis import black_box
from jaxcoll.diagnosis.stacks import Look

# So long a wait is nothing to look into.
SHORT_S = 2.0
# After a longer time between two looks, the process was stopped, or does not get its turns.
LATE_S = 1.0
# After so many looks in a row a thread has something to do; a look without takes some of it back.
_BUSY = 3.0
_IDLE = 0.25
# Part of the time between two looks that the others have computed, where one of them was busy.
_SHARE = 0.2
# The engine's errors come first, and XLA's limit comes later. That counts from when the first
# device came to a collective, which is not seen: the rest is for what others computed after that.
_GRACE_S = 3.0
_OF_XLA = 0.5
WAITS = (black_box.AWAITING, black_box.CALLBACK)


class Stillness:
    """Since when nothing of this process computes, as looks several times a second show.

    Or since when, whatever it computes, a thread has been in one callback: XLA does not wait for it
    any longer than for one that sleeps.
    """

    def __init__(self) -> None:
        self._functions: object = None
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Begins anew."""
        self._since = self._last = now
        self._spent_s = _spent_by_others_s()
        self._level = 0.0

    def look(self, now: float, seen: Look) -> float:
        """Returns for how many seconds, after another look at the time `now`.

        While a call of the engine is open, whose errors say more, it begins anew, too.
        """
        is_in_one_callback = _leaves_devices_waiting(seen) and seen.functions == self._functions
        self._functions = seen.functions
        spent_s = _spent_by_others_s()
        has_spent = spent_s - self._spent_s > _SHARE * (now - self._last)
        self._last, self._spent_s = now, spent_s
        self._level = max(0.0, self._level + (1 if has_spent or _is_busy() else -_IDLE))
        if (self._level >= _BUSY and not is_in_one_callback) or _is_in_a_call():
            self.begin(now)
        return now - self._since


class Standstill:
    """What the looks at this process, several times a second, have shown of its present wait."""

    def __init__(self) -> None:
        self._still = Stillness()
        self._where: tuple[int, object] | None = None
        self._begin(0.0)

    def look(self, seen: Look, now: float) -> str | None:
        """Returns what there is to say after another look, at the time `now`: once for a wait."""
        where = (seen.phase, seen.functions)
        is_another = where != self._where or now - self._last > LATE_S
        self._last, self._where = now, where
        if seen.phase not in WAITS or is_another:
            self._begin(now)
            return None
        if now - self._since < SHORT_S or self._is_told:
            return None
        still_s = self._still.look(now, seen)
        limit_s = limit_before_xlas_s()
        # A callback may take its time, but for what XLA would not wait for.
        if not seen.callbacks and config.timeout_s is not None:
            limit_s = min(limit_s, config.timeout_s + _GRACE_S)
        if still_s < limit_s or jax.default_backend() != "cpu":
            return None
        self._is_told = True
        return (
            f"jaxcoll: this process has waited for results for {now - self._since:.1f} s and "
            f"{'is in one callback' if seen.callbacks else 'computes nothing'}. It may stand in a "
            f"collective of XLA's own, which ends the process {xla_limit_s()} s after its first "
            f"device came to it.\n{_decisions.latest()}\nthis process:\n{seen.stack}"
        )

    def note_told(self) -> None:
        """Notes that something else has been said of the present wait."""
        self._is_told = True

    def _begin(self, now: float) -> None:
        self._since = self._last = now
        self._still.begin(now)
        self._is_told = False


def limit_before_xlas_s() -> float:
    """Returns after how long XLA is near to ending a process that stands in one of its collectives.

    That is where devices of the process wait for one another; JAX must have started.
    """
    is_ended = jax.default_backend() == "cpu" and jax.local_device_count() > 1
    return _OF_XLA * xla_limit_s() if is_ended else math.inf


def _leaves_devices_waiting(seen: Look) -> bool:
    """Tells whether there are callbacks, but not on every device: the others may wait for these."""
    return 0 < seen.callbacks < jax.local_device_count()


def _is_in_a_call() -> bool:
    """Tells whether a call of the engine is open, whose errors say more."""
    box = black_box.own()
    return box is not None and bool((box.calls()["resumed"] == 0).any())


def _is_busy() -> bool:
    """Tells whether another thread runs, or would if it got its turn, as far as can be known."""
    core = _native.core()
    if core is not None:
        return core.is_busy()
    own = str(threading.get_native_id())
    with contextlib.suppress(OSError):  # no Linux
        return any(_state(task) in "RD" for task in os.listdir(_TASKS) if task != own)
    return False


_TASKS = "/proc/self/task"


def _state(task: str) -> str:
    with contextlib.suppress(OSError), open(f"{_TASKS}/{task}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return "X"  # it is no more


def _spent_by_others_s() -> float:
    """Returns what the other threads have computed: one that waits for the interpreter sleeps."""
    return time.process_time() - time.thread_time()

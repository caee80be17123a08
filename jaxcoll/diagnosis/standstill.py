"""A main thread that waits for results which nothing of this process computes.

Of calls that the engine waits in, the engine says more. What is left are XLA's own collectives on
CPU: those of programs on `jax.lax`, and those that the compiler inserts, say to read one element of
an array that another device failed to make. XLA ends the process after a limit of its own.
"""

import jax

from jaxcoll import _decisions, _native
from jaxcoll._config import config
from jaxcoll._processes import xla_limit_s
from jaxcoll.diagnosis import black_box
from jaxcoll.diagnosis.stacks import Look

# So long a wait is nothing to look into.
_SHORT_S = 2.0
# After a longer time between two looks, the process was stopped, or does not get its turns.
_LATE_S = 1.0
# Part of the looks at which a thread may have something to do.
_BUSY = 0.2
# The engine's errors come first, and XLA's limit comes later.
_GRACE_S = 3.0
_OF_XLA = 0.75


class Standstill:
    """What the looks at this process, several times a second, have shown of its present wait."""

    def __init__(self) -> None:
        self._begin(0.0)

    def look(self, seen: Look, now: float) -> str | None:
        """Returns what there is to say after another look, at the time `now`: once for a wait."""
        is_late = now - self._last > _LATE_S
        self._last = now
        if seen.phase != black_box.AWAITING or seen.callbacks or is_late:
            self._begin(now)
            return None
        waited_s = now - self._since
        if waited_s < _SHORT_S or self._is_told:
            return None
        if _is_in_a_call():  # until now the wait was for that
            self._begin(now)
            return None
        self._looks += 1
        self._busy += _is_busy()
        limit_s = _OF_XLA * xla_limit_s()
        if config.timeout_s is not None:
            limit_s = min(limit_s, config.timeout_s + _GRACE_S)
        is_busy = self._busy > _BUSY * self._looks
        if waited_s < limit_s or is_busy or jax.default_backend() != "cpu":
            return None
        self._is_told = True
        return (
            f"jaxcoll: this process has waited for results for {waited_s:.1f} s and computes "
            "nothing. It may stand in a collective of XLA's own, which ends the process "
            f"{xla_limit_s()} s after it began.\n{_decisions.latest()}\nthis process:\n{seen.stack}"
        )

    def _begin(self, now: float) -> None:
        self._since = self._last = now
        self._looks = self._busy = 0
        self._is_told = False


def _is_in_a_call() -> bool:
    """Tells whether a call of the engine is open, whose errors say more."""
    box = black_box.own()
    return box is not None and bool((box.calls()["resumed"] == 0).any())


def _is_busy() -> bool:
    core = _native.core()
    return core is None or core.is_busy()

"""Failures of which the program does not know yet: XLA tells when all devices are done with it."""

import math
import os

from jaxcoll._processes import xla_limit_s
from jaxcoll.diagnosis import errors
from jaxcoll.diagnosis.stacks import Look
from jaxcoll.diagnosis.standstill import LATE_S, SHORT_S, WAITS, limit_before_xlas_s

# What failed longer before the main thread began to wait is of an earlier program.
_BEFORE_S = 2.0


class Withheld:
    """What the looks at this process, several times a second, have shown of errors on their way."""

    def __init__(self) -> None:
        self._waits_since = self._last = 0.0
        self._since: dict[str, float] = {}  # when each was seen first
        self._told: set[str] = set()

    def look(self, seen: Look, now: float) -> str | None:
        """Returns what there is to say after another look, at the time `now`: once for an error."""
        self._since = {text: self._since.get(text, now) for text in errors.unseen()}
        self._told &= set(self._since)
        if seen.phase not in WAITS or now - self._last > LATE_S:
            self._waits_since = now
        self._last = now
        begin = self._waits_since - _BEFORE_S
        texts = [
            text
            for text, since in self._since.items()
            if text not in self._told and begin <= since <= now - SHORT_S
        ]
        if not texts or now - self._waits_since < SHORT_S:
            return None
        self._told.update(texts)
        return "\n".join(
            [
                f"jaxcoll: a call has failed, of which the program learns later: {_why(seen)}.",
                *texts,
                "this process:",
                seen.stack,
            ]
        )


def _why(seen: Look) -> str:
    if seen.callbacks:
        return (
            "a callback is not over. For one that never ends JAX waits at the exit, too: what ends "
            f"the process is `kill {os.getpid()}`, not Ctrl-C"
        )
    why = "a device of this process is not done"
    if math.isinf(limit_before_xlas_s()):
        return why
    return (
        f"{why}. It may stand in a collective of XLA's own, which ends the process {xla_limit_s()} "
        "s after its first device came to it"
    )
